"""Memory: what a process holds does not depend on how many calls it has had."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration import load
from tests.integration.load import Plan
from tests.integration.sidecar import Sidecar

ALLOWED_BYTES = 5 << 20
"""Growth that is no leak: allocators find their balance, and the worker's log of cache events fills up to its bound. A
call that is forgotten somewhere holds 500 bytes and more, which is twice this after as many calls as the soak makes."""

PROMPTS = 60
"""The library that tokenizes remembers some ten thousand words, and the witness's tokenizer takes a whole prompt for a
word. Where prompts come again, that memory is full from the start."""


def any_plan(rng: random.Random, index: int) -> Plan:
    """Make up a call, most often a short one: short ones show what each call leaves behind, whatever its size."""
    plan = (load.short if index % 10 else load.mixed)(rng, index)
    number = index % PROMPTS
    plan.request.prompt = f"{number:02} " * (1 + number)
    return plan


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
        assert max(grown.values()) <= ALLOWED_BYTES, grown
        assert served.stop() == 0
        assert served.complaints() == []


def make_calls(served: Sidecar, rng: random.Random, count: int) -> None:
    asyncio.run(load.run(served.address, [any_plan(rng, index) for index in range(count)]))
    served.until_idle()


def resident_bytes(served: Sidecar) -> dict[str, int]:
    return {"gateway": served.gateway.memory_info().rss, "worker": served.worker.memory_info().rss}
