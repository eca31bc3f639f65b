"""Where the pool's bytes lie: in torch's memory on a CPU, and under the copy kernel on a CUDA device."""

from collections.abc import Callable
from pathlib import Path

import torch

from prefixgate.cache.copy_kernel import load_copy_kernel
from prefixgate.cache.cuda_storage import CudaKVStorage
from prefixgate.cache.kernel_compiler import KernelUnavailableError
from prefixgate.cache.kv_storage import KVLayout, KVStorage, TorchKVStorage
from prefixgate.worker.model_runner import ModelRefusedError

Allocate = Callable[[int, KVLayout], KVStorage]
"""Makes a pool of so many blocks. Raises ModelRefusedError where it cannot be had."""


def storage_on(device: torch.device, cache: Path) -> Allocate:
    """Return what allocates pools on a device, with the scratch block that decode graphs need where it is CUDA.

    What copies need is loaded here, before anything large is: raises ModelRefusedError, which says what is missing.
    ``cache`` is the folder for what is worth keeping between starts.
    """
    kernel = None
    if device.type == "cuda":
        try:
            kernel = load_copy_kernel(device.index or 0, cache / "kernels")
        except KernelUnavailableError as error:
            raise ModelRefusedError(f"worker.device: {device} cannot copy blocks: {error}") from error

    def allocate(num_blocks: int, layout: KVLayout) -> KVStorage:
        try:
            if kernel is None:
                return TorchKVStorage(num_blocks, layout, device=device)
            return CudaKVStorage(num_blocks, layout, device=device, kernel=kernel, scratch=True)
        except ValueError as error:
            raise ModelRefusedError(f"the model's layout: {error}") from error
        except RuntimeError as error:  # as torch says that there is no memory, on a CPU without a class of its own
            raise ModelRefusedError(
                f"cache: a pool of {num_blocks:,} blocks takes {num_blocks * layout.block_bytes:,} bytes, which "
                f"{device} does not have: {error}"
            ) from error

    return allocate
