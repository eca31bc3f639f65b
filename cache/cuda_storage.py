"""The pool's bytes on a CUDA device, copied by one kernel launch for each plan."""

from array import array
from collections.abc import Sequence
from itertools import chain

import torch

from prefixgate.cache.copy_kernel import CopyKernel
from prefixgate.cache.copy_launch import BlockShape, check_copies, plan_launch
from prefixgate.cache.copy_plan import Copy
from prefixgate.cache.kv_storage import KVLayout, TorchKVStorage


class CudaKVStorage(TorchKVStorage):
    """Storage on a CUDA device. A plan's copies are one launch on torch's current stream, and nothing is waited for.

    What runs on that stream later sees the copies done; work on other streams has to be ordered by its owner.
    ``kernel`` comes from ``load_copy_kernel``, and several storages on one device can share it.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout,
        *,
        device: torch.device | str,
        kernel: CopyKernel,
        scratch: bool = False,
    ) -> None:
        """Allocate the pool. Raises ValueError for blocks that the kernel does not take (2 GiB and more)."""
        self._shape = block_shape(layout)
        self._kernel = kernel
        super().__init__(num_blocks, layout, device=device, scratch=scratch)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Put one launch that runs all copies on the current stream.

        The table of pairs goes up from pinned memory on the same stream. Both ends of that transfer belong to torch's
        caching allocators: pinned memory is handed out again only after an event behind the transfer has passed, and
        the table on the device only to work that is queued behind the launch. Raises IndexError for a copy outside the
        pool, before anything is queued.
        """
        if not copies:
            return
        check_copies(copies, self.num_blocks, self.layout.block_size)
        launch = plan_launch(copies, self._shape, self.data.data_ptr(), self._kernel.processors)
        device = self.data.device
        with torch.cuda.device(device):
            # An array first: torch takes three times as long to look through nested tuples.
            pairs = torch.frombuffer(array("i", chain.from_iterable(copies)), dtype=torch.int32)
            table = pairs.pin_memory().to(device, non_blocking=True)
            stream = torch.cuda.current_stream(device).cuda_stream
            self._kernel.launch(launch, self.data.data_ptr(), table.data_ptr(), stream)


def block_shape(layout: KVLayout) -> BlockShape:
    """Return a layout's blocks as rows of bytes."""
    token_bytes = layout.num_kv_heads * layout.head_dim * layout.dtype.itemsize
    return BlockShape(layout.num_layers * 2, layout.block_size * token_bytes, token_bytes)
