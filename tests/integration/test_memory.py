"""Memory: what a process holds does not depend on how many calls it has had."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration import load
from tests.integration.load import Plan
from tests.integration.sidecar import Sidecar

ALLOWED_BYTES = 6 << 20
ALLOWED_BYTES_PER_CALL = 300
"""Growth that is no leak. Native allocators keep what short-lived calls of different sizes leave in pieces, and find a
balance only after some ten thousand calls; the worker's log of cache events grows up to its bound. The least that a
forgotten call would hold is more: its request, its tokens, and its place in a queue come to some 2,500 bytes."""


def any_plan(rng: random.Random, index: int) -> Plan:
    """Make up a call, most often a short one: short ones show what each call leaves behind, whatever its size."""
    return (load.short if index % 10 else load.mixed)(rng, index)


def test_memory_is_flat_however_many_calls_end_or_are_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaled: Callable[[int], int]
) -> None:
    # With an arena for each thread, which thread happened to do what would move the figure by megabytes.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    calls = scaled(20_000)
    with Sidecar(tmp_path) as served:
        served.wait_until_ready()
        rng = random.Random(1)
        make_calls(served, rng, scaled(5_000))
        before = resident_bytes(served)
        make_calls(served, rng, calls)
        after = resident_bytes(served)
        grown = {name: after[name] - before[name] for name in before}
        assert all(growth <= ALLOWED_BYTES + ALLOWED_BYTES_PER_CALL * calls for growth in grown.values()), grown
        assert served.stop() == 0


def make_calls(served: Sidecar, rng: random.Random, count: int) -> None:
    asyncio.run(load.run(served.address, [any_plan(rng, index) for index in range(count)]))
    served.until_idle()


def resident_bytes(served: Sidecar) -> dict[str, int]:
    return {"gateway": served.gateway.memory_info().rss, "worker": served.worker.memory_info().rss}
