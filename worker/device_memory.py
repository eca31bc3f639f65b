"""How much memory a device has left, and how much a piece of work takes of it."""

from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """The memory of one device, as far as this process can tell."""

    @property
    def name(self) -> str:
        """The device, as messages name it."""

    def release(self) -> None:
        """Give back what is kept for reuse, and start to watch for the highest mark from here."""

    def held(self) -> int:
        """Bytes that this process's tensors take now, with what is kept for reuse."""

    def highest(self) -> int:
        """Most bytes held at once since ``release``."""

    def free(self) -> int:
        """Bytes that no process holds."""


class CudaMemory:
    """A CUDA device's memory under torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def name(self) -> str:
        """As torch names it, such as ``cuda:0``."""
        return str(self._device)

    def release(self) -> None:
        """Empty the allocator's cache: blocks of it that fit nothing would count as taken."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def held(self) -> int:
        """Reserved and not only allocated bytes: what fragments is lost to a pool as well."""
        return torch.cuda.memory_reserved(self._device)

    def highest(self) -> int:
        """Once all work is done."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)

    def free(self) -> int:
        """As the driver tells."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free


def memory_of(device: torch.device) -> DeviceMemory | None:
    """Return a device's memory; None on a CPU, whose memory belongs to everyone and is not measured."""
    return CudaMemory(device) if device.type == "cuda" else None
