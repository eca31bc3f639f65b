"""Launches of the copy kernel with the pools that they meet, and what torch makes of these."""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from prefixgate.cache.copy_launch import CopyLaunch, plan_launch
from prefixgate.cache.copy_plan import Copy
from prefixgate.cache.cuda_storage import block_shape
from prefixgate.cache.kv_storage import KVLayout, TorchKVStorage

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64)


@dataclass(frozen=True)
class Case:
    """One launch and the pool that it meets."""

    layout: KVLayout
    num_blocks: int
    copies: tuple[Copy, ...]
    offset: int = 0
    grid: tuple[int, int] | None = None
    processors: int = 4

    def launch(self) -> CopyLaunch:
        """What the planner makes of the copies, or that with another grid."""
        launch = plan_launch(self.copies, block_shape(self.layout), self.offset, self.processors)
        return launch if self.grid is None else replace(launch, grid=(*self.grid, 1))

    def pool(self) -> torch.Tensor:
        """The pool's bytes before the launch: random ones, the same each time."""
        count = self.num_blocks * self.layout.block_bytes
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))

    def expected(self) -> torch.Tensor:
        """The pool's bytes as torch leaves them."""
        storage = TorchKVStorage(self.num_blocks, self.layout)
        pool_bytes(storage).copy_(self.pool())
        storage.copy_blocks(self.copies)
        return pool_bytes(storage)


def pool_bytes(storage: TorchKVStorage) -> torch.Tensor:
    """A storage's memory as bytes, to be read and written."""
    return storage.data.view(torch.uint8).view(-1)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw layouts, plans that keep to what plans promise, alignments and grids."""
    block_size = draw(st.sampled_from((16, 16, 16, 1, 3, 8)))
    layout = KVLayout(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from((8, 16, 64)) | st.integers(1, 40)),
        dtype=draw(st.sampled_from(DTYPES)),
        block_size=block_size,
    )
    blocks = draw(st.permutations(range(draw(st.integers(2, 9)))))
    first = draw(st.integers(1, len(blocks) - 1))
    destinations = blocks[first : draw(st.integers(first + 1, len(blocks)))]
    whole_or_part = st.just(block_size) | st.integers(0, block_size)
    copies = [Copy(draw(st.sampled_from(blocks[:first])), dst, draw(whole_or_part)) for dst in destinations]
    return Case(
        layout,
        len(blocks),
        tuple(copies),
        offset=draw(st.sampled_from((0, 0, 0, 16, 8, 4, 1))),
        grid=draw(st.none() | st.tuples(st.integers(1, 5), st.integers(1, 4))),
        processors=draw(st.integers(1, 200)),
    )
