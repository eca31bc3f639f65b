"""Counting: once, when it becomes true, in closed sets of labels, and without harm to any call."""

import asyncio
import itertools
from dataclasses import fields
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prefixgate.config.limit_settings import LimitSettings
from prefixgate.gateway.metrics import (
    COMPLETION_TOKENS,
    FIRST_TOKEN,
    METRICS,
    METRICS_ERRORS,
    PROMPT_TOKENS,
    GatewayMetrics,
    Metric,
)
from prefixgate.proto import gateway_pb2
from prefixgate.proto.exposition import Histogram, Samples, write_page
from prefixgate.proto.metrics_page import MAX_SERIES, MAX_TENANT_LABELS
from tests.gateway.fake_worker import LENGTH, STOP
from tests.gateway.rig import Client, Rig, prompt, rig, run, tenants

METHODS = [method.name for method in gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods]
GAUGES = {metric: (dict if metric.labels else float) for metric in METRICS if metric.kind == "gauge"}


def samples(metrics: GatewayMetrics, metric: Metric) -> Samples:
    return next(family.samples for family in metrics.families() if family.name == metric.name)


async def series(client: Client) -> dict[str, float]:
    lines = [line for line in (await client.metrics()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def generate(r: Rig, *, n: int = 1, stop: str = "", **usage: Any) -> gateway_pb2.CompleteResponse:
    pending = r.stub.Complete(prompt("hi", n=n, stop=[stop] if stop else []))
    call = await r.next_call()
    for _ in range(3):
        await call.send(*((index, [64]) for index in range(n)))
    await call.send(*((index, [0], STOP if index else LENGTH) for index in range(n)))
    await call.end(**usage)
    return await pending


def test_the_page_holds_the_table_and_nothing_else() -> None:
    async def test() -> None:
        async with rig() as r:
            await generate(r)
            families = {family.name: family for family in text_string_to_metric_families(await r.metrics())}
            for metric in METRICS:
                family = families.pop(metric.name.removesuffix("_total"))
                assert (family.type, family.documentation) == (metric.kind, metric.help)
                labels = {name for sample in family.samples for name in sample.labels} - {"le"}
                assert labels <= set(metric.labels)
            assert families == {}

    run(test())


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_say_what_they_are_and_in_which_unit(metric: Any) -> None:
    assert metric.name.startswith("prefixgate_gateway_")
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.unit
    if metric.kind == "histogram":
        assert metric.name.endswith(f"_{metric.unit}")


def test_what_a_call_cost_is_counted_once() -> None:
    async def test() -> None:
        async with rig() as r:
            usage: dict[str, Any] = {
                "prompt_tokens": 20,
                "cached_tokens": 19,
                "block_hit_tokens": 16,
                "partial_copy_tokens": 3,
            }
            await generate(r, n=2, completion_tokens=8, **usage)
            now = await series(r)
            tenant = 'tenant="local"'
            assert now[f"prefixgate_gateway_prompt_tokens_total{{{tenant}}}"] == 20
            cached = "prefixgate_gateway_cached_tokens_total"
            sources = {
                source: now[f'{cached}{{source="{source}",{tenant}}}'] for source in ("block_hit", "partial_copy")
            }
            assert sources == {"block_hit": 16, "partial_copy": 3}
            assert now[f"prefixgate_gateway_completion_tokens_total{{{tenant}}}"] == 8
            finished = "prefixgate_gateway_outputs_finished_total"
            assert now[f'{finished}{{reason="length",{tenant}}}'] == 1
            assert now[f'{finished}{{reason="stop",{tenant}}}'] == 1
            assert now[f"prefixgate_gateway_time_to_first_token_seconds_count{{{tenant}}}"] == 1
            assert now["prefixgate_gateway_tokenize_seconds_count"] == 1
            assert now["prefixgate_gateway_metrics_errors_total"] == 0

    run(test())


def test_gaps_are_between_tokens_of_one_output() -> None:
    async def test() -> None:
        async with rig() as r:
            pending = r.stub.Generate(prompt("hi", n=2))
            call = await r.next_call()
            for step in range(3):
                await call.send((0, [64]), (1, [64]))
                await pending.read()
                gaps = (await series(r)).get('prefixgate_gateway_inter_token_seconds_count{tenant="local"}', 0)
                assert gaps == 2 * step
            pending.cancel()

    run(test())


def test_a_stop_string_is_a_reason_of_its_own() -> None:
    async def test() -> None:
        async with rig() as r:
            await generate(r, stop="aa")
            name = 'prefixgate_gateway_outputs_finished_total{reason="stop_string",tenant="local"}'
            assert await r.metric(name) == 1

    run(test())


def test_a_call_that_ended_before_its_first_token_has_no_time_to_it() -> None:
    async def test() -> None:
        async with rig() as r:
            pending = r.stub.Complete(prompt("hi"))
            call = await r.next_call()
            pending.cancel()
            await call.cancels.get()
            page = await series(r)
            assert [page[name] for name in page if "first_token_seconds_count" in name] == [0]

    run(test())


def test_names_that_clients_choose_make_no_series() -> None:
    async def test() -> None:
        async with rig(tenant_settings=tenants(acme="key", zenith="other-key")) as r:
            key: Any = (("authorization", "Bearer key"),)
            before = None
            for index in range(200):
                metadata = key if index % 2 else (("authorization", f"Bearer {index}"), (f"x-{index}", "y"))
                request = prompt("hi", model=f"model-{index}", request_id=f"id-{index}")
                with pytest.raises(grpc.aio.AioRpcError):
                    await r.stub.Complete(request, metadata=metadata)
                if index == 1:
                    before = set(await series(r))
            assert set(await series(r)) == before

    run(test())


def test_a_tenant_that_is_not_configured_counts_as_other() -> None:
    metrics = GatewayMetrics(["acme"], GAUGES)
    for tenant in ("acme", "mallory", "mallory-2"):
        metrics.count(PROMPT_TOKENS, tenant, amount=5)
    assert samples(metrics, PROMPT_TOKENS) == {("acme",): 5, ("other",): 10}


def test_the_page_has_a_bound_however_many_tenants_there_are() -> None:
    tenants = [f"tenant-{number}" for number in range(3 * MAX_TENANT_LABELS)]
    metrics = GatewayMetrics(tenants, GAUGES)
    # More values than each label has. Fewer than all of them go together.
    values = {
        "method": METHODS,
        "code": [code.name for code in grpc.StatusCode],
        "tenant": tenants,
        "limit": [entry.name for entry in fields(LimitSettings)],
    }
    for metric in METRICS:
        for labels in itertools.product(*(values.get(label, range(6)) for label in metric.labels)):
            if metric.kind == "counter":
                metrics.count(metric, *map(str, labels))
            elif metric.kind == "histogram":
                metrics.observe(metric, *map(str, labels), seconds=1)
    assert samples(metrics, COMPLETION_TOKENS)["other",] == 2 * MAX_TENANT_LABELS
    assert sum(not line.startswith(b"#") for line in write_page(metrics.families()).splitlines()) < MAX_SERIES


def test_tenants_that_come_later_are_counted_apart_while_there_is_room() -> None:
    metrics = GatewayMetrics(["acme"], GAUGES)
    metrics.count(PROMPT_TOKENS, "fresh", amount=1)
    metrics.know(["fresh", *(f"tenant-{number}" for number in range(MAX_TENANT_LABELS))])
    for tenant in ("acme", "fresh", f"tenant-{MAX_TENANT_LABELS - 1}"):
        metrics.count(PROMPT_TOKENS, tenant, amount=2)
    metrics.know(["beyond"])
    metrics.count(PROMPT_TOKENS, "beyond", amount=4)
    counted = {labels: count for labels, count in samples(metrics, PROMPT_TOKENS).items() if count}
    assert counted == {("acme",): 2, ("fresh",): 2, ("other",): 1 + 2 + 4}


def test_a_tenants_series_are_there_before_its_first_call() -> None:
    metrics = GatewayMetrics(["acme"], GAUGES)
    metrics.know(["late"])
    assert samples(metrics, PROMPT_TOKENS) == {("acme",): 0, ("late",): 0}
    histogram = samples(metrics, FIRST_TOKEN)["late",]
    assert isinstance(histogram, Histogram)
    assert histogram.cumulative()[0][-1] == ("+Inf", 0)


def test_a_counter_never_falls() -> None:
    metrics = GatewayMetrics(["acme"], GAUGES)
    metrics.count(PROMPT_TOKENS, "acme", amount=5)
    metrics.count(PROMPT_TOKENS, "acme", amount=-1)
    assert samples(metrics, PROMPT_TOKENS) == {("acme",): 5}
    assert samples(metrics, METRICS_ERRORS) == {(): 1}


def test_labels_that_are_not_the_metrics_own_are_a_fault() -> None:
    metrics = GatewayMetrics(["acme"], GAUGES)
    metrics.count(PROMPT_TOKENS)
    metrics.observe(FIRST_TOKEN, "acme", "extra", seconds=1)
    assert samples(metrics, PROMPT_TOKENS) == {("acme",): 0}
    assert list(samples(metrics, FIRST_TOKEN)) == [("acme",)]
    assert samples(metrics, METRICS_ERRORS) == {(): 2}


def test_faults_in_counting_are_counted_and_hurt_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("Counters can only be incremented by non-negative amounts.")

    async def test() -> None:
        async with rig() as r:
            monkeypatch.setattr("prefixgate.proto.exposition.Histogram.observe", broken)
            answer = await generate(r)
            assert answer.outputs[0].text == "aaa!"
            monkeypatch.undo()
            assert await r.metric("prefixgate_gateway_metrics_errors_total") >= 5
            assert (await generate(r)).outputs[0].text == "aaa!"

    run(test())


def test_every_call_that_starts_ends_under_one_code() -> None:
    async def test() -> None:
        async with rig() as r:
            await generate(r)
            with pytest.raises(grpc.aio.AioRpcError):
                await r.stub.Complete(prompt(""))
            cancelled = [r.stub.Complete(prompt("hi")) for _ in range(5)]
            calls = [await r.next_call() for _ in cancelled]
            for call in cancelled:
                call.cancel()
            await asyncio.gather(*(call.cancels.get() for call in calls))
            while await r.metric("prefixgate_gateway_live_calls"):
                pass
            now = await series(r)
            name, labels = "prefixgate_gateway_calls_ended_total", 'method="Complete",tenant="local"'
            ended = {code: now[f'{name}{{code="{code}",{labels}}}'] for code in ("OK", "INVALID_ARGUMENT", "CANCELLED")}
            assert ended == {"OK": 1, "INVALID_ARGUMENT": 1, "CANCELLED": 5}
            assert now[f"prefixgate_gateway_calls_started_total{{{labels}}}"] == 7

    run(test())
