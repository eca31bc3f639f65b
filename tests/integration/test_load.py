"""Many clients at once on a small pool: whatever they do, each hears what it would hear alone, and nothing is left."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from grpc import StatusCode

from prefixgate.worker.witness_options import WitnessOptions
from tests.integration import load
from tests.integration.asking import Stream, prompt
from tests.integration.load import Heard, Plan
from tests.integration.oracle import Expected, Oracle
from tests.integration.scrape import Page
from tests.integration.sidecar import KEYS, Sidecar
from tests.integration.waiting import until

BLOCKS = 64
EOS_EVERY = 40
LOAD_SECONDS = 300.0
"""Guard against hanging; a load takes seconds."""


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    model = f"witness:eos_every={EOS_EVERY}"
    with Sidecar(tmp_path_factory.mktemp("load"), model=model, blocks=BLOCKS) as served:
        served.wait_until_ready()
        yield served
        assert served.stop() == 0
        assert served.complaints() == []


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(WitnessOptions(eos_every=EOS_EVERY), longest=load.LONGEST_PROMPT + load.LONGEST_OUTPUT)


@pytest.mark.parametrize("kind", [load.short, load.mixed, load.hurried])
def test_every_call_ends_as_it_may_and_leaves_nothing(
    kind: Callable[[random.Random, int], Plan], sidecar: Sidecar, oracle: Oracle, scaled: Callable[[int], int]
) -> None:
    rng, before = random.Random(kind.__name__), sidecar.pages()
    heard = asyncio.run(run_watched(sidecar, [kind(rng, index) for index in range(scaled(1000))]))
    after = sidecar.until_idle()
    for one in heard:
        check_answer(one, oracle)
    check_gateway(before[0], after[0], heard)
    check_worker(before[1], after[1])
    check_tokens(before, after, heard)
    check_invariants(sidecar)


def test_the_mixed_load_fills_the_pool_and_shares_it(sidecar: Sidecar, scaled: Callable[[int], int]) -> None:
    rng, before = random.Random(5), sidecar.pages()[1]
    asyncio.run(load.run(sidecar.address, [load.mixed(rng, index) for index in range(scaled(1000))]))
    after = sidecar.until_idle()[1]
    for name in ("evicted_blocks_total", "copied_blocks_total", "hit_tokens_total"):
        assert after.total(f"prefixgate_worker_{name}") > before.total(f"prefixgate_worker_{name}"), name


# What a load must keep to


async def run_watched(sidecar: Sidecar, plans: Sequence[Plan]) -> list[Heard]:
    """Run a load, and scrape both processes all the while."""
    watching = asyncio.create_task(watch(sidecar))
    async with asyncio.timeout(LOAD_SECONDS):
        heard = await load.run(sidecar.address, plans)
    if watching.done():
        watching.result()
    watching.cancel()
    return heard


async def watch(sidecar: Sidecar) -> None:
    """Hold each page against the one before."""
    before: tuple[Page, ...] = ()
    while True:
        pages = await asyncio.to_thread(sidecar.pages)
        states = pages[1].by("state", "prefixgate_worker_pool_blocks")
        assert (sum(states.values()), min(states.values()) >= 0) == (BLOCKS, True)
        hits, queries = (pages[1].by("tenant", f"prefixgate_worker_{name}_tokens_total") for name in ("hit", "queried"))
        assert all(hits[tenant] <= queries[tenant] for tenant in queries)
        for earlier, now in zip(before, pages, strict=False):
            later = now.counters()
            assert [series for series, value in earlier.counters().items() if later[series] < value] == []
        before = pages


def check_answer(heard: Heard, oracle: Oracle) -> None:
    plan = heard.plan
    assert heard.code in plan.allowed, plan
    for index, output in heard.outputs.items():
        expected = oracle.output(plan.request, plan.tenant, index)
        if expected is None:
            continue
        if output.finish_reason:
            got = Expected(list(output.token_ids), output.text, output.finish_reason, output.matched_stop)
            assert got == expected, plan
        else:
            assert output.token_ids == expected.token_ids[: len(output.token_ids)], plan
            assert expected.text.startswith(output.text), plan
    if heard.code is StatusCode.OK:
        check_completion(heard)


def check_completion(heard: Heard) -> None:
    request, completion = heard.plan.request, heard.completion
    assert completion is not None
    assert set(heard.outputs) == set(range(max(1, request.n)))
    assert all(output.finish_reason for output in heard.outputs.values())
    usage = completion.usage
    assert completion.request_id == request.request_id
    assert usage.prompt_tokens == len(request.prompt)
    assert usage.cached_tokens == usage.block_hit_tokens + usage.partial_copy_tokens + usage.claimed_tail_tokens
    assert usage.cached_tokens < usage.prompt_tokens
    got = sum(len(output.token_ids) for output in heard.outputs.values())
    # After a stop string a few more tokens were on their way.
    stopped = any(output.matched_stop for output in heard.outputs.values())
    assert usage.completion_tokens >= got if stopped else usage.completion_tokens == got


def check_gateway(before: Page, after: Page, heard: Sequence[Heard]) -> None:
    """Every call that began ended, under a code that the client knows of."""
    started = gained(before, after, "prefixgate_gateway_calls_started_total")
    ended = {
        code: count - before.by("code", "prefixgate_gateway_calls_ended_total").get(code, 0)
        for code, count in after.by("code", "prefixgate_gateway_calls_ended_total").items()
    }
    assert started == sum(ended.values())
    refused = count_plans(heard, StatusCode.UNAUTHENTICATED)
    assert gained(before, after, "prefixgate_gateway_calls_refused_total", code="UNAUTHENTICATED") == refused
    assert ended.get("INVALID_ARGUMENT", 0) == count_plans(heard, StatusCode.INVALID_ARGUMENT)
    assert set(ended) <= {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"}
    # A client that leaves may be gone before its call began, or just when it had ended well.
    sure = sum(one.plan.allowed == {StatusCode.OK} for one in heard)
    assert sure + ended.get("INVALID_ARGUMENT", 0) <= started <= len(heard) - refused
    assert ended.get("OK", 0) >= sum(one.code is StatusCode.OK for one in heard)
    assert after.total("prefixgate_gateway_metrics_errors_total") == 0


def check_worker(before: Page, after: Page) -> None:
    assert gained(before, after, "prefixgate_worker_calls_received_total") == gained(
        before, after, "prefixgate_worker_calls_ended_total"
    )
    assert after.total("prefixgate_worker_calls_ended_total", code="internal") == 0
    assert after.total("prefixgate_worker_outputs_ended_total", reason="error") == 0
    assert after.total("prefixgate_worker_metrics_errors_total") == 0
    states = after.by("state", "prefixgate_worker_pool_blocks")
    assert (states["active"], states["free"] + states["cached"]) == (0, BLOCKS)


def check_tokens(before: tuple[Page, Page], after: tuple[Page, Page], heard: Sequence[Heard]) -> None:
    """No token is handed out that was not generated, or heard that was not handed out, for any tenant."""
    for tenant in KEYS:
        got = sum(
            len(output.token_ids) for one in heard if one.plan.tenant == tenant for output in one.outputs.values()
        )
        sent = gained(before[0], after[0], "prefixgate_gateway_completion_tokens_total", tenant=tenant)
        made = gained(before[1], after[1], "prefixgate_worker_generated_tokens_total", tenant=tenant)
        assert got <= sent <= made
    assert after[1].total("prefixgate_worker_generated_tokens_total", tenant="other") == 0


def check_invariants(sidecar: Sidecar) -> None:
    """Have the worker work and come to rest once more, whereupon it checks its cache's invariants."""

    def checks(worker: Page) -> float:
        return worker.total("prefixgate_worker_integrity_checks_total")

    before = checks(sidecar.pages()[1])
    with sidecar.channel() as channel:
        assert Stream(channel, prompt("rest", 1)).rest() is StatusCode.OK
    until(lambda: checks(sidecar.pages()[1]) > before, "the worker checked its invariants")
    assert sidecar.pages()[1].total("prefixgate_worker_integrity_violations_total") == 0


def gained(before: Page, after: Page, name: str, **labels: str) -> float:
    return after.total(name, **labels) - before.total(name, **labels)


def count_plans(heard: Sequence[Heard], code: StatusCode) -> int:
    return sum(one.plan.refused is code for one in heard)
