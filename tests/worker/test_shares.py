"""Parts of the pool and of the batch."""

import functools
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from prefixgate.cache.accounts import TenantShare
from prefixgate.cache.hashing import BlockHasher
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.fair_share import FairShare
from prefixgate.worker.shares import Shares

weights = st.lists(st.sampled_from([0.01, 0.5, 1.0, 3.0, 50.0]), min_size=1, max_size=12)


def most(may: Callable[[int], bool]) -> int:
    """The largest number that may be had."""
    return next(count for count in range(1000) if not may(count + 1))


def may_have_blocks(shares: Shares, tenant: str, count: int) -> bool:
    return shares.may_add(tenant, blocks=count, sequences=0)


def may_have_sequences(shares: Shares, tenant: str, count: int) -> bool:
    return shares.may_add(tenant, blocks=0, sequences=count)


@given(weights, st.integers(1, 40), st.integers(20, 200), st.integers(0, 3))
def test_parts_come_to_no_more_than_there_is(
    tenant_weights: list[float], max_running: int, num_blocks: int, floor: int
) -> None:
    tenants = {f"t{number}": weight for number, weight in enumerate(tenant_weights)}
    floors = {"t0": TenantShare(floor=floor), "absent": TenantShare(floor=floor)}
    fair = FairShare(tenants)
    for tenant in tenants:
        fair.enter(tenant)
    cache = PrefixCache(num_blocks, BlockHasher(bytes(16)), shares=floors)
    shares = Shares(cache, fair, [], [], max_running)
    blocks = [most(functools.partial(may_have_blocks, shares, tenant)) for tenant in tenants]
    sequences = [most(functools.partial(may_have_sequences, shares, tenant)) for tenant in tenants]
    assert sum(blocks) <= num_blocks - floor, "the absent one's floor is kept for it"
    assert blocks[0] >= floor
    assert min(sequences) >= 1
    assert sum(sequences) <= max(max_running, len(tenants))
