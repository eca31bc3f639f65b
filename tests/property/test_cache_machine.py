"""A random life of the cache against a plain model: bytes in the pool stand for what was computed there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixgate.cache.accounts import TenantShare
from prefixgate.cache.adaptive import AdaptivePolicy
from prefixgate.cache.admission import CacheMode
from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.copy_plan import CopyPlan
from prefixgate.cache.eviction import EvictionPolicy
from prefixgate.cache.hashing import BlockHash, BlockHasher, CacheScope
from prefixgate.cache.lru import LRUPolicy
from prefixgate.cache.matching import MissReason
from prefixgate.cache.pins import Pin, PinLimitError
from prefixgate.cache.prefix_cache import PrefixCache

BLOCK = 2
POOL = 8
SCOPES = (CacheScope("a", "m"), CacheScope("b", "m"), CacheScope("a", "m", salt="s"), CacheScope("c", "m"))
tokens = st.integers(0, 1)
soak = os.environ.get("PREFIXGATE_SOAK") == "1"


class WeakHasher(BlockHasher):
    """Four bits of hash, so that collisions are the rule."""

    def hash_block(self, parent: BlockHash, scope_digest: bytes, packed_ids: bytes) -> BlockHash:
        return BlockHash(bytes(15) + bytes([super().hash_block(parent, scope_digest, packed_ids)[0] & 15]))

    def hash_blocks(self, parent, scope_digest, blocks):  # type: ignore[no-untyped-def]
        hashes = []
        for block in blocks:
            parent = self.hash_block(parent, scope_digest, block)
            hashes.append(parent)
        return hashes


@dataclass
class Live:
    """A sequence as the engine keeps it."""

    table: BlockTable
    written: int
    prompt: int
    limit: int
    outputs: int
    planned: bool = False
    """Whether its copies may still have to run."""


class CacheMachine(RuleBasedStateMachine):
    """Slots hold what a model would compute: the scope and all tokens up to theirs. Any wrong slot shows at once."""

    weak = False
    policy: Callable[[int, Callable[[int], bool]], EvictionPolicy] = LRUPolicy

    def __init__(self) -> None:
        super().__init__()
        hasher = (WeakHasher if self.weak else BlockHasher)(b"0123456789abcdef", block_size=BLOCK)
        shares = {"a": TenantShare(floor=2, cap=6), "b": TenantShare(floor=1)}
        self.cache = PrefixCache(POOL, hasher, shares=shares, pin_limit=3, policy=self.policy)
        self.pins: list[Pin] = []
        self.now = 0.0
        self.bytes: list[list[object]] = [[None] * BLOCK for _ in range(POOL)]
        self.live: list[Live] = []

    def run_plan(self) -> None:
        self.cache.run_plan(self.execute)
        for live in self.live:
            live.planned = False

    def execute(self, plan: CopyPlan) -> None:
        sources = {copy.src for copy in plan.copies}
        destinations = [copy.dst for copy in plan.copies]
        assert not sources & set(destinations)
        assert len(set(destinations)) == len(destinations)
        assert not sources & set(plan.fresh)
        for block in plan.fresh:
            self.bytes[block] = ["poison"] * BLOCK
        for src, dst, count in plan.copies:
            self.bytes[dst][:count] = self.bytes[src][:count]

    def slot(self, table: BlockTable, position: int) -> tuple[int, int]:
        return table.block_ids[position // BLOCK], position % BLOCK

    def check_written(self, live: Live) -> None:
        for position in range(live.written):
            block, offset = self.slot(live.table, position)
            expected = (live.table.scope, tuple(live.table.token_ids[: position + 1]))
            assert self.bytes[block][offset] == expected, f"position {position}"

    def compute(self, live: Live, count: int) -> None:
        stop = live.written + count
        self.cache.writable(live.table, live.written, stop)
        self.run_plan()
        self.check_written(live)
        for position in range(live.written, stop):
            block, offset = self.slot(live.table, position)
            self.bytes[block][offset] = (live.table.scope, tuple(live.table.token_ids[: position + 1]))
        live.written = stop
        self.cache.publish(live.table, stop)

    @rule(
        scope=st.sampled_from(SCOPES),
        prompt=st.lists(tokens, min_size=1, max_size=9),
        new=st.integers(1, 6),
        outputs=st.integers(1, 3),
        mode=st.sampled_from((CacheMode.DEFAULT, CacheMode.DEFAULT, CacheMode.READ_ONLY, CacheMode.BYPASS)),
        retention=st.sampled_from((None, None, 10, 90)),
    )
    def admit(
        self,
        scope: CacheScope,
        prompt: list[int],
        new: int,
        outputs: int,
        mode: CacheMode,
        retention: int | None,
    ) -> None:
        expected = self.cache.match(scope, prompt).cached_tokens
        before = self.cache.stats()
        held = {account.tenant: account.held for account in self.cache.accounts}
        own = self.cache.accounts.of(scope.tenant)
        needed = self.cache.blocks_needed(len(prompt), new, outputs)
        within_floor = own.active + own.promised + needed <= own.floor
        if self.cache.blocks_needed(len(prompt), new, outputs) > self.cache.ceiling(scope.tenant):
            return
        admission = self.cache.admit(scope, prompt, outputs=outputs, max_new_tokens=new, mode=mode, retention=retention)
        if admission is None:
            assert self.cache.stats() == before
            # A call within its tenant's ceiling is only ever refused because of what lives.
            assert self.live or self.pins
            assert not within_floor
            return
        for account in self.cache.accounts:
            if account is not own:
                assert account.held >= min(held[account.tenant], account.floor)
        if mode is CacheMode.BYPASS:
            assert admission.cached_tokens == 0
        assert admission.cached_tokens <= len(prompt) - 1
        assert admission.cached_tokens <= expected
        limit = len(prompt) + new - 1
        self.live.append(Live(admission.table, admission.cached_tokens, len(prompt), limit, outputs, planned=True))

    @precondition(lambda self: any(live.written < live.limit for live in self.live))
    @rule(data=st.data(), token=tokens, chunk=st.integers(1, 5))
    def step(self, data: st.DataObject, token: int, chunk: int) -> None:
        live = data.draw(st.sampled_from([live for live in self.live if live.written < live.limit]))
        if live.written < live.prompt:
            self.compute(live, min(chunk, live.prompt - live.written))
        else:
            live.table.token_ids.append(token)
            self.compute(live, 1)
        if live.written >= live.prompt and live.outputs > 1:
            for _ in range(live.outputs - 1):
                ids = list(live.table.token_ids)
                self.live.append(Live(self.cache.fork(live.table, ids), live.written, live.prompt, live.limit, 1))
            live.outputs = 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), extra=st.booleans())
    def finish(self, data: st.DataObject, extra: bool) -> None:
        live = data.draw(st.sampled_from(self.live))
        self.live.remove(live)
        if extra and live.written >= live.prompt:  # the last sampled token, which has no slot
            live.table.token_ids.append(1)
        self.cache.release(live.table, live.written)
        self.cache.release(live.table, live.written)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fault(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        self.live.remove(live)
        self.cache.release(live.table, live.table.num_published * BLOCK)

    @rule(scope=st.sampled_from(SCOPES), prompt=st.lists(tokens, max_size=9), ttl=st.integers(1, 5))
    def pin(self, scope: CacheScope, prompt: list[int], ttl: int) -> None:
        before = self.cache.stats()
        try:
            pin = self.cache.pin(scope, prompt, expires_at=self.now + ttl)
        except PinLimitError:
            assert self.cache.stats() == before
        else:
            assert pin.blocks == self.cache.match(scope, [*prompt, 0]).blocks[: len(pin.blocks)]
            assert pin.expires_at >= self.now + ttl
            if pin in self.pins:
                assert self.cache.stats() == before
            else:
                assert not pin.blocks or pin.blocks not in [other.blocks for other in self.pins]
                self.pins.append(pin)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(self.pins))
        self.pins.remove(pin)
        assert self.cache.unpin(pin.account.tenant, pin.pin_id)
        assert not self.cache.unpin(pin.account.tenant, pin.pin_id)

    @rule(by=st.integers(1, 3))
    def time_passes(self, by: int) -> None:
        self.now += by
        due = [pin for pin in self.pins if pin.expires_at <= self.now]
        assert self.cache.expire(self.now) == len(due)
        self.pins = [pin for pin in self.pins if pin not in due]

    @rule(scope=st.sampled_from(SCOPES))
    def flush_salt(self, scope: CacheScope) -> None:
        prompts = ([0] * 6, [1] * 6)
        others = [other for other in SCOPES if other != scope]
        before = [self.cache.match(other, prompt).cached_tokens for other in others for prompt in prompts]
        self.cache.flush(scope.tenant, scope.salt)
        assert [self.cache.match(scope, prompt).cached_tokens for prompt in prompts] == [0, 0]
        assert [self.cache.match(other, prompt).cached_tokens for other in others for prompt in prompts] == before

    @rule(tenant=st.sampled_from(("a", "b", "c")))
    def flush(self, tenant: str) -> None:
        self.cache.flush(tenant)
        for scope in SCOPES:
            if scope.tenant == tenant:
                assert self.cache.match(scope, [0] * 6).cached_tokens == 0
                assert self.cache.match(scope, [1] * 6).cached_tokens == 0

    @rule(scope=st.sampled_from(SCOPES), prompt=st.lists(tokens, min_size=1, max_size=9))
    def explain(self, scope: CacheScope, prompt: list[int]) -> None:
        explained = self.cache.explain(scope, prompt)
        assert explained.missed_at == self.cache.match(scope, prompt).cached_tokens
        assert (explained.reason is MissReason.NONE) == (explained.missed_at == len(prompt) - 1)

    @invariant()
    def sound(self) -> None:
        self.cache.check_integrity()
        for live in self.live:
            if not live.planned:
                self.check_written(live)

    def teardown(self) -> None:
        for live in self.live:
            self.cache.release(live.table, live.written)
        self.cache.expire(self.now + 10)
        self.run_plan()
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert sum(self.cache.pool.ref_counts) == 0
        assert (stats.reserved_blocks, stats.pinned_blocks) == (0, 0)
        assert stats.free_blocks + stats.cached_blocks == POOL


class WeakHashMachine(CacheMachine):
    """The same with a hash that collides all the time."""

    weak = True


# About 45 steps each: the three machines take over 13,000 together.
_profile = settings(
    max_examples=1_000 if soak else 100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class AdaptiveMachine(CacheMachine):
    """The same with the policy that a worker has by default."""

    policy = AdaptivePolicy


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = _profile
TestAdaptiveMachine = AdaptiveMachine.TestCase
TestAdaptiveMachine.settings = _profile
TestWeakHashMachine = WeakHashMachine.TestCase
TestWeakHashMachine.settings = _profile
