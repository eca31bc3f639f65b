"""The copy kernel's own source, compiled for the host: run under sanitizers, or in the tests' process."""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from prefixgate.cache.copy_kernel import SOURCE
from prefixgate.cache.copy_launch import THREADS, CopyLaunch
from prefixgate.cache.copy_plan import Copy

HOST_SOURCE = Path(__file__).parent / "copy_blocks_host.cpp"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized")
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
COMPILER = "g++"

needs_compiler = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no {COMPILER} to build it with")


class SanitizerError(Exception):
    """The kernel touched what it must not, as AddressSanitizer or UndefinedBehaviorSanitizer tells it."""


def kernel_text(*changes: tuple[str, str]) -> str:
    """Return the kernel's source with pieces of it replaced, each of which must stand there once."""
    text = SOURCE.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def is_vectors(launch: CopyLaunch) -> int:
    """Tell which of the two entries a launch takes, as the host's programs want it."""
    return ("copy_bytes", "copy_vectors").index(launch.entry)


class SanitizedKernel:
    """A program that runs one launch on a pool of its own."""

    def __init__(self, folder: Path, text: str) -> None:
        self._program = _build(folder, text, "copy_blocks", SANITIZED)

    def run(self, launch: CopyLaunch, copies: Sequence[Copy], pool: bytes, *, offset: int = 0) -> bytes:
        """Run a launch on a pool that begins ``offset`` bytes behind a multiple of 16; return what became of the pool.

        Blocks that no copy names must not even be read. Raises SanitizerError.
        """
        _, rows, row_bytes, _ = launch.arguments
        num_blocks = len(pool) // (rows * row_bytes)
        numbers = (is_vectors(launch), *launch.grid[:2], THREADS, *launch.arguments, num_blocks, offset)
        table = b"".join(struct.pack("<3i", *copy) for copy in copies)
        request = struct.pack("<10q", *numbers) + table + pool
        done = subprocess.run([self._program], input=request, capture_output=True, check=False, timeout=100)
        if done.returncode:
            raise SanitizerError(done.stderr.decode(errors="replace")[:2000])
        return done.stdout


class InProcessKernel:
    """Runs launches in this process, at once, on memory that torch's CPU tensors own; notes what it was given."""

    processors = 4

    def __init__(self, folder: Path, text: str) -> None:
        self._library = ctypes.CDLL(str(_build(folder, text, "copy_blocks.so", ("-O1", "-shared", "-fPIC"))))
        self.launches: list[tuple[CopyLaunch, int]] = []
        """Each launch with the handle of its stream."""
        self.before_launch: Callable[[], None] | None = None

    def launch(self, launch: CopyLaunch, pool_address: int, table_address: int, stream: int) -> None:
        """As a device's would, but done on return."""
        if self.before_launch is not None:
            self.before_launch()
        self.launches.append((launch, stream))
        self._library.run_copy(
            is_vectors(launch),
            *launch.grid[:2],
            THREADS,
            ctypes.c_void_p(pool_address),
            ctypes.c_void_p(table_address),
            *map(ctypes.c_longlong, launch.arguments),
        )


def _build(folder: Path, text: str, name: str, flags: Sequence[str]) -> Path:
    folder.mkdir()
    kernel, made = folder / "kernel.cu", folder / name
    kernel.write_text(text)
    flags = ["-std=c++17", *WARNINGS, *flags, f'-DKERNEL_SOURCE="{kernel}"']
    command = [COMPILER, *flags, str(HOST_SOURCE), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return made
