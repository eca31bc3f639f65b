"""How an engine stands, in figures taken together."""

from typing import NamedTuple


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
    integrity_violations: int
    metrics_errors: int
    """Observations that raised and were dropped."""
