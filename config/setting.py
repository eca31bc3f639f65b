"""One setting: its default, what it may be, and the words for it."""

from dataclasses import field
from typing import TypeVar

from prefixgate.config.kinds import Kind

T = TypeVar("T")


def setting(default: T, kind: Kind, help: str, *, unit: str = "", secret: bool = False, flag: str = "") -> T:
    """Declare a dataclass field as a setting. A ``secret`` one is shown nowhere; ``flag`` replaces the usual name."""
    metadata = {"kind": kind, "help": help, "unit": unit, "secret": secret, "flag": flag}
    # Typed as its default, not as the Field it is: what the class body says of a setting is then checked.
    return field(default=default, repr=not secret, metadata=metadata)
