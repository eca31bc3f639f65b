"""What a rule for a message's field can be, and the error where one is broken.

``proto.field_table`` has a row for each field of each request, of both hops. A rule is checked the same way at either
door, and says of itself what the reference page says. Lengths come before contents, so that nothing here takes longer
than reading the message did.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import grpc

INVALID_ARGUMENT: int = grpc.StatusCode.INVALID_ARGUMENT.value[0]

MAX_NAME_BYTES = 128
"""For tenants, request ids and salts."""
_SHOWN_CHARACTERS = 64


@dataclass(eq=False)
class FieldError(Exception):
    """A field breaks a rule. ``message`` names the field, the value and the bound, and can be shown to the client."""

    code: int
    """A gRPC status code."""
    field: str
    """Path of the field, such as ``sampling.top_p``."""
    message: str
    limit: str = ""
    """The setting that sets the bound, where the operator does."""

    def __str__(self) -> str:
        return self.message


def invalid(field: str, message: str, limit: str = "") -> FieldError:
    """Make the error of a field whose value breaks a rule; ``message`` goes on after the field's name."""
    named = f" (limits.{limit})" if limit else ""
    return FieldError(INVALID_ARGUMENT, field, f"{field}: {message}{named}", limit)


def shown(text: str) -> str:
    """Quote a client's text for a message: printable, and short however long it is."""
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return ascii(cut) if not cut.isprintable() else repr(cut)


class Bound(Enum):
    """A bound that is not the same everywhere: it comes with the model, or the operator sets it."""

    VOCABULARY_SIZE = "the size of the vocabulary"
    PROMPT_TOKENS = "what the context holds less one"
    OUTPUTS = "`max_outputs`"
    PROMPT_BYTES = "`max_prompt_bytes`"
    STOPS = "`max_stops` (16 or fewer)"
    LOGIT_BIASES = "`max_logit_biases` (1,024 or fewer)"


@dataclass(frozen=True)
class Bounds:
    """What the bounds are at one door."""

    values: Mapping[Bound, int]
    """Only those that the messages of this hop ask for."""
    eos_ids: Collection[int] = ()
    """Ids that end an output by themselves."""
    settings: Mapping[Bound, str] = field(default_factory=dict)
    """The settings that bounds come from, where the operator sets them."""


Limit = float | Bound
Whole = Callable[[str, Any, Bounds], None]
"""A check of several fields together: the message's path, the message, the bounds. Raises FieldError."""


class Rule(Protocol):
    """What the value of a field must keep to."""

    @property
    def allowed(self) -> str:
        """What is allowed, for the reference page."""

    def check(self, path: str, value: Any, bounds: Bounds) -> None:
        """Check a value that is set, or a repeated one. Raises FieldError."""


class Row(NamedTuple):
    """One field's line in the table."""

    rule: Rule
    default: str = ""
    """What an absent value means; empty where there is no telling an absent one, or nothing to tell."""
    unit: str = ""
    required: bool = False
    """Whether an absent value is refused; for fields that can be absent."""
    code: int = 0
    """The status of a call whose value is not what it is compared with elsewhere, as its rule or the method says; 0
    where it is compared with nothing. What breaks the rule itself is INVALID_ARGUMENT."""


@dataclass(frozen=True)
class Number:
    """A number in a range; NaN and the infinities are in none."""

    low: float
    high: Limit = math.inf
    above_low: bool = False
    """Whether ``low`` itself is already outside."""

    @property
    def allowed(self) -> str:
        """The range, with its bounds by name."""
        return self._phrase(_name(self.high))

    def check(self, path: str, value: float, bounds: Bounds) -> None:
        """Check that a number is in the range."""
        high = _value(self.high, bounds)
        # Written so that NaN, which fails every comparison, is refused.
        above = value > self.low if self.above_low else value >= self.low
        if not (above and value <= high and math.isfinite(value)):
            # NaN is over no bound of the operator's.
            limit = _setting(self.high, bounds) if value > high else ""
            raise invalid(path, f"{value} is out of range; must be {self._phrase(f'{high:.15g}')}", limit)

    def _phrase(self, high: str) -> str:
        if self.high == math.inf:
            return f"greater than {self.low:g} and finite" if self.above_low else f"at least {self.low:g}"
        return f"in {'(' if self.above_low else '['}{self.low:g}, {high}]"


@dataclass(frozen=True)
class Text:
    """A text of so many bytes of UTF-8."""

    low: int = 0
    high: Limit = MAX_NAME_BYTES
    is_printable_ascii: bool = False

    @property
    def allowed(self) -> str:
        """The length, with its bounds by name."""
        return f"{self.low} to {_name(self.high)} bytes" + (" of printable ASCII" if self.is_printable_ascii else "")

    def check(self, path: str, value: str, bounds: Bounds) -> None:
        """Check the length of a text, and its characters."""
        high = _value(self.high, bounds)
        # A character has at least one byte and at most four, so that neither a huge text nor a short one is encoded.
        size = len(value)
        if size <= high and (size < self.low or 4 * size > high):
            size = len(value.encode())
        if size < self.low:
            raise invalid(path, f"is {size} bytes long; must be at least {self.low}")
        if size > high:
            raise invalid(path, f"is at least {size} bytes long; must be at most {high}", _setting(self.high, bounds))
        if self.is_printable_ascii and not (value.isascii() and value.isprintable()):
            raise invalid(path, f"{shown(value)} is not printable ASCII")


@dataclass(frozen=True)
class Ids:
    """Token ids, so many and each inside the vocabulary. They are unsigned on the wire, so that none is negative."""

    low: int
    high: Limit

    @property
    def allowed(self) -> str:
        """How many, with the bounds by name."""
        return f"{self.low} to {_name(self.high)} ids, each inside the vocabulary"

    def check(self, path: str, value: Sequence[int], bounds: Bounds) -> None:
        """Check the number of ids, then the largest of them."""
        _check_count(path, "ids", len(value), self.low, self.high, bounds)
        _check_inside(path, value, bounds)


@dataclass(frozen=True)
class IdMap:
    """Token ids, each with a value."""

    high: Limit
    each: Number

    @property
    def allowed(self) -> str:
        """How many, and which values."""
        return f"at most {_name(self.high)} ids, each inside the vocabulary; values {self.each.allowed}"

    def check(self, path: str, value: Mapping[int, float], bounds: Bounds) -> None:
        """Check the number of ids, then ids and values."""
        _check_count(path, "ids", len(value), 0, self.high, bounds)
        _check_inside(path, value.keys(), bounds)
        for token_id, number in value.items():
            self.each.check(f"{path}[{token_id}]", number, bounds)


@dataclass(frozen=True)
class Items:
    """So many values, each under a rule of its own."""

    low: int
    high: Limit
    noun: str
    each: Rule

    @property
    def allowed(self) -> str:
        """How many, and which."""
        each = "" if isinstance(self.each, Message) else f", each of {self.each.allowed}"
        return f"{self.low} to {_name(self.high)} {self.noun}{each}"

    def check(self, path: str, value: Sequence[Any], bounds: Bounds) -> None:
        """Check the number of values, then each of them."""
        _check_count(path, self.noun, len(value), self.low, self.high, bounds)
        for index, item in enumerate(value):
            self.each.check(f"{path}[{index}]", item, bounds)


@dataclass(frozen=True)
class EnumName:
    """One of an enumeration's numbers; on the wire it can be any."""

    name: str
    numbers: Collection[int]

    @property
    def allowed(self) -> str:
        """Which enumeration."""
        return f"a {self.name}"

    def check(self, path: str, value: int, bounds: Bounds) -> None:
        """Check that the enumeration has the number."""
        if value not in self.numbers:
            raise invalid(path, f"{value} is no {self.name}; must be one of {', '.join(map(str, self.numbers))}")


@dataclass(frozen=True)
class AnyValue:
    """Whatever the field's type can hold. Says why that is right, or where the value is compared with something."""

    why: str = "any value"

    @property
    def allowed(self) -> str:
        """Why any value may come in here."""
        return self.why

    def check(self, path: str, value: object, bounds: Bounds) -> None:
        """Take it."""


@dataclass(frozen=True)
class OneOf:
    """One of several fields must be set; its row has the name of the ``oneof``."""

    names: Sequence[str]

    @property
    def allowed(self) -> str:
        """Which fields."""
        return f"exactly one of {', '.join(self.names)}"

    def check(self, path: str, value: str | None, bounds: Bounds) -> None:
        """Check that a field of the ``oneof`` is set; ``value`` is its name."""
        if value is None:
            raise invalid(path, f"is not set; one of {', '.join(self.names)} must be")


@dataclass(frozen=True)
class Message:
    """A message: a row for each of its fields, and what the fields must keep to together."""

    rows: Mapping[str, Row]
    whole: Whole | None = None

    @property
    def allowed(self) -> str:
        """What its own rows say."""
        return ""

    def check(self, path: str, value: Any, bounds: Bounds) -> None:
        """Check all fields, then the whole. Raises FieldError at the first rule broken."""
        fields = value.DESCRIPTOR.fields_by_name
        for name, row in self.rows.items():
            inner = f"{path}.{name}" if path else name
            field = fields.get(name)
            if field is None:
                row.rule.check(inner, value.WhichOneof(name), bounds)
            elif not field.has_presence or value.HasField(name):
                row.rule.check(inner, getattr(value, name), bounds)
            elif row.required:
                raise invalid(inner, "is not set; it must be")
        if self.whole is not None:
            self.whole(path, value, bounds)


def _value(limit: Limit, bounds: Bounds) -> float:
    return bounds.values[limit] if isinstance(limit, Bound) else limit


def _name(limit: Limit) -> str:
    return limit.value if isinstance(limit, Bound) else f"{limit:,}"


def _setting(limit: Limit, bounds: Bounds) -> str:
    return bounds.settings.get(limit, "") if isinstance(limit, Bound) else ""


def _check_count(path: str, noun: str, count: int, low: int, limit: Limit, bounds: Bounds) -> None:
    high = _value(limit, bounds)
    if count < low:
        raise invalid(path, f"{count} {noun}; must be at least {low}")
    if count > high:
        raise invalid(path, f"{count} {noun}; must be at most {high}", _setting(limit, bounds))


def _check_inside(path: str, ids: Collection[int], bounds: Bounds) -> None:
    size = bounds.values[Bound.VOCABULARY_SIZE]
    if ids and (worst := max(ids)) >= size:
        raise invalid(path, f"token id {worst} is outside the vocabulary; must be below {size}")
