"""Routing: the constants of the formula by which a gateway chooses among several workers."""

from dataclasses import dataclass

from prefixgate.config.kinds import Integer, Number
from prefixgate.config.setting import setting


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """How a gateway with several workers weighs what is cached against what there is to do; `docs/routing.md` has the
    formula. The defaults did best on public traces, and need no change for most.
    """

    miss_weight: float = setting(
        4.0,
        Number(0, 100),
        "What a second of computing a prompt counts beside a second of waiting. More keeps calls where their prefix "
        "is cached, less spreads them.",
    )
    eviction_weight: float = setting(
        2.0,
        Number(0, 100),
        "What it counts in addition on a worker whose pool turns over as fast as the average pool; in proportion on "
        "others. More evens out the use of the pools.",
    )
    call_seconds: float = setting(
        0.02, Number(0, 60), "What each call in a worker's hands adds to the wait there.", unit="seconds"
    )
    prefill_tokens_per_second: int = setting(
        8000,
        Integer(1, 1 << 30),
        "How fast a worker computes prompts, until its calls have shown it.",
        unit="tokens/s",
    )
