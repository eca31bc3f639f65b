"""Compiles CUDA C++ that comes with the package, for the device at hand, and keeps what was made.

The compiler is NVRTC, a library that comes as a wheel: no CUDA toolkit has to be installed, and none is looked for.
"""

import hashlib
import logging
import os
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size


class KernelUnavailableError(Exception):
    """A kernel cannot be had on this machine; the text says what is missing."""


def compiled(source: Path, arch: str, folder: Path) -> bytes:
    """Return the machine code of a source file for an architecture such as ``"90"``, from the folder or newly made.

    The file's name is made of all that the code depends on: source, architecture and compiler. It holds a digest of
    itself, so one that was cut short or changed is made anew; it is written beside and renamed, so processes that
    start together at worst compile the same twice. A folder that cannot be written costs a second at each start and
    nothing else. Raises KernelUnavailableError.
    """
    _require_compiler()
    text = source.read_text(encoding="utf-8")
    version = _compiler_version()
    key = hashlib.sha256("\0".join([text, arch, version]).encode()).hexdigest()[:32]
    path = folder / f"{source.stem}-sm{arch}-{key}.cubin"
    kept = _read(path)
    if kept is not None:
        return kept
    code = _compile(text, source.name, arch, version)
    _write(path, code)
    return code


def supported_archs() -> list[int]:
    """List the architectures that the compiler at hand makes code for, such as 90. Raises KernelUnavailableError."""
    _require_compiler()
    from cuda.bindings import nvrtc

    result, archs = nvrtc.nvrtcGetSupportedArchs()
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelUnavailableError(f"the CUDA compiler library does not answer: {result}")
    return [int(arch) for arch in archs]


def _require_compiler() -> None:
    """Raise KernelUnavailableError unless the compiler can be loaded, before the bindings fail on it in their words."""
    try:
        from cuda.bindings import nvrtc  # noqa: F401
        from cuda.core import Program  # noqa: F401
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError as error:
        raise KernelUnavailableError(f"cuda-core is not installed: pip install 'prefixgate[cuda]' ({error})") from error
    try:
        load_nvidia_dynamic_lib("nvrtc")
    except DynamicLibNotFoundError as error:
        raise KernelUnavailableError(
            f"the CUDA compiler library is not found: pip install nvidia-cuda-nvrtc ({error})"
        ) from error


def _compiler_version() -> str:
    from cuda.bindings import nvrtc

    result, major, minor = nvrtc.nvrtcVersion()
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelUnavailableError(f"the CUDA compiler library does not answer: {result}")
    return f"{major}.{minor}"


def _compile(text: str, name: str, arch: str, version: str) -> bytes:
    from cuda.core import Program, ProgramOptions

    supported = supported_archs()
    if int(arch) not in supported:
        known = ", ".join(map(str, supported))
        raise KernelUnavailableError(
            f"NVRTC {version} makes no code for a device of compute capability {arch}, only for {known}: "
            "install another nvidia-cuda-nvrtc"
        )
    try:
        program = Program(text, "c++", ProgramOptions(name=name, arch=f"sm_{arch}", std="c++17"))
        code = program.compile("cubin").code
    except Exception as error:
        raise KernelUnavailableError(f"NVRTC {version} does not compile {name} for sm_{arch}: {error}") from error
    logger.info("Compiled %s for sm_%s with NVRTC %s", name, arch, version)
    return bytes(code)


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() == digest:
        return code
    logger.warning("%s is damaged and will be made anew", path)
    return None


def _write(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix="unfinished-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        logger.warning("The compiled %s cannot be kept, so each start compiles it: %s", path.name, error)
