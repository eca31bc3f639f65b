"""The pool's bytes: keys and values of every block, block-major.

The layout is ``[block, layer, k|v, token, kv_head, head_dim]``: one block is one contiguous range, so copying it,
moving it elsewhere or writing it to disk is one plain copy. A layer's view is strided, and there is no flat view by
slot: readers index by (block, offset). A layer-major pool would give flat slots, but would scatter each block over
``2 * num_layers`` ranges.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from prefixgate.cache.copy_plan import Copy
from prefixgate.cache.hashing import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one token's keys and values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int = BLOCK_SIZE

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes."""
        return self.token_bytes * self.block_size


class KVStorage(Protocol):
    """The bytes of a pool on one device. Knows nothing of who owns a block."""

    layout: KVLayout
    num_blocks: int
    data: torch.Tensor
    """``[block, layer, k|v, token, kv_head, head_dim]``"""
    scratch: int | None
    """A block of ``data`` beyond the pool's that nobody ever owns: what fills a batch up writes there. None without."""

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Run a plan's copies, ordered before anything that is put on the runner's stream later."""

    def poison(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with a value that spoils any output it reaches."""


class TorchKVStorage:
    """Storage in one torch tensor, copied by torch indexing. The reference that other storages are compared with."""

    def __init__(
        self, num_blocks: int, layout: KVLayout, *, device: torch.device | str = "cpu", scratch: bool = False
    ) -> None:
        """Allocate ``num_blocks`` zeroed blocks, and one more where ``scratch`` is set."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.scratch = num_blocks if scratch else None
        shape = (num_blocks + scratch, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.data = torch.zeros(shape, dtype=layout.dtype, device=device)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy each source's first tokens; whole blocks in one gather and scatter."""
        whole = [copy for copy in copies if copy.tokens == self.layout.block_size]
        if whole:
            self.data[[copy.dst for copy in whole]] = self.data[[copy.src for copy in whole]]
        for src, dst, tokens in copies:
            if tokens < self.layout.block_size:
                self.data[dst, :, :, :tokens] = self.data[src, :, :, :tokens]

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, or with the lowest integer where the dtype has none."""
        if not block_ids:
            return
        dtype = self.layout.dtype
        value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
        self.data[list(block_ids)] = value
