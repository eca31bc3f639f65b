"""The copy kernel on one device: compiled, loaded, and launched once for each plan."""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prefixgate.cache.copy_launch import THREADS, CopyLaunch
from prefixgate.cache.kernel_compiler import KernelUnavailableError, compiled

SOURCE = Path(__file__).parent / "cuda" / "copy_blocks.cu"
DRIVER = "libcuda.so.1"


class CopyKernel(Protocol):
    """Runs planned launches."""

    processors: int
    """Multiprocessors of the device."""

    def launch(self, launch: CopyLaunch, pool_address: int, table_address: int, stream: int) -> None:
        """Put a launch on a stream, given by its handle, and return at once."""


@dataclass(frozen=True, slots=True)
class _TorchStream:
    """A stream of torch's, as cuda.core wants one; torch's own stream objects say this only in recent releases."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class DeviceCopyKernel:
    """The kernel through ``cuda.core``.

    ``code`` is the kernel's loaded ``ObjectCode``. cuda.core and torch share a device's primary context; whoever
    launches has it current, as a thread does that works with torch on the device.
    """

    def __init__(self, processors: int, code: Any) -> None:
        from cuda.core import LaunchConfig, launch

        self.processors = processors
        self._code = code  # kept, since it owns what its entry points point to
        self._entries = {name: code.get_kernel(name) for name in ("copy_vectors", "copy_bytes")}
        self._config = LaunchConfig
        self._launch = launch

    def launch(self, launch: CopyLaunch, pool_address: int, table_address: int, stream: int) -> None:
        """Put a launch on a stream, given by its handle, and return at once."""
        config = self._config(grid=launch.grid, block=THREADS)
        entry = self._entries[launch.entry]
        self._launch(_TorchStream(stream), config, entry, pool_address, table_address, *launch.arguments)


def load_copy_kernel(device_index: int, folder: Path) -> DeviceCopyKernel:
    """Compile the kernel for a device and load it there.

    ``folder`` is where compiled code is kept. Raises KernelUnavailableError, which says what is missing: cuda-core, the
    driver, a device, or a compiler that knows the device.
    """
    _require_driver()
    try:
        from cuda.core import Device, ObjectCode
    except ImportError as error:
        raise KernelUnavailableError(f"cuda-core is not installed: pip install 'prefixgate[cuda]' ({error})") from error
    try:
        device = Device(device_index)
        device.set_current()
        arch, processors = str(device.arch), int(device.properties.multiprocessor_count)
    except Exception as error:
        raise KernelUnavailableError(f"CUDA device {device_index} is not to be had: {error}") from error
    code = compiled(SOURCE, arch, folder)
    try:
        return DeviceCopyKernel(processors, ObjectCode.from_cubin(code, name=SOURCE.stem))
    except Exception as error:
        raise KernelUnavailableError(f"the driver does not load code for sm_{arch}: {error}") from error


def _require_driver() -> None:
    """Raise KernelUnavailableError where there is none.

    Asked before cuda.core is, whose second call hangs after a first one that did not find the driver.
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        raise KernelUnavailableError(f"the NVIDIA driver is not found: {error}") from error
