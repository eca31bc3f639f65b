"""The copy kernel does what the reference does, to the byte, and nothing besides."""

import random
from typing import TYPE_CHECKING

import pytest
import torch

from prefixgate.cache.copy_plan import Copy
from prefixgate.cache.kv_storage import KVLayout, KVStorage, TorchKVStorage

if TYPE_CHECKING:
    from benchmarks.gpu_rig import Rig

NUM_BLOCKS = 96
BITS = {2: torch.int16, 4: torch.int32}


@pytest.fixture(autouse=True)
def kernel_is_there(rig: "Rig") -> None:
    if rig.no_kernel:
        pytest.fail(rig.no_kernel)


def random_layout(dice: random.Random) -> KVLayout:
    return KVLayout(
        num_layers=dice.choice([1, 2, 5, 32]),
        num_kv_heads=dice.choice([1, 2, 3, 8]),
        # With one or three heads some of these rows are no multiple of 16 bytes.
        head_dim=dice.choice([1, 9, 20, 64, 80, 128]),
        dtype=dice.choice([torch.float16, torch.bfloat16, torch.float32]),
    )


def random_copies(dice: random.Random) -> list[Copy]:
    """Sources and destinations apart, no destination twice, as plans are."""
    blocks = dice.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    split = dice.randint(1, NUM_BLOCKS - 1)
    sources, targets = blocks[:split], blocks[split:]
    count = dice.randint(1, len(targets))
    return [
        Copy(dice.choice(sources), target, dice.choice([16, 16, dice.randint(1, 16)])) for target in targets[:count]
    ]


def bits(storage: KVStorage) -> torch.Tensor:
    """The pool's bytes, in which not-a-numbers compare."""
    return storage.data.cpu().view(BITS[storage.layout.dtype.itemsize])


@pytest.mark.parametrize("seed", range(40))
def test_copies_are_those_of_the_reference_to_the_byte(rig: "Rig", seed: int) -> None:
    dice = random.Random(seed)
    layout, copies = random_layout(dice), random_copies(dice)
    reference = TorchKVStorage(NUM_BLOCKS, layout, scratch=True)
    reference.data.normal_()
    fresh = [copy.dst for copy in copies]
    reference.poison(fresh)
    storage = rig.storage(NUM_BLOCKS, layout)
    storage.data.copy_(reference.data)
    storage.poison(fresh)
    reference.copy_blocks(copies)
    storage.copy_blocks(copies)
    assert torch.equal(bits(storage), bits(reference))


def test_a_plan_of_thousands_of_pairs_is_one_like_others(rig: "Rig") -> None:
    layout, pairs = KVLayout(2, 2, 64, torch.float16), 4096
    storage = rig.storage(2 * pairs, layout)
    storage.data.normal_()
    before = storage.data.clone()
    copies = [Copy(source, source + pairs, 16 if source % 3 else 5) for source in range(pairs)]
    storage.copy_blocks(copies)
    for source, target, tokens in copies[:: pairs // 64]:
        assert torch.equal(storage.data[target, :, :, :tokens], before[source, :, :, :tokens])
        assert torch.equal(storage.data[target, :, :, tokens:], before[target, :, :, tokens:])
    assert torch.equal(storage.data[:pairs], before[:pairs])


def test_copies_are_ordered_between_what_was_queued_before_and_after(rig: "Rig") -> None:
    storage = rig.storage(4, KVLayout(32, 8, 128, torch.float16))
    for number in range(50):
        storage.data[0].fill_(number)
        storage.copy_blocks([Copy(0, 1, 16)])
        storage.data[0].fill_(-1)
        storage.copy_blocks([Copy(1, 2, 16)])
        assert float(storage.data[2].amin()) == float(storage.data[2].amax()) == number
