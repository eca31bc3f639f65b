"""Answers about the cache to protocol messages."""

from prefixgate.cache.matching import Explanation, MissReason
from prefixgate.proto import gateway_pb2
from prefixgate.worker.cache_control import PinnedPrefix, Standing

_REASONS = {
    MissReason.NONE: gateway_pb2.MISS_REASON_NONE,
    MissReason.NEVER_SEEN: gateway_pb2.MISS_REASON_NEVER_SEEN,
    MissReason.EVICTED: gateway_pb2.MISS_REASON_EVICTED,
    MissReason.DIVERGED: gateway_pb2.MISS_REASON_DIVERGED,
}


def write_explanation(found: Explanation, *, prompt_tokens: int, incarnation: str) -> gateway_pb2.ExplainResponse:
    """Tell where a prompt leaves the cache."""
    return gateway_pb2.ExplainResponse(
        prompt_tokens=prompt_tokens,
        cached_tokens=found.missed_at,
        block_hit_tokens=found.block_hit_tokens,
        partial_copy_tokens=found.partial_copy_tokens,
        claimed_tail_tokens=found.claimed_tail_tokens,
        miss_reason=_REASONS[found.reason],
        diverged_at=found.diverged_at,
        continuation_tokens=found.continuation_tokens,
        incarnation=incarnation,
    )


def write_pin(pin: PinnedPrefix, *, incarnation: str) -> gateway_pb2.PinnedPrefix:
    """Tell of a pin."""
    return gateway_pb2.PinnedPrefix(
        pin_id=f"{pin.pin_id:016x}",
        salt=pin.salt,
        pinned_tokens=pin.tokens,
        expires_in_seconds=pin.expires_in_seconds,
        incarnation=incarnation,
    )


def read_pin_id(text: str) -> int | None:
    """Read the name of a pin; None for one that none has, whoever made it up."""
    try:
        number = int(text, 16)
    except ValueError:
        return None
    return number if f"{number:016x}" == text else None


def write_standing(standing: Standing, *, queried_tokens: int, hit_tokens: int) -> gateway_pb2.TenantStats:
    """Tell how a tenant stands."""
    return gateway_pb2.TenantStats(**standing._asdict(), queried_tokens=queried_tokens, hit_tokens=hit_tokens)
