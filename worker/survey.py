"""How a worker stands as a whole: the pool, and the calls of all tenants. For the operator, never for a tenant."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from prefixgate.cache.accounts import Account
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.cache.stats import CacheStats
from prefixgate.proto import worker_pb2
from prefixgate.proto.metrics_page import MAX_TENANT_LABELS
from prefixgate.worker.observations import OTHER_TENANT, Observations
from prefixgate.worker.pool_map import PoolMap, PoolPicture
from prefixgate.worker.report import EngineReport
from prefixgate.worker.scheduler import Scheduler


class Survey(NamedTuple):
    """One moment between two steps."""

    stats: CacheStats
    accounts: list[Account]
    """As they were then."""
    running: Mapping[str, int]
    """Calls by tenant."""
    waiting: Mapping[str, int]
    picture: PoolPicture


class Surveyor:
    """Takes surveys, on the engine's thread. What it copies is bounded; the counting is left to others."""

    def __init__(self, cache: PrefixCache, scheduler: Scheduler, tenants: Iterable[str]) -> None:
        """``tenants`` are told of even where they have nothing."""
        self._cache = cache
        self._scheduler = scheduler
        self._tenants = tuple(tenants)

    def take(self) -> Survey:
        """Copy what there is."""
        cache, scheduler = self._cache, self._scheduler
        missing = (tenant for tenant in self._tenants if cache.accounts.find(tenant) is None)
        return Survey(
            cache.stats(),
            [replace(account) for account in (*cache.accounts, *map(cache.accounts.view, missing))],
            Counter(request.scope.tenant for request in scheduler.running),
            Counter(request.scope.tenant for request in scheduler.waiting),
            PoolPicture.of(cache),
        )


def write_totals(report: EngineReport, counts: Observations) -> worker_pb2.WorkerSurvey:
    """Tell what needs no look at the blocks."""
    labels = counts.labels()
    return worker_pb2.WorkerSurvey(
        pool=worker_pb2.PoolCounts(
            total=report.total_blocks,
            free=report.free_blocks,
            active=report.active_blocks,
            cached=report.cached_blocks,
            pinned=report.pinned_blocks,
        ),
        running_calls=report.running_calls,
        waiting_calls=report.waiting_calls,
        oldest_call_seconds=report.oldest_call_seconds,
        queried_tokens=sum(map(counts.queried_tokens, labels)),
        hit_tokens=sum(map(counts.hit_tokens, labels)),
        generated_tokens=sum(map(counts.generated_tokens.__getitem__, labels)),
        misses=dict(counts.misses),
        evicted_blocks=report.evicted_blocks,
        copied_blocks=report.copied_blocks,
        preemptions=counts.preemptions,
    )


def write_survey(
    message: worker_pb2.WorkerSurvey, survey: Survey, drawn: PoolMap, counts: Observations
) -> worker_pb2.WorkerSurvey:
    """Lay a survey over the totals, so that all that is told of blocks and calls is of one moment. Returns it."""
    stats = survey.stats
    message.pool.CopyFrom(
        worker_pb2.PoolCounts(
            total=stats.total_blocks,
            free=stats.free_blocks,
            active=stats.active_blocks,
            cached=stats.cached_blocks,
            pinned=stats.pinned_blocks,
        )
    )
    message.running_calls = sum(survey.running.values())
    message.waiting_calls = sum(survey.waiting.values())
    tenants = _tenants(survey, counts)
    message.tenants.extend(tenants)
    message.map.CopyFrom(_write_map(drawn, _positions(survey.accounts, [tenant.tenant for tenant in tenants])))
    return message


def _tenants(survey: Survey, counts: Observations) -> list[worker_pb2.TenantSurvey]:
    """Tell of those who have most, and of all others together."""
    by_name = {account.tenant: account for account in survey.accounts}
    names = by_name.keys() | survey.running.keys() | survey.waiting.keys()

    def figures(name: str) -> dict[str, int]:
        account, is_counted = by_name.get(name), name in counts.tenants
        return {
            "active_blocks": account.active if account else 0,
            "cached_blocks": account.cached if account else 0,
            "floor_blocks": account.floor if account else 0,
            "cap_blocks": account.cap if account else survey.stats.total_blocks,
            "running_calls": survey.running.get(name, 0),
            "waiting_calls": survey.waiting.get(name, 0),
            "queried_tokens": counts.queried_tokens(name) if is_counted else 0,
            "hit_tokens": counts.hit_tokens(name) if is_counted else 0,
        }

    all_figures = {name: figures(name) for name in names}
    order = sorted(names, key=lambda name: (-_weight(all_figures[name]), name))
    shown, folded = order[:MAX_TENANT_LABELS], order[MAX_TENANT_LABELS:]
    tenants = [worker_pb2.TenantSurvey(tenant=name, **all_figures[name]) for name in shown]
    queried, hit = counts.queried_tokens(OTHER_TENANT), counts.hit_tokens(OTHER_TENANT)
    if folded or queried:
        other = Counter[str](queried_tokens=queried, hit_tokens=hit)
        for name in folded:
            other.update(all_figures[name])
        other["cap_blocks"] = survey.stats.total_blocks
        tenants.append(worker_pb2.TenantSurvey(tenant=OTHER_TENANT, **other))
    return tenants


def _weight(figures: Mapping[str, int]) -> int:
    return sum(figures[key] for key in ("active_blocks", "cached_blocks", "running_calls", "waiting_calls"))


def _positions(accounts: Iterable[Account], tenants: list[str]) -> dict[int, int]:
    """Find which place in the list an account's number has; that of all others where it has none of its own."""
    places = {name: place for place, name in enumerate(tenants, 1)}
    # Accounts that are not open have number 0, as free blocks do.
    return {account.number: places.get(account.tenant, len(tenants)) for account in accounts if account.number}


def _write_map(drawn: PoolMap, positions: Mapping[int, int]) -> worker_pb2.PoolMap:
    return worker_pb2.PoolMap(
        blocks_per_cell=drawn.blocks_per_cell,
        stride=drawn.stride,
        free=drawn.free,
        active=drawn.active,
        cached=drawn.cached,
        pinned=drawn.pinned,
        holders=drawn.holders,
        owner=[positions.get(number, 0) for number in drawn.owners],
        sharing=drawn.sharing,
    )
