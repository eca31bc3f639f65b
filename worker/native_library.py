"""Compiles C++ that comes with the package, once for each machine and compiler, and loads it.

A wheel for every kind of CPU would be either slow or refused by some; the compiler knows the machine. The result is
kept in the cache folder under a name made of all that it depends on, so that it is found by later starts and never by
another machine that shares the folder.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from prefixgate.worker.file_lock import locked

logger = logging.getLogger(__name__)

FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
COMPILE_SECONDS = 120


class NativeUnavailableError(Exception):
    """The library cannot be had on this machine, and why."""


def load_native(source: Path, cache: Path, progress: Callable[[str], None]) -> ctypes.CDLL:
    """Return the library made from a source file, compiling it where the cache does not hold it yet.

    Processes that start together compile it once. The compiler is ``$CXX``, or ``g++``. Raises NativeUnavailableError.
    """
    compiler = _compiler()
    target = cache / "native" / f"{source.stem}-{_key(source, compiler)}.so"
    try:
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            with locked(target.with_suffix(".lock"), progress):
                if not target.is_file():
                    _compile(source, compiler, target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise NativeUnavailableError(f"{target}: {error}") from error


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(command[0]) is None:
        raise NativeUnavailableError(f"there is no C++ compiler: {command[0]!r} is not found")
    return command


def _key(source: Path, compiler: list[str]) -> str:
    parts = [source.read_text(), shlex.join([*compiler, *FLAGS]), _run([*compiler, "--version"]), _cpu()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """Describe the machine as far as the compiler looks at it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.startswith(("flags", "Features", "model name", "cpu family", "model"))}
    return "\n".join([platform.machine(), platform.libc_ver()[1], *sorted(told)])


def _compile(source: Path, compiler: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="unfinished-") as scratch:
        made = Path(scratch, target.name)
        _run([*compiler, *FLAGS, str(source), "-o", str(made)])
        made.rename(target)
    logger.info("Compiled %s with %s", source.name, shlex.join(compiler))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()[:3]
        raise NativeUnavailableError(f"{command[0]} ended with status {done.returncode}: {' / '.join(said)}")
    return done.stdout
