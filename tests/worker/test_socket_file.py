"""The path of a Unix socket: what is made way for, and what is not."""

import os
import socket
import stat
from pathlib import Path

import pytest

from prefixgate.worker.socket_file import SocketFileError, claim_socket, private_files


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Relative, since a test's own folder can be longer than a socket's path may be.
    monkeypatch.chdir(tmp_path)
    return Path("run/worker.sock")


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with private_files():
        listener.bind(str(path))
    listener.listen()
    return listener


def test_a_missing_directory_is_made_for_the_owner_alone(path: Path) -> None:
    claim_socket(path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_socket_that_a_dead_process_left_is_replaced(path: Path) -> None:
    claim_socket(path)
    listening(path).close()
    assert path.exists()
    claim_socket(path)
    assert not path.exists()
    listening(path).close()


def test_a_socket_that_a_live_process_listens_on_is_left_alone(path: Path) -> None:
    claim_socket(path)
    with listening(path):
        with pytest.raises(SocketFileError, match="another process listens on it"):
            claim_socket(path)
        assert path.exists()


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_what_is_no_socket_is_left_alone(path: Path, kind: str) -> None:
    claim_socket(path)
    {"file": path.touch, "link": lambda: path.symlink_to("elsewhere"), "directory": path.mkdir}[kind]()
    with pytest.raises(SocketFileError, match="is no socket"):
        claim_socket(path)
    assert os.path.lexists(path)


def test_a_directory_that_others_can_write_to_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)
    with pytest.raises(SocketFileError, match="others can write to it"):
        claim_socket(path)
    path.parent.chmod(0o1777)
    claim_socket(path)


def test_a_directory_that_cannot_be_made_is_told(path: Path) -> None:
    path.parent.write_text("a file")
    with pytest.raises(SocketFileError, match=r"run/worker\.sock: cannot be listened on: "):
        claim_socket(path)


def test_a_socket_is_the_owners_alone(path: Path) -> None:
    before = os.umask(0)
    try:
        claim_socket(path)
        with listening(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert os.umask(0) == 0, "the process's own mask is as it was"
    finally:
        os.umask(before)
