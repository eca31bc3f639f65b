"""The sandbox that chat templates run in: a template that never ends, or makes gigabytes, ends with an error instead.

jinja2's own sandbox keeps a template from reaching out. What it lacks are bounds, and a bound from outside, on a
template's output, sees nothing of a loop that writes nothing or of a text that is doubled forty times. So a template is
rewritten before it is compiled: each turn of a loop and each call of a macro is a step, and steps are counted; no value
that an operator, a method or a filter makes is larger than a bound; and what is written is counted where it is written,
into a variable too. Filters and methods that could make more of less are not offered. A process of its own for the
template, with a limit of memory, was rejected: it costs each call two trips through a pipe.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jinja2
import jinja2.filters
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from prefixgate.gateway.template_bounds import with_bounds

MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
"""Of the thread's own time, so that a busy machine refuses nobody."""
MIN_SIZE = 1 << 20
"""Characters that a value may have however short the prompts are that may be rendered."""
_TIMES = 8
"""How often as much as one value may hold can be written, and made by filters, in all: a text can be written by a
macro, then from a variable, then into the output."""
_MAX_POWER_BITS = 4096
_MAX_PADDING = 64
"""Characters by which ``indent`` and ``tojson`` may indent, and digits to which ``round`` may round."""

_FILTERS = frozenset(
    (
        *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "forceescape"),
        *("int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse"),
        *("safe", "select", "selectattr", "sort", "string", "striptags", "title", "trim", "truncate", "unique"),
        *("upper", "wordcount"),
    )
)
"""Of jinja2's own, those that make no more than they are given."""
_GROWING_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "translate", "zfill"})
_FORMATS = frozenset({"format", "format_map"})
_WIDE_FIELD = re.compile(r"\d{4}|\*|\{[^{}]*\{")
"""In a format: a field as wide as a text is long, or whose width is a value."""
_FIELD_CHARACTERS = 999


class TemplateBoundError(Exception):
    """A template did more than it may, and what."""


@dataclass(slots=True)
class _Render:
    """What one rendering has done, and may do."""

    limit: int
    most: int
    end: float
    steps: int = 0
    written: int = 0
    made: int = 0


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles and renders templates within bounds. Thread safe: each rendering counts for itself."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        """``options`` are jinja2's."""
        # Not optimized: constants would be computed when the template is compiled, where nothing is counted.
        super().__init__(optimized=False, **options)
        self.filters = {
            name: found if name in _FILTERS else partial(self._refuse, f"the filter {name}")
            for name, found in self.filters.items()
        }
        self.filters |= {"indent": self._indent, "join": self._join, "replace": self._replace, "tojson": self._to_json}
        self.filters |= {"round": self._round, "sum": self._sum}
        del self.globals["lipsum"]
        self._render: ContextVar[_Render] = ContextVar("render")

    def compiled(self, source: str) -> jinja2.Template:
        """Compile a template with its bounds. Raises what the compiler raises."""
        code = self.compile(with_bounds(self.parse(source)))
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def render(self, template: jinja2.Template, values: Mapping[str, Any], *, limit: int) -> str:
        """Render a text that is to have at most ``limit`` characters; a little more may come.

        Raises TemplateBoundError, and whatever a template can raise.
        """
        token = self._render.set(_Render(limit, max(MIN_SIZE, 2 * limit), time.thread_time() + MAX_SECONDS))
        try:
            return template.render(values)
        finally:
            self._render.reset(token)

    # What templates call once they are rewritten.

    def step(self, text: int) -> bool:
        """Count a turn of a loop, or a call, that writes so many characters of the template's own."""
        render = self._look()
        render.steps += 1
        if render.steps > MAX_STEPS:
            raise TemplateBoundError(f"take the chat template more than {MAX_STEPS:,} steps")
        self._count(render, text)
        return True

    def written(self, value: Any) -> Any:
        """Count a value that is written."""
        render = self._render.get()
        self._count(render, _size(value, render.most))
        return value

    def bounded(self, value: Any) -> Any:
        """Check the size of a value that was just made, with all that is in it."""
        if isinstance(value, str):  # most values are, and take no time
            self._check(self._render.get(), len(value))
        else:
            self._check(self._look(), _size(value, self._most))
        return value

    def joined(self, *values: Any) -> str:
        """Join texts, as the operator ``~`` does."""
        self._check(self._look(), sum(_size(value, self._most) for value in values))
        return "".join(map(str, values))

    # What the sandbox asks.

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right`` where the result is small enough."""
        if operator == "%" and isinstance(left, str):
            self._check_format(left, [right])
        elif operator == "*":
            self._check(self._look(), _product_size(left, right))
        elif operator == "**" and isinstance(left, int) and left.bit_length() * abs(right) > _MAX_POWER_BITS:
            raise TemplateBoundError(f"make the chat template reckon with more than {_MAX_POWER_BITS} bits")
        return self.bounded(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # as in the base class
        """Call what the template calls; a method of a text only where its result is small enough."""
        # The base class wraps the methods that format texts.
        method = getattr(__obj, "__wrapped__", __obj)
        subject, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if subject is __self:
            return __obj(*args)
        if isinstance(subject, str):
            if name in _GROWING_METHODS:
                __self._refuse(f"{name}()")
            if name == "replace":
                return __self._replace(subject, *args)
            if name == "join":
                return __self._join(args[0], subject)
            if name in _FORMATS:
                __self._check_format(subject, [*args, *kwargs.values()])
        elif not isinstance(__obj, jinja2.runtime.Macro) or __obj.catch_varargs or __obj.catch_kwargs:
            # What else keeps its arguments, and so could pack a value into itself again and again.
            __self.bounded([*args, *(value for key, value in kwargs.items() if not key.startswith("_"))])
        return super().call(__context, __obj, *args, **kwargs)

    @property
    def _most(self) -> int:
        return self._render.get().most

    def _look(self) -> _Render:
        render = self._render.get()
        if time.thread_time() > render.end:
            raise TemplateBoundError(f"take the chat template longer than {MAX_SECONDS:g} seconds")
        return render

    def _count(self, render: _Render, size: int) -> None:
        render.written += size
        if render.written > _TIMES * render.most:
            raise TemplateBoundError(f"come to more than {render.limit} characters in the template")

    def _check(self, render: _Render, size: int) -> None:
        if size > render.most:
            raise TemplateBoundError(f"come to more than {render.limit} characters in the template")

    def _make(self, size: int) -> None:
        """Count what a filter is about to make: many can be made before the list of them is seen."""
        render = self._look()
        render.made += size
        self._check(render, max(size, render.made // _TIMES))

    def _check_format(self, text: str, values: Iterable[Any]) -> None:
        if _WIDE_FIELD.search(text):
            self._refuse("fields that are wide, or as wide as a value says,")
        fields = text.count("{") + text.count("%")
        self._make(len(text) + fields * (_FIELD_CHARACTERS + sum(_size(value, self._most) for value in values)))

    def _refuse(self, what: str, *_: Any, **__: Any) -> NoReturn:
        raise TemplateBoundError(f"make the chat template use {what} which this sandbox does not offer")

    # Filters that can make much of little, within bounds.

    def _replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
        text = str(value)
        found = text.count(old) if count is None or count < 0 else min(count, text.count(old))
        self._make(len(text) + found * max(0, len(new) - len(old)))
        return text.replace(old, new, found)

    def _join(self, values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
        parts = [value if attribute is None else self.getitem(value, attribute) for value in values]
        self._make(sum(_size(part, self._most) + len(separator) for part in parts))
        return separator.join(map(str, parts))

    def _indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text, pad = str(value), width if isinstance(width, str) else " " * min(width, _MAX_PADDING)
        self._make(len(text) + (text.count("\n") + 1) * len(pad))
        return str(jinja2.filters.do_indent(text, pad, first, blank))

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As chat templates expect it: jinja2's own escapes characters for HTML, which no model was trained on."""
        pad = indent if indent is None else min(indent, _MAX_PADDING)
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=pad, separators=separators, sort_keys=sort_keys)
        parts = list[str]()
        for part in encoder.iterencode(value):
            self._make(len(part))
            parts.append(part)
        return "".join(parts)

    def _round(self, value: float, precision: int = 0, method: Any = "common") -> float:
        if abs(precision) > _MAX_PADDING:
            raise TemplateBoundError(f"make the chat template round to {precision} digits")
        return jinja2.filters.do_round(value, precision, method)

    def _sum(self, values: Iterable[Any], attribute: str | None = None) -> Any:
        return sum(value if attribute is None else self.getitem(value, attribute) for value in values)


def _size(value: Any, most: int) -> int:
    """Count the characters that a value comes to as text, about; no further than to where it is more than ``most``."""
    if isinstance(value, str):
        return len(value)
    size, waiting = 0, [value]
    while waiting and size <= most:
        part = waiting.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, int):
            size += 8 + part.bit_length() // 3
        elif isinstance(part, Mapping):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            waiting += part
        elif isinstance(part, jinja2.utils.Namespace):
            # It can hold itself, and is not looked at when something is put into it.
            raise TemplateBoundError(
                "make the chat template use a namespace as a value, which this sandbox does not offer"
            )
        size += 4
    return size


def _product_size(left: Any, right: Any) -> int:
    for many, number in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(number, int):
            return max(1, len(many)) * max(0, number)
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) // 3
    return 0
