"""The pool's bytes: what a copy moves, and what it leaves alone."""

import pytest
import torch

from prefixgate.cache.copy_plan import Copy
from prefixgate.cache.kv_storage import KVLayout, TorchKVStorage

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)


def filled(blocks: int, layout: KVLayout = LAYOUT) -> TorchKVStorage:
    storage = TorchKVStorage(blocks, layout)
    storage.data.copy_(torch.arange(storage.data.numel()).reshape(storage.data.shape))
    return storage


def test_a_block_is_one_contiguous_range_of_the_stated_size() -> None:
    storage = filled(4)
    assert storage.data.shape == (4, 3, 2, 16, 2, 4)
    assert storage.data[1].is_contiguous()
    assert storage.data[1].numel() * 4 == LAYOUT.block_bytes
    assert LAYOUT.token_bytes * 16 == LAYOUT.block_bytes


@pytest.mark.parametrize("tokens", [1, 7, 15, 16])
def test_a_copy_moves_the_first_tokens_of_every_layer_and_nothing_else(tokens: int) -> None:
    storage = filled(4)
    expected = storage.data.clone()
    for layer in range(3):
        for half in range(2):
            for token in range(tokens):
                expected[2, layer, half, token] = expected[0, layer, half, token]
    storage.copy_blocks([Copy(0, 2, tokens)])
    assert torch.equal(storage.data, expected)


def test_one_source_serves_many_destinations() -> None:
    storage = filled(5)
    source = storage.data[0].clone()
    storage.copy_blocks([Copy(0, 1, 16), Copy(0, 2, 16), Copy(0, 3, 5)])
    assert torch.equal(storage.data[1], source)
    assert torch.equal(storage.data[2], source)
    assert torch.equal(storage.data[3, :, :, :5], source[:, :, :5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_poison_spoils_whole_blocks_and_only_those(dtype: torch.dtype) -> None:
    storage = TorchKVStorage(3, KVLayout(1, 1, 4, dtype))
    storage.poison([1])
    assert not storage.data[0].any()
    assert not storage.data[2].any()
    spoiled = storage.data[1]
    assert spoiled.isnan().all() if dtype.is_floating_point else (spoiled == torch.iinfo(dtype).min).all()
    storage.poison([])
