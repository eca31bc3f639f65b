"""The pool's size: from the settings, and from what a device has left."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.cache.kv_storage import KVLayout
from prefixgate.config.cache_settings import CacheSettings
from prefixgate.worker.model_runner import ModelRefusedError
from prefixgate.worker.pool_size import Room, pool_blocks

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float16)
"""Blocks of 4,096 bytes."""
ROOM = Room("cuda:0", free=50 * 4096, step=10 * 4096)


@pytest.mark.parametrize(
    ("cache", "room", "expected"),
    [
        (CacheSettings(blocks=5), None, 5),
        (CacheSettings(memory=3 * 4096 + 100), None, 3),
        (CacheSettings(), None, (512 << 20) // 4096),
        (CacheSettings(), ROOM, 36),
        (CacheSettings(memory_share=0.5), ROOM, 20),
        (CacheSettings(memory_share=1.0), ROOM, 40),
        (CacheSettings(memory=40 * 4096), ROOM, 40),
        (CacheSettings(blocks=40), ROOM, 40),
    ],
)
def test_the_pool_is_sized_in_blocks_bytes_or_by_a_share(
    cache: CacheSettings, room: Room | None, expected: int
) -> None:
    assert pool_blocks(cache, LAYOUT, room) == expected


@pytest.mark.parametrize(
    ("cache", "room", "words"),
    [
        (CacheSettings(memory=5000), None, "cache.memory: 5,000 bytes hold 1 blocks of 4,096 bytes; at least 8,192"),
        (CacheSettings(memory=5000), ROOM, "cuda:0 has 163,840 bytes left for a pool: 204,800 are free"),
        (CacheSettings(memory_share=0.01), ROOM, "cache.memory_share: 0.01, which is 1,638 bytes, hold 0 blocks"),
        (CacheSettings(memory=41 * 4096), ROOM, "cache.memory: 167,936 bytes take 167,936 bytes, and cuda:0 has"),
        (CacheSettings(blocks=41), ROOM, "at most 40 blocks fit"),
        (CacheSettings(), Room("cuda:3", 10, 20), "the largest step (worker.max_batch_tokens) needs 20"),
        (CacheSettings(memory_share=0.5), None, "cache.memory_share: 0.5 is a part of a CUDA device's memory"),
    ],
)
def test_a_size_that_cannot_be_names_setting_value_and_bound(
    cache: CacheSettings, room: Room | None, words: str
) -> None:
    with pytest.raises(ModelRefusedError, match=re.escape(words)):
        pool_blocks(cache, LAYOUT, room)


@given(
    free=st.integers(0, 1 << 40),
    step=st.integers(0, 1 << 36),
    share=st.one_of(st.none(), st.floats(0.01, 1)),
)
def test_a_pool_by_share_always_leaves_room_for_the_largest_step(free: int, step: int, share: float | None) -> None:
    try:
        blocks = pool_blocks(CacheSettings(memory_share=share), LAYOUT, Room("cuda:0", free, step))
    except ModelRefusedError:
        assert (free - step) * (share or 0.9) < 2 * LAYOUT.block_bytes
    else:
        assert 2 * LAYOUT.block_bytes <= blocks * LAYOUT.block_bytes <= free - step
