"""Digests of files are right, and are computed again when, and only when, a file may have changed."""

import hashlib
import os
from pathlib import Path

from prefixgate.worker.file_digests import FileDigests


def test_the_digest_is_sha256(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    assert FileDigests(tmp_path / "digests").sha256(file) == hashlib.sha256(b"one").hexdigest()


def test_a_file_that_looks_the_same_is_not_read_again(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    before = file.stat()
    digest = FileDigests(tmp_path / "digests").sha256(file)
    file.write_bytes(b"two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert FileDigests(tmp_path / "digests").sha256(file) == digest


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    digests = FileDigests(tmp_path / "digests")
    file.write_bytes(b"one")
    os.utime(file, ns=(1, 1))
    digests.sha256(file)
    file.write_bytes(b"two")
    os.utime(file, ns=(2, 2))
    assert digests.sha256(file) == hashlib.sha256(b"two").hexdigest()
    other = tmp_path / "other"
    other.write_bytes(b"six")
    os.utime(other, ns=(2, 2))
    assert digests.sha256(other) == hashlib.sha256(b"six").hexdigest()
