"""How many sequences a pool holds side by side: with room reserved for each, paged, and with common text held once."""

import random
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from prefixgate.cache.hashing import BLOCK_SIZE

POOL_TOKENS = (66 << 30) // (512 << 10)
"""Of the worked example: 66 GiB, 512 KiB a token."""
RESERVED = 2048
SYSTEM_PROMPT = 256
"""Tokens that all prompts of a trace without ids are taken to begin with."""
DEFAULT_MAX_TOKENS = 256
TOO_LITTLE = "the pool holds the whole trace, which says nothing about the pool"


class Call(NamedTuple):
    """One request of a trace."""

    input_length: int
    output_length: int
    conversation: int | None
    blocks: list[int]

    @property
    def slots(self) -> int:
        """Slots that are written in the end: the token sampled last needs none."""
        return self.input_length + max(self.output_length, 1) - 1


def blocks_for(tokens: int, size: int = BLOCK_SIZE) -> int:
    return -(-tokens // size)


def held(needs: Sequence[int], pool: int) -> float:
    """How many sequences fit side by side, taken in a trace's order from each point of it (the mean)."""
    if sum(needs) <= pool:
        raise ValueError(TOO_LITTLE)
    taken = [0, *accumulate([*needs, *needs])]
    return statistics.mean(bisect_right(taken, taken[start] + pool) - 1 - start for start in range(len(needs)))


def held_shared(calls: Sequence[Call], block: int, pool: int, starts: int) -> float:
    """The same where text that begins alike is held once, from so many points, evenly spread."""
    points = [len(calls) * number // starts for number in range(starts)]
    return statistics.mean(_fill_shared([*calls[start:], *calls[:start]], block, pool) for start in points)


def _fill_shared(calls: Sequence[Call], block: int, pool: int) -> int:
    there: set[int] = set()
    for count, call in enumerate(calls):
        prompt = call.blocks[: call.input_length // block]
        shared = next((i for i, name in enumerate(prompt) if name not in there), len(prompt))
        pool -= blocks_for(call.slots) - shared * block // BLOCK_SIZE
        if pool < 0:
            return count
        there.update(call.blocks[: call.slots // block])
    raise ValueError(TOO_LITTLE)


def side_by_side(calls: Sequence[Call]) -> list[Call]:
    """One turn of each conversation, in a drawn order: two turns of one conversation never run at once."""
    draw = random.Random(3)
    by_conversation: dict[int, list[Call]] = {}
    for number, call in enumerate(calls):
        by_conversation.setdefault(-number if call.conversation is None else call.conversation, []).append(call)
    chosen = [draw.choice(turns) for turns in by_conversation.values()]
    draw.shuffle(chosen)
    return chosen


def capacity(calls: Sequence[Call], block: int, starts: int) -> dict[str, float]:
    """Sequences that the worked example's pool holds, by how room is given to them.

    ``reserved_longest``: room for the trace's longest for each. ``fitting``: paged, those sequences alone that would
    fit in ``RESERVED`` slots, and ``fitting_empty``: the percent of slots that reserving would leave empty there.
    ``paged``: all, at their final length. ``promised``: with room for the default of new tokens. ``shared``: paged,
    and common text once.
    """
    calls = side_by_side(calls)
    fitting = [call for call in calls if call.slots <= RESERVED]
    pool = POOL_TOKENS // BLOCK_SIZE
    paged = [blocks_for(call.slots) for call in calls]
    promised = [blocks_for(call.input_length + max(call.output_length, DEFAULT_MAX_TOKENS) - 1) for call in calls]
    prefix = SYSTEM_PROMPT // BLOCK_SIZE
    assumed = [need - prefix * (call.input_length > SYSTEM_PROMPT) for need, call in zip(paged, calls, strict=True)]
    return {
        "mean_tokens": statistics.mean(call.slots for call in calls),
        "too_long": 100 * sum(call.slots > RESERVED for call in calls) / len(calls),
        "reserved_longest": POOL_TOKENS // max(call.slots for call in calls),
        "fitting": held([blocks_for(call.slots) for call in fitting], pool),
        "fitting_empty": 100 - 100 * statistics.mean(call.slots for call in fitting) / RESERVED,
        "paged": held(paged, pool),
        "promised": held(promised, pool),
        "shared": held_shared(calls, block, pool, starts) if block else held(assumed, pool - prefix),
    }


def worked_example(tokens: int) -> dict[str, int]:
    """The same for sequences that all have one length."""
    pool, need, prefix = POOL_TOKENS // BLOCK_SIZE, blocks_for(tokens), SYSTEM_PROMPT // BLOCK_SIZE
    return {
        "reserved": POOL_TOKENS // RESERVED,
        "paged": pool // need,
        "shared": (pool - prefix) // (need - prefix),
    }
