"""How an engine stands, in figures taken together."""

from typing import NamedTuple

from prefixgate.cache.accounts import Account


class TenantBlocks(NamedTuple):
    """What a tenant holds of the pool."""

    active: int = 0
    cached: int = 0
    floor: int = 0

    @classmethod
    def of(cls, account: Account | None) -> "TenantBlocks":
        """Read an account; one that is not open holds nothing."""
        return cls() if account is None else cls(account.active, account.cached, account.floor)


class EngineReport(NamedTuple):
    """The state after a step. Totals count from the engine's start."""

    total_blocks: int
    free_blocks: int
    active_blocks: int
    cached_blocks: int
    running_calls: int
    """Admitted and not ended."""
    running_sequences: int
    """Their outputs that are not finished."""
    waiting_calls: int
    waiting_sequences: int
    oldest_call_seconds: float
    """Age of the oldest live call; 0 with none."""
    steps: int
    computed_tokens: int
    """Tokens that the model computed, prompts and outputs together."""
    copied_blocks: int
    evicted_blocks: int
    evicted_idle_seconds: float
    """From their last use to their eviction, of all of these added up."""
    pins: int
    """Leases on prefixes, of all tenants."""
    pinned_blocks: int
    """Blocks that they hold, each counted once."""
    pin_limit_blocks: int
    hash_collisions: int
    integrity_checks: int
    integrity_violations: int
    metrics_errors: int
    """Observations that raised and were dropped."""
