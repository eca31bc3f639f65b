"""Waiting for what other processes do."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HANG_SECONDS = 60.0
"""After which something that should have happened is given up. Nothing waits this long when all goes well."""

_PAUSE_SECONDS = 0.02


def until(condition: Callable[[], T | None], what: str, seconds: float = HANG_SECONDS) -> T:
    """Ask again and again until the answer is true, and return it. ``what`` names what did not come."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(_PAUSE_SECONDS)
    return answer
