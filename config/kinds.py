"""Kinds of setting: what a value may be, read from TOML or from a flag's text.

Each kind says in ``allowed`` what it takes, so that a refusal, the help and the reference page use the same words.
"""

import math
import re
from dataclasses import dataclass
from typing import Protocol

from prefixgate.config.address import parse_address, parse_worker_address

_SIZE = re.compile(r"(\d{1,18})\s*(B|KiB|MiB|GiB|TiB)?", re.ASCII)
_SIZE_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class NotAllowedError(ValueError):
    """The value is none of those that the kind allows."""


class Kind(Protocol):
    """What a setting's value may be. Both readers raise NotAllowedError for anything else."""

    @property
    def allowed(self) -> str:
        """The values taken, as a phrase that follows "must be"."""

    def read(self, value: object) -> object:
        """Check a value as TOML gives it."""

    def read_text(self, text: str) -> object:
        """Read a value from the text of a flag."""


def _range(minimum: float, maximum: float) -> str:
    return f"from {minimum:,} to {maximum:,}"


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    allowed: str = "true or false"

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise NotAllowedError
        return value

    def read_text(self, text: str) -> bool:
        return {"true": True, "false": False}[text] if text in ("true", "false") else self.read(text)


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number in a closed range."""

    minimum: int
    maximum: int

    @property
    def allowed(self) -> str:
        return f"an integer {_range(self.minimum, self.maximum)}"

    def read(self, value: object) -> int:
        # TOML's true is Python's 1.
        if isinstance(value, bool) or not isinstance(value, int) or not self.minimum <= value <= self.maximum:
            raise NotAllowedError
        return value

    def read_text(self, text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text):
            raise NotAllowedError
        return self.read(int(text))


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number in a closed range."""

    minimum: float
    maximum: float

    @property
    def allowed(self) -> str:
        return f"a number {_range(self.minimum, self.maximum)}"

    def read(self, value: object) -> float:
        # Infinity and NaN are TOML values; NaN fails no comparison that asks for "too small or too large".
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise NotAllowedError
        if not self.minimum <= value <= self.maximum:
            raise NotAllowedError
        return float(value)

    def read_text(self, text: str) -> float:
        try:
            return self.read(float(text))
        except ValueError:
            raise NotAllowedError from None


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, plain or with a binary unit."""

    minimum: int
    maximum: int

    @property
    def allowed(self) -> str:
        low, high = format_size(self.minimum), format_size(self.maximum)
        return f'a number of bytes from {low} to {high}, plain or with a unit (B, KiB, MiB, GiB, TiB) as in "512MiB"'

    def read(self, value: object) -> int:
        if isinstance(value, str):
            return self.read_text(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.minimum <= value <= self.maximum:
            raise NotAllowedError
        return value

    def read_text(self, text: str) -> int:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise NotAllowedError
        return self.read(int(match[1]) * _SIZE_UNITS[match[2] or "B"])


def format_size(count: int) -> str:
    """Write a number of bytes with the largest unit that divides it."""
    for unit, factor in reversed(_SIZE_UNITS.items()):
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return "0B"


@dataclass(frozen=True, slots=True)
class Text:
    """Text that a pattern matches whole, in a limited number of UTF-8 bytes."""

    allowed: str
    pattern: str = r"[^\x00-\x1f\x7f]*"
    max_bytes: int = 4096

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value):
            raise NotAllowedError
        if len(value.encode()) > self.max_bytes:
            raise NotAllowedError
        return value

    def read_text(self, text: str) -> str:
        return self.read(text)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    choices: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return "one of " + ", ".join(f'"{choice}"' for choice in self.choices)

    def read(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.choices:
            raise NotAllowedError
        return value

    def read_text(self, text: str) -> str:
        return self.read(text)


@dataclass(frozen=True, slots=True)
class AddressText:
    """Text that names an address; the text itself is kept."""

    unix: bool = True
    """Whether a Unix socket will do."""

    @property
    def allowed(self) -> str:
        return "HOST:PORT or unix:/PATH" if self.unix else "HOST:PORT"

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise NotAllowedError
        try:
            address = parse_address(value)
        except ValueError:
            raise NotAllowedError from None
        if address.is_unix and not self.unix:
            raise NotAllowedError
        return value

    def read_text(self, text: str) -> str:
        return self.read(text)


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """Where workers are: addresses, and names whose addresses are looked up again and again. None twice."""

    allowed: str = "a list, each HOST:PORT, unix:/PATH, or dns:NAME:PORT for every address of a name, none twice"

    def read(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise NotAllowedError
        try:
            addresses = {parse_worker_address(item) for item in value}
        except ValueError:
            raise NotAllowedError from None
        if len(addresses) < len(value):
            raise NotAllowedError
        return tuple(value)

    def read_text(self, text: str) -> tuple[str, ...]:
        return self.read(text.split(",") if text else [])


@dataclass(frozen=True, slots=True)
class TextList:
    """At least one text of one kind, none twice."""

    item: Text

    @property
    def allowed(self) -> str:
        return f"a list of at least one, each {self.item.allowed}, none twice"

    def read(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            raise NotAllowedError
        items = tuple(self.item.read(item) for item in value)
        if len(set(items)) < len(items):
            raise NotAllowedError
        return items

    def read_text(self, text: str) -> tuple[str, ...]:
        return self.read(text.split(","))
