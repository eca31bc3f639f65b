"""Memory: what a process holds does not depend on how many calls it has had."""

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration import load
from tests.integration.load import Plan
from tests.integration.sidecar import KEYS, Sidecar

ALLOWED_BYTES = 5 << 20
"""Growth that is no leak: allocators find their balance, and the worker's log of cache events fills up to its bound. A
call that is forgotten somewhere holds 500 bytes and more, which is twice this after as many calls as the soak makes."""

PROMPTS = 60
"""The library that tokenizes remembers some ten thousand words, and the witness's tokenizer takes a whole prompt for a
word. Where prompts come again, that memory is full from the start."""


PARTS = 10
"""Looks at the memory, evenly spread over the streams. A line through them is less moved by chance than two of them."""

ENDLESS = 600
"""Tokens, far more than come before a client leaves."""


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


def test_cancelled_streams_leave_no_memory_and_no_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scaled: Callable[[int], int]
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    streams = scaled(20_000)
    with Sidecar(tmp_path) as served:
        served.wait_until_ready()
        rng = random.Random(2)
        cancel_streams(served, rng, scaled(5_000))
        before = served.pages()[1]
        sizes: dict[str, list[int]] = {"gateway": [], "worker": []}
        for _ in range(PARTS):
            cancel_streams(served, rng, streams // PARTS)
            for name, size in resident_bytes(served).items():
                sizes[name].append(size)
        grown = {name: slope(values) * (PARTS - 1) for name, values in sizes.items()}
        assert max(grown.values()) <= ALLOWED_BYTES, (grown, sizes)
        gateway, worker = served.until_idle()
        cancelled = "prefixgate_worker_calls_ended_total"
        assert worker.total(cancelled, code="cancelled") > before.total(cancelled, code="cancelled")
        assert gateway.total("prefixgate_gateway_waiting_calls") == 0
        assert worker.total("prefixgate_worker_integrity_violations_total") == 0
        assert worker.total("prefixgate_worker_pool_blocks", state="active") == 0
        assert served.stop() == 0
        assert served.complaints() == []


def cancel_streams(served: Sidecar, rng: random.Random, count: int) -> None:
    """Begin streams that would go on for long, and have their clients leave, some before anything has come."""
    plans = []
    for index in range(count):
        plan = any_plan(rng, index)
        request = plan.request
        request.n, request.stop[:] = 1, []
        request.sampling.max_tokens, request.sampling.ignore_eos = ENDLESS, True
        plans.append(Plan(request, rng.choice(list(KEYS)), leaves_after=rng.randrange(4)))
    asyncio.run(load.run(served.address, plans))
    served.until_idle()


def slope(values: Sequence[float]) -> float:
    """Fit a line through values at equal distances, and return how much it rises from one to the next."""
    return statistics.linear_regression(range(len(values)), values).slope


def make_calls(served: Sidecar, rng: random.Random, count: int) -> None:
    asyncio.run(load.run(served.address, [any_plan(rng, index) for index in range(count)]))
    served.until_idle()


def resident_bytes(served: Sidecar) -> dict[str, int]:
    return {"gateway": served.gateway.memory_info().rss, "worker": served.worker.memory_info().rss}
