"""Helpers that take a sequence through its life without an engine."""

from prefixgate.cache.admission import Admission
from prefixgate.cache.block_table import BlockTable
from prefixgate.cache.copy_plan import CopyPlan
from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache

KEY = b"a key for tests!"
SCOPE = CacheScope("tenant", "model@1")
OTHER = CacheScope("other", "model@1")


def make_cache(blocks: int) -> PrefixCache:
    return PrefixCache(blocks, BlockHasher(KEY))


def take_plan(cache: PrefixCache) -> CopyPlan:
    """Run what is planned, on no bytes at all, and tell what it was."""
    plans: list[CopyPlan] = []
    cache.run_plan(plans.append)
    return plans[0]


def admit(
    cache: PrefixCache, ids: list[int], *, new: int = 1, outputs: int = 1, scope: CacheScope = SCOPE
) -> Admission:
    admission = cache.admit(scope, list(ids), max_new_tokens=new, outputs=outputs)
    assert admission is not None
    return admission


def prefill(cache: PrefixCache, table: BlockTable) -> None:
    """Write all of a table's tokens and publish them."""
    cache.writable(table, len(table.token_ids) - 1, len(table.token_ids))
    take_plan(cache)
    cache.publish(table, len(table.token_ids))


def serve(cache: PrefixCache, ids: list[int], *, scope: CacheScope = SCOPE) -> Admission:
    """One whole call: admitted, computed, released."""
    admission = admit(cache, ids, scope=scope)
    prefill(cache, admission.table)
    cache.release(admission.table, len(ids))
    cache.check_integrity()
    return admission


def serve_cached(cache: PrefixCache, ids: list[int], *, scope: CacheScope = SCOPE) -> int:
    return serve(cache, ids, scope=scope).cached_tokens
