"""Which launch a plan becomes: entry, grid and arguments, before any device is there."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.cache.copy_kernel import SOURCE
from prefixgate.cache.copy_launch import (
    ACCESSES_IN_FLIGHT,
    MAX_BLOCK_BYTES,
    MAX_ROUNDS,
    THREADS,
    BlockShape,
    check_copies,
    plan_launch,
)
from prefixgate.cache.copy_plan import Copy

LARGE = BlockShape(rows=64, row_bytes=16 * 8192, token_bytes=8192)
"""Blocks of 8 MiB: 32 layers, 32 heads of 128 numbers of 16 bits."""

SMALL = BlockShape(rows=60, row_bytes=16 * 384, token_bytes=384)
PROCESSORS = 132
ROUND = PROCESSORS * 4
"""Thread blocks that run at once, where four fit on each multiprocessor."""


def pairs(count: int, tokens: int = 16) -> list[Copy]:
    return [Copy(0, index + 1, tokens) for index in range(count)]


def thread_blocks(count: int, shape: BlockShape = LARGE, tokens: int = 16) -> int:
    grid = plan_launch(pairs(count, tokens), shape, 0, PROCESSORS).grid
    return grid[0] * grid[1]


@pytest.mark.parametrize("count", [1, 2, 64, 1_000, 4_096])
def test_one_pair_fills_the_device_and_so_do_thousands(count: int) -> None:
    # Eight rounds: then the last, which may leave almost all of the device idle, is an eighth of the work at most.
    assert thread_blocks(count) >= min(8 * ROUND, count * LARGE.block_bytes // (16 * THREADS * ACCESSES_IN_FLIGHT))
    assert thread_blocks(count) >= ROUND / 2


@pytest.mark.parametrize("count", [1, 64, 4_096])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_no_slice_takes_more_than_some_rounds(count: int, tokens: int) -> None:
    slices = plan_launch(pairs(count, tokens), LARGE, 0, PROCESSORS).grid[0]
    accesses = LARGE.rows * LARGE.token_bytes * tokens // 16
    assert accesses <= slices * THREADS * ACCESSES_IN_FLIGHT * MAX_ROUNDS


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_no_slice_is_too_small_to_have_accesses_under_way(tokens: int) -> None:
    slices = plan_launch(pairs(1, tokens), SMALL, 0, PROCESSORS).grid[0]
    accesses = SMALL.rows * SMALL.token_bytes * tokens // 16
    assert (slices - 1) * THREADS * ACCESSES_IN_FLIGHT < accesses <= slices * THREADS * ACCESSES_IN_FLIGHT


def test_the_longest_copy_sets_the_slices() -> None:
    mixed = [Copy(0, 1, 1), Copy(0, 2, 16), Copy(0, 3, 2)]
    assert plan_launch(mixed, SMALL, 0, PROCESSORS).grid[0] == plan_launch(pairs(1), SMALL, 0, PROCESSORS).grid[0]


@given(count=st.integers(1, 70_000), tokens=st.integers(0, 16), processors=st.integers(1, 300))
def test_every_grid_is_one_that_devices_take(count: int, tokens: int, processors: int) -> None:
    x, y, z = plan_launch(pairs(1, tokens) * count, LARGE, 0, processors).grid
    assert 1 <= x < 1 << 31
    assert y == min(count, 65_535)
    assert z == 1


def test_a_launch_says_what_the_kernel_needs() -> None:
    assert plan_launch(pairs(3, 5), SMALL, 4096, PROCESSORS).arguments == (3, 60, 6144, 384)


@pytest.mark.parametrize(
    ("address", "row_bytes", "entry"),
    [
        (4096, 96, "copy_vectors"),
        (4096 + 16, 96, "copy_vectors"),
        (4096 + 8, 96, "copy_bytes"),
        (4096, 104, "copy_bytes"),
    ],
)
def test_vectors_are_for_rows_that_all_begin_at_multiples_of_16(address: int, row_bytes: int, entry: str) -> None:
    assert plan_launch(pairs(1, 1), BlockShape(4, row_bytes, 8), address, PROCESSORS).entry == entry


def test_a_block_that_32_bits_cannot_count_is_refused() -> None:
    assert BlockShape(1, MAX_BLOCK_BYTES, 1).block_bytes == MAX_BLOCK_BYTES
    with pytest.raises(ValueError, match="a block of 2,147,483,648 bytes: the copy kernel takes at most 2,147,483,647"):
        BlockShape(2, 1 << 30, 1 << 26)


@pytest.mark.parametrize("copy", [Copy(-1, 1, 16), Copy(8, 1, 16), Copy(1, -1, 16), Copy(1, 8, 16)])
def test_blocks_outside_the_pool_are_refused(copy: Copy) -> None:
    with pytest.raises(IndexError, match=r"src and dst must be from 0 to 7"):
        check_copies([Copy(0, 7, 16), copy], num_blocks=8, block_size=16)


@pytest.mark.parametrize("tokens", [-1, 17])
def test_tokens_outside_a_block_are_refused(tokens: int) -> None:
    with pytest.raises(IndexError, match=r"tokens must be from 0 to 16"):
        check_copies([Copy(0, 1, tokens)], num_blocks=8, block_size=16)
    check_copies([Copy(0, 1, 0), Copy(0, 2, 16)], num_blocks=8, block_size=16)


def test_kernel_and_launch_agree_on_threads_and_accesses() -> None:
    source = SOURCE.read_text()
    assert re.findall(r"__launch_bounds__\((\d+)\)", source) == [str(THREADS)] * 2
    assert re.findall(r"IN_FLIGHT = (\d+);", source) == [str(ACCESSES_IN_FLIGHT)]
    assert re.findall(r"^(copy_\w+)\(char\* pool, .*$", source, re.MULTILINE) == ["copy_vectors", "copy_bytes"]
