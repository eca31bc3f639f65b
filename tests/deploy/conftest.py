"""Folders with short paths, since those of Unix sockets may be no longer than 107 bytes."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pg-") as name:
        yield Path(name)
