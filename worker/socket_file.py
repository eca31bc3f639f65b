"""The file of a Unix socket: who may reach it, and what to do about one that is there already.

gRPC unlinks whatever socket lies at a path before it binds, also one that another live process listens on, and no
error tells. So the path is looked at first.
"""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ANSWER_SECONDS = 2.0


class SocketFileError(Exception):
    """The path cannot be listened on, and why."""


def claim_socket(path: Path) -> None:
    """Make way for a socket at ``path``: make its directory, remove what a dead process left.

    Raises SocketFileError where a live process listens there, where something else than a socket lies there, and
    where others could put a socket of their own in its place.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_directory(path.parent)
        if not os.path.lexists(path):
            return
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise SocketFileError(f"{path}: is there already and is no socket")
        if _answers(path):
            raise SocketFileError(f"{path}: another process listens on it")
        path.unlink()
    except OSError as error:
        raise SocketFileError(f"{path}: cannot be listened on: {error.strerror}") from error


@contextmanager
def private_files() -> Iterator[None]:
    """Have files that are made meanwhile be readable and writable by their owner alone."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _check_directory(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid not in (0, os.getuid()):
        raise SocketFileError(f"{directory}: belongs to another user")
    # In a sticky directory others cannot rename or remove what is not theirs.
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise SocketFileError(f"{directory}: others can write to it; use a directory of mode 0700 or 0755")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_ANSWER_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except TimeoutError:
            return True
        return True
