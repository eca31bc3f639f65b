"""The witness model is an honest oracle: each way to corrupt a cache, done on purpose, changes what it says.

Every test has two sides. Unharmed, the call reuses what an earlier one left and says what it would have said alone.
With one fault put in, the same call through the same steps says something else.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch

from prefixgate.cache.copy_plan import Copy, CopyPlan
from prefixgate.cache.hashing import ROOT_HASH, BlockHash, BlockHasher, CacheScope
from prefixgate.cache.kv_storage import TorchKVStorage
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.cache.prefix_index import PrefixIndex
from prefixgate.worker.model_runner import ModelRunner, Row
from prefixgate.worker.witness import WitnessModel, witness_layout

KEY = b"a key for tests!"
NUM_BLOCKS = 24
ACME = CacheScope("acme", "witness@1")
BOLT = CacheScope("bolt", "witness@1")
PROMPT = list(range(40, 90))
FORK = [*PROMPT[:41], *range(140, 150)]
"""Leaves the prompt inside its third block: two whole blocks are shared, and 9 tokens of the third are copied."""


@dataclass(frozen=True)
class Reply:
    """What a call said, and how much of its prompt was not computed."""

    output: list[int]
    cached_tokens: int


class Bench:
    """A cache, a storage and a model, driven without an engine, so that each of them can be replaced by a bad one."""

    def __init__(
        self,
        storage: TorchKVStorage | None = None,
        hasher: BlockHasher | None = None,
        index: type[PrefixIndex] = PrefixIndex,
        wrap: Callable[[ModelRunner], ModelRunner] = lambda model: model,
    ) -> None:
        self.storage = storage or TorchKVStorage(NUM_BLOCKS, witness_layout())
        self.cache = PrefixCache(NUM_BLOCKS, hasher or BlockHasher(KEY), index=index)
        self.model = wrap(WitnessModel("witness", self.storage))
        self.claimed_written = 0
        """By how many tokens the cache is told too much of what was written."""

    def run_plan(self, plan: CopyPlan) -> None:
        self.storage.poison(plan.fresh)
        self.storage.copy_blocks(plan.copies)

    def ask(self, prompt: Sequence[int], scope: CacheScope = ACME, count: int = 6) -> Reply:
        """Serve one call, greedily."""
        token_ids = list(prompt)
        admission = self.cache.admit(scope, token_ids, max_new_tokens=count)
        assert admission is not None
        table, computed = admission.table, admission.cached_tokens
        while len(token_ids) < len(prompt) + count:
            self.cache.writable(table, computed, len(token_ids))
            self.cache.run_plan(self.run_plan)
            row = Row(token_ids[computed:], computed, table.block_ids, scope, True)
            logits = self.model.forward([row])
            computed = len(token_ids)
            token_ids.append(int(logits[0].argmax()))
            self.cache.publish(table, computed + self.claimed_written)
        self.cache.release(table, computed + self.claimed_written)
        return Reply(token_ids[len(prompt) :], admission.cached_tokens)


def solo(prompt: Sequence[int], scope: CacheScope = ACME) -> list[int]:
    return Bench().ask(prompt, scope).output


# Copies


class CopyingWrongly(TorchKVStorage):
    """Copies rightly, then spoils the copy."""

    def __init__(self, spoil: Callable[[torch.Tensor, torch.Tensor, int], None]) -> None:
        super().__init__(NUM_BLOCKS, witness_layout())
        self.spoil = spoil
        self.spoiled = 0

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        before = self.data.clone()
        super().copy_blocks(copies)
        for copy in copies:
            self.spoil(self.data[copy.dst], before[copy.dst], copy.tokens)
            self.spoiled += 1


def swap(block: torch.Tensor, dimension: int) -> None:
    block.copy_(block.flip(dimension))


def layer_missing(block: torch.Tensor, before: torch.Tensor, tokens: int) -> None:
    block[1] = before[1]


def keys_missing(block: torch.Tensor, before: torch.Tensor, tokens: int) -> None:
    block[:, 0] = before[:, 0]


def one_token_short(block: torch.Tensor, before: torch.Tensor, tokens: int) -> None:
    block[:, :, tokens - 1] = before[:, :, tokens - 1]


def head_missing(block: torch.Tensor, before: torch.Tensor, tokens: int) -> None:
    block[:, :, :, 1] = before[:, :, :, 1]


def late(block: torch.Tensor, before: torch.Tensor, tokens: int) -> None:
    block.copy_(before)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda block, before, tokens: swap(block, 0), id="layers swapped"),
        pytest.param(lambda block, before, tokens: swap(block, 1), id="keys and values swapped"),
        pytest.param(lambda block, before, tokens: swap(block, 3), id="heads swapped"),
        pytest.param(lambda block, before, tokens: swap(block[:, :, :tokens], 2), id="tokens reversed"),
        layer_missing,
        keys_missing,
        head_missing,
        one_token_short,
        late,
    ],
)
def test_a_copy_gone_wrong_is_seen(spoil: Callable[[torch.Tensor, torch.Tensor, int], None]) -> None:
    sound, storage = Bench(), CopyingWrongly(spoil)
    unsound = Bench(storage)
    for bench in (sound, unsound):
        assert bench.ask(PROMPT).output == solo(PROMPT)
    right, wrong = sound.ask(FORK), unsound.ask(FORK)
    assert right == Reply(solo(FORK), cached_tokens=41)
    assert (wrong.cached_tokens, storage.spoiled) == (41, 1)
    assert wrong.output != right.output


# What finds a block


class ParentlessHasher(BlockHasher):
    """Names a block by its own tokens alone, whatever came before them."""

    def hash_block(self, parent: BlockHash, scope_digest: bytes, packed_ids: bytes) -> BlockHash:
        return super().hash_block(ROOT_HASH, scope_digest, packed_ids)

    def hash_blocks(self, parent: BlockHash, scope_digest: bytes, blocks: Iterable[bytes]) -> list[BlockHash]:
        return [self.hash_block(parent, scope_digest, packed_ids) for packed_ids in blocks]


class ParentlessIndex(PrefixIndex):
    """Compares the tokens of a candidate and not what it hangs under."""

    def match(self, root: int, hashes: Sequence[BlockHash], contents: Sequence[bytes]) -> tuple[list[int], bool]:
        found: list[int] = []
        for block_hash, content in zip(hashes, contents, strict=True):
            block = self.find(block_hash)
            if block is None or self.contents[block] != content:
                break
            found.append(block)
        return found, False


OTHER_START = [*range(200, 216), *PROMPT[16:]]
"""The prompt with another first block: its second block has equal tokens and unequal keys and values."""


def test_a_hash_without_the_parent_is_caught_by_the_comparison() -> None:
    bench = Bench(hasher=ParentlessHasher(KEY))
    bench.ask(OTHER_START)
    bench.ask(PROMPT[:16])
    assert bench.ask(PROMPT) == Reply(solo(PROMPT), cached_tokens=16)
    assert bench.cache.stats().collisions_total > 0, "a right hash finds nothing here that needs refusing"


def test_a_comparison_without_the_parent_is_made_up_for_by_the_hash() -> None:
    bench = Bench(index=ParentlessIndex)
    bench.ask(OTHER_START)
    bench.ask(PROMPT[:16])
    assert bench.ask(PROMPT) == Reply(solo(PROMPT), cached_tokens=16)


def test_no_parent_in_the_hash_and_none_in_the_comparison_is_seen() -> None:
    bench = Bench(hasher=ParentlessHasher(KEY), index=ParentlessIndex)
    bench.ask(OTHER_START)
    bench.ask(PROMPT[:16])
    reply = bench.ask(PROMPT)
    assert reply.cached_tokens > 16
    assert reply.output != solo(PROMPT)


class ScopelessHasher(BlockHasher):
    """Names blocks the same for everyone."""

    def scope_digest(self, scope: CacheScope) -> bytes:
        return bytes(16)


class ScopelessIndex(PrefixIndex):
    """Keeps one tree for everyone."""

    def find_root(self, scope: CacheScope) -> int | None:
        return super().find_root(ACME)

    def hold_root(self, scope: CacheScope) -> int:
        return super().hold_root(ACME)


def test_a_foreign_block_is_seen() -> None:
    bench = Bench()
    bench.ask(PROMPT)
    assert bench.ask(PROMPT, BOLT) == Reply(solo(PROMPT, BOLT), cached_tokens=0)
    careless = Bench(hasher=ScopelessHasher(KEY), index=ScopelessIndex)
    careless.ask(PROMPT)
    reply = careless.ask(PROMPT, BOLT)
    assert reply.cached_tokens == len(PROMPT) - 1
    assert reply.output != solo(PROMPT, BOLT)


# What is in a block


def test_a_slot_published_before_it_is_written_is_seen() -> None:
    """The token sampled last has no keys and values; 42 and its 6 new tokens would fill the third block."""
    for claimed_written in (0, 1):
        bench = Bench()
        bench.claimed_written = claimed_written
        first = bench.ask(PROMPT[:42])
        following = [*PROMPT[:42], *first.output, 7]
        reply = bench.ask(following)
        assert reply.cached_tokens == 47 + claimed_written
        assert (reply.output == solo(following)) == (claimed_written == 0)


def cached_blocks(bench: Bench, prompt: list[int]) -> list[int]:
    return bench.cache.match(ACME, prompt).blocks


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_block_that_was_reused_while_still_indexed_is_seen(position: int) -> None:
    bench = Bench()
    other = [*range(150, 199), 7]
    bench.ask(PROMPT)
    bench.ask(other)
    stale = cached_blocks(bench, PROMPT)[position]
    bench.storage.data[stale] = bench.storage.data[cached_blocks(bench, other)[position]]
    reply = bench.ask(PROMPT)
    assert reply.cached_tokens == 49
    assert reply.output != solo(PROMPT)


class Misplacing:
    """A model whose rows reach it with two blocks of their table exchanged."""

    def __init__(self, inner: ModelRunner) -> None:
        self.inner = inner
        self.spec, self.storage = inner.spec, inner.storage
        self.active = False

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        if self.active:
            rows = [row._replace(block_ids=[row.block_ids[1], row.block_ids[0], *row.block_ids[2:]]) for row in rows]
        return self.inner.forward(rows)


def test_blocks_in_the_wrong_order_are_seen() -> None:
    bench = Bench(wrap=Misplacing)
    bench.ask(PROMPT)
    assert bench.ask(PROMPT) == Reply(solo(PROMPT), cached_tokens=49)
    assert isinstance(bench.model, Misplacing)
    bench.model.active = True
    assert bench.ask(PROMPT).output != solo(PROMPT)


def test_a_poisoned_slot_is_seen() -> None:
    bench = Bench()
    bench.ask(PROMPT)
    bench.storage.poison(cached_blocks(bench, PROMPT)[1:2])
    assert bench.ask(PROMPT).output != solo(PROMPT)
