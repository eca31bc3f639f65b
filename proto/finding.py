"""One thing that was looked at before anything is started, and what to do about it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found. None of its texts holds a secret."""

    check: str
    """What was looked at."""
    level: Level
    """``problem`` keeps something from starting or working; ``warning`` is for a person to judge."""
    message: str
    remedy: str = ""
    """What to do; empty where all is well."""

    def as_dict(self) -> dict[str, str]:
        """Write it with the names of its fields."""
        return asdict(self)


def examine(checks: Iterable[tuple[str, Callable[[], Iterator[Finding]]]]) -> Iterator[Finding]:
    """Run checks one by one. One that fails by itself is a finding too, and keeps no other from running."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding(name, "problem", f"the check failed: {type(error).__name__}: {error}", "report this")
