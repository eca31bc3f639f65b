"""The kernel's source, run on the host: what it copies, against torch, and what it leaves alone."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from prefixgate.cache.copy_launch import BlockShape, plan_launch
from prefixgate.cache.copy_plan import Copy
from prefixgate.cache.cuda_storage import block_shape
from prefixgate.cache.kv_storage import KVLayout
from tests.cache.copy_cases import Case, cases
from tests.cache.host_kernel import InProcessKernel, SanitizedKernel, SanitizerError, kernel_text, needs_compiler
from tests.counts import scaled

pytestmark = needs_compiler

EXAMPLES = scaled(1_200)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> SanitizedKernel:
    return SanitizedKernel(tmp_path_factory.mktemp("kernel") / "sanitized", kernel_text())


def same(case: Case, kernel: SanitizedKernel) -> bool:
    """Tell whether the kernel leaves the pool as torch does; raises SanitizerError."""
    left = kernel.run(case.launch(), case.copies, case.pool().numpy().tobytes(), offset=case.offset)
    return left == case.expected().numpy().tobytes()


@given(case=cases())
@settings(max_examples=EXAMPLES)
def test_the_kernel_does_what_torch_does_and_touches_nothing_else(kernel: SanitizedKernel, case: Case) -> None:
    assert same(case, kernel)


ROWS_OF_40_BYTES = KVLayout(num_layers=2, num_kv_heads=1, head_dim=5, dtype=torch.float16, block_size=4)
ROWS_OF_48_BYTES = KVLayout(num_layers=2, num_kv_heads=1, head_dim=6, dtype=torch.float16, block_size=4)
WIDE = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.float16)

DIRECTED = (
    Case(WIDE, 4, (Copy(1, 2, 16),)),
    Case(WIDE, 4, (Copy(1, 2, 5),)),
    Case(WIDE, 4, (Copy(3, 0, 15),)),
    Case(WIDE, 5, (Copy(1, 2, 1), Copy(1, 0, 16), Copy(3, 4, 7)), grid=(1, 1)),
    Case(ROWS_OF_48_BYTES, 3, (Copy(0, 2, 3),)),  # 36 bytes of each row: two vectors and a tail of four bytes
    Case(ROWS_OF_48_BYTES, 3, (Copy(2, 0, 1),)),  # no vector at all
    Case(ROWS_OF_40_BYTES, 3, (Copy(0, 1, 4),)),
    Case(ROWS_OF_40_BYTES, 3, (Copy(0, 1, 3),)),
)


def test_the_kernel_passes_the_directed_cases(kernel: SanitizedKernel) -> None:
    assert [case for case in DIRECTED if not same(case, kernel)] == []


LOAD = "held[i] = from[at[i]];"
MUTANTS = {
    "one token too many": ("(copy.tokens * token_bytes)", "((copy.tokens + 1) * token_bytes)"),
    "one token short": ("(copy.tokens * token_bytes)", "((copy.tokens - 1) * token_bytes)"),
    "k and v swapped": (LOAD, "held[i] = from[(at[i] / pitch ^ (rows > 1)) * pitch + at[i] % pitch];"),
    "layers swapped": (LOAD, "held[i] = from[(at[i] / pitch + 2 * (rows > 1)) % rows * pitch + at[i] % pitch];"),
    "the first layer only": ("ranges = static_cast<unsigned>(rows);", "ranges = 2;"),
    "no tail": ("ranges, length - done,", "ranges, 0,"),
    "vectors where rows are not aligned": ("copy_blocks<unsigned char>(pool", "copy_blocks<uint4>(pool"),
    "source for destination": ("dst = pool + copy.dst", "dst = pool + copy.src"),
    "the first pair only": ("pair += gridDim.y", "pair += count"),
    "a part of a whole block": ("length = static_cast<unsigned>(block_bytes);", "length = length;"),
    "units left out": ("column -= width;", "column = 0;"),
    "one access beyond the rows": ("at[i] = row < rows ?", "at[i] = row <= rows ?"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_faulty_kernel_is_caught(name: str, tmp_path: Path) -> None:
    mutant = SanitizedKernel(tmp_path / "mutant", kernel_text(MUTANTS[name]))

    def passes(case: Case) -> bool:
        try:
            return same(case, mutant)
        except SanitizerError:
            return False

    assert not all(map(passes, DIRECTED))


FAR = BlockShape(rows=2, row_bytes=16 * 32, token_bytes=32)
FAR_BLOCKS = (5 << 30) // FAR.block_bytes
"""A pool of 5 GiB, of which only the touched pages take memory."""


def copies_far(folder: Path, text: str) -> bool:
    """Tell whether a block below 4 GiB reaches one above and nothing lands where 32 bits would have it."""
    pool = torch.empty(FAR_BLOCKS * FAR.block_bytes, dtype=torch.uint8)
    last = FAR_BLOCKS - 1
    wrapped = last * FAR.block_bytes % (1 << 32)
    content = torch.arange(FAR.block_bytes) % 251
    blocks = pool.view(FAR_BLOCKS, FAR.block_bytes)
    blocks[7], blocks[last] = content, 0
    pool[wrapped : wrapped + FAR.block_bytes] = 0
    copies = [Copy(7, last, 16)]
    table = torch.tensor(copies, dtype=torch.int32)
    launch = plan_launch(copies, FAR, pool.data_ptr(), 4)
    InProcessKernel(folder, text).launch(launch, pool.data_ptr(), table.data_ptr(), 0)
    return torch.equal(blocks[last], blocks[7]) and not pool[wrapped : wrapped + FAR.block_bytes].any()


def test_offsets_are_64_bits_wide(tmp_path: Path) -> None:
    assert copies_far(tmp_path / "kernel", kernel_text())


def test_offsets_of_32_bits_are_caught(tmp_path: Path) -> None:
    narrow = kernel_text(("pool + copy.dst * block_bytes", "pool + static_cast<unsigned>(copy.dst * block_bytes)"))
    assert not copies_far(tmp_path / "kernel", narrow)


def test_a_replacement_that_replaces_nothing_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no such text"):
        kernel_text(("no such text", ""))


def test_the_sanitizer_sees_reads_of_blocks_that_no_copy_names(tmp_path: Path) -> None:
    neighbour = kernel_text(("src = pool + copy.src", "src = pool + (copy.src + 1)"))
    with pytest.raises(SanitizerError, match="use-after-poison"):
        same(Case(WIDE, 4, (Copy(1, 3, 5),)), SanitizedKernel(tmp_path / "mutant", neighbour))


@pytest.mark.parametrize("change", [("src", 3), ("dst", 3)])
def test_the_sanitizer_sees_blocks_outside_the_pool(kernel: SanitizedKernel, change: tuple[str, int]) -> None:
    copies = [Copy(0, 1, 16)._replace(**{change[0]: change[1]})]
    launch = plan_launch(copies, block_shape(WIDE), 0, 4)
    with pytest.raises(SanitizerError, match="AddressSanitizer"):
        kernel.run(launch, copies, bytes(3 * WIDE.block_bytes))
