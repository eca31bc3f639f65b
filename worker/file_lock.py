"""A lock between processes that make the same thing."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock between processes; the system drops it with the process, however that ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the same thing")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
