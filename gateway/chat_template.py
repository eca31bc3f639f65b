"""A conversation to the one text that the model was trained on, by the model's own chat template.

The template comes from the model's folder and so from whoever published the model: it runs in a sandbox, and within
limits of size and time.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

RENDER_SECONDS = 5.0
"""A template that is still at work after this is given up. Asked after each piece of output, so a loop that writes
nothing is not stopped; the sandbox bounds ranges, and the number of messages bounds the rest."""

_SHOWN_CHARACTERS = 300


class TemplateRefusedError(Exception):
    """The chat template cannot be served, and why."""


class ChatTemplateError(Exception):
    """The template does not take these messages, and why. The text can be shown to the client."""


class ChatTemplate:
    """A compiled template. Thread safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile; ``special_tokens`` are the texts that the template may name, such as ``bos_token``.

        Raises TemplateRefusedError.
        """
        # The options and names are those that Hugging Face templates are written for.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(special_tokens)
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        environment.globals |= {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # whatever a template's syntax can make the compiler raise
            raise TemplateRefusedError(f"chat_template: does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]], *, max_characters: int, extra_characters: int = 0) -> str:
        """Render messages of ``role`` and ``content``, up to where the model's answer begins.

        ``extra_characters`` are let pass beside the limit, for messages that are longer than what they stand for.
        Raises ChatTemplateError for messages that the template does not take, for more than ``max_characters``, and
        for taking too long.
        """
        parts, size, end = [], 0, time.monotonic() + RENDER_SECONDS
        try:
            for part in self._template.generate(messages=messages):
                size += len(part)
                if size > max_characters + extra_characters:
                    raise ChatTemplateError(f"come to more than {max_characters} characters in the template")
                if time.monotonic() > end:
                    raise ChatTemplateError(f"take the chat template longer than {RENDER_SECONDS:g} seconds")
                parts.append(part)
        except ChatTemplateError:
            raise
        except jinja2.TemplateError as error:
            reason = str(error.message)[:_SHOWN_CHARACTERS]
            raise ChatTemplateError(f"are refused by the chat template: {reason}") from error
        except Exception as error:  # a template is a program: it can raise anything, over messages it did not expect
            raise ChatTemplateError("cannot be rendered by the chat template") from error
        return "".join(parts)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: marks the assistant's part for training; here its body is all there is to it."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares a set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes characters for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
