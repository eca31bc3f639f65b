"""Gateway and workers as a real Prometheus sees them: what the documented queries answer under known traffic."""

import asyncio
from collections.abc import Callable, Iterator, Mapping

import grpc
import pytest

from prefixgate.proto import gateway_pb2, generation_pb2
from tests.integration.asking import Stream, prompt
from tests.integration.fleet import RunningFleet
from tests.integration.load import Plan, run
from tests.integration.prometheus import MISSING, Prometheus, is_installed, promtool
from tests.integration.scrape import Page, fetch, scrape
from tests.integration.traffic import Traffic, traffic
from tests.integration.waiting import until

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.timeout(900)]

WINDOW = "5s"
HIT_RATIO = (
    f"sum(rate(prefixgate_worker_hit_tokens_total[{WINDOW}]))"
    f" / sum(rate(prefixgate_worker_queried_tokens_total[{WINDOW}]))"
)
HEAD = "What every call of these tests begins with, four blocks of sixteen bytes."[:64]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with RunningFleet(tmp_path_factory.mktemp("fleet"), ["witness", "witness"], "--blocks=64") as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(fleet: RunningFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    pages = [worker.metrics_url for worker in fleet.workers]
    with Prometheus(tmp_path_factory.mktemp("prometheus"), [fleet.metrics_url], pages) as server:
        yield server


@pytest.fixture(scope="module")
def channel(fleet: RunningFleet) -> Iterator[grpc.Channel]:
    with fleet.channel() as channel:
        yield channel


TOLD: Mapping[str, Callable[[generation_pb2.Usage], float]] = {
    "prefixgate_worker_queried_tokens_total": lambda usage: usage.prompt_tokens,
    "prefixgate_worker_hit_tokens_total": lambda usage: usage.cached_tokens,
    "prefixgate_worker_copied_blocks_total": lambda usage: usage.copied_blocks,
    "prefixgate_worker_generated_tokens_total": lambda usage: usage.completion_tokens,
    "prefixgate_worker_queue_seconds_count": lambda usage: 1,
    # All but the last token, which is always computed.
    "prefixgate_worker_misses_total": lambda usage: usage.cached_tokens < usage.prompt_tokens - 1,
    "prefixgate_gateway_completion_tokens_total": lambda usage: usage.completion_tokens,
    "prefixgate_gateway_time_to_first_token_seconds_count": lambda usage: 1,
}
"""What a counter grows by with each call, from what its client is told."""


def shared(number: int) -> tuple[gateway_pb2.GenerateRequest, str]:
    return prompt(f"{HEAD}{number:016}", 1), "acme"


def unshared(number: int) -> tuple[gateway_pb2.GenerateRequest, str]:
    return prompt(f"{number:016}"[::-1] + HEAD, 1), "acme"


def until_asked(heard: Traffic, calls: int) -> None:
    until(lambda: len(heard.usages) >= calls, f"{calls} calls have ended")
    assert set(heard.codes) == {grpc.StatusCode.OK}


def cached_share(heard: Traffic, since: int) -> float:
    """What clients were told: the share of their prompt tokens that was cached."""
    usages = heard.usages[since:]
    return sum(usage.cached_tokens for usage in usages) / sum(usage.prompt_tokens for usage in usages)


def test_every_target_is_up_and_every_rule_can_be_computed(prometheus: Prometheus) -> None:
    prometheus.until('sum(up{job=~"prefixgate-.*"})', lambda up: up == 3)
    until(lambda: {rule["health"] for rule in prometheus.rules()} == {"ok"}, "every rule has been computed")


def test_the_hit_rate_follows_the_traffic_where_the_quotient_of_counters_does_not(
    prometheus: Prometheus, channel: grpc.Channel
) -> None:
    highest = f"max_over_time(({HIT_RATIO})[10m:1s])"
    with traffic(channel, shared, clients=2) as heard:
        until_asked(heard, 50)
        # Of the last ones, as the traffic goes on while the page and its rates catch up with it.
        prometheus.until(HIT_RATIO, lambda ratio: abs(ratio - cached_share(heard, since=-50)) < 0.05)
        told = cached_share(heard, since=-50)
        assert told > 0.7
        prometheus.until(highest, lambda ratio: ratio > told - 0.05)
    with traffic(channel, unshared, clients=2) as heard:
        until_asked(heard, 50)
        assert cached_share(heard, since=0) < 0.1
        prometheus.until(HIT_RATIO, lambda ratio: ratio < 0.1)
        since_the_start = "sum(prefixgate_worker_hit_tokens_total) / sum(prefixgate_worker_queried_tokens_total)"
        assert prometheus.until(since_the_start) > prometheus.until(HIT_RATIO)
    # Looked back at, it was high; in some of those seconds higher than on average.
    prometheus.until(highest, lambda ratio: ratio > told - 0.1)


def test_counters_add_up_to_what_clients_were_told(prometheus: Prometheus, fleet: RunningFleet) -> None:
    until_idle(fleet)
    before = {name: sum(page.total(name) for page in pages(fleet)) for name in TOLD}
    plans = [
        Plan(prompt(f"{HEAD[: 70 - number % 16]}{number % 5}", 20, n=1 + number % 3), "bolt") for number in range(80)
    ]
    # Four at a time have room, so that none is preempted, which would have some copied twice.
    heard = asyncio.run(run(fleet.address, plans, clients=4))
    usages = [one.completion.usage for one in heard if one.completion is not None]
    assert len(usages) == len(plans)
    for name, told in TOLD.items():
        expected = before[name] + sum(map(told, usages))
        assert expected > before[name], f"{name}: nothing was counted"
        assert prometheus.until(f"sum({name})", lambda total, least=expected: total >= least) == expected, name  # type: ignore[misc]


def test_what_is_evicted_is_counted_and_tells_how_long_content_is_kept(
    prometheus: Prometheus, channel: grpc.Channel
) -> None:
    def one_of_many(number: int) -> tuple[gateway_pb2.GenerateRequest, str]:
        return prompt(f"{number % 24:04}{HEAD}" * 2, 1), "crux"

    # 24 prompts of nine blocks each, in two pools of 64.
    with traffic(channel, one_of_many, clients=2):
        prometheus.until(f"sum(rate(prefixgate_worker_evicted_blocks_total[{WINDOW}]))", lambda rate: rate > 0)
        prometheus.until(
            f'sum(rate(prefixgate_worker_misses_total{{reason="evicted"}}[{WINDOW}]))', lambda rate: rate > 0
        )
        retention = prometheus.until("max(instance:prefixgate_retention_seconds:rate10m)")
    assert 0 < retention < 600


def test_queue_and_first_token_have_quantiles(prometheus: Prometheus, channel: grpc.Channel) -> None:
    with traffic(channel, shared, clients=2):
        for name in (
            "prefixgate_gateway_time_to_first_token_seconds",
            "prefixgate_worker_first_token_seconds",
            "prefixgate_worker_queue_seconds",
        ):
            low, high = (f"histogram_quantile({q}, sum by (le) (rate({name}_bucket[{WINDOW}])))" for q in (0.5, 0.95))
            assert prometheus.until(low) > 0
            prometheus.until(f"{high} - {low}", lambda difference: difference >= 0)


def test_names_of_vllm_are_second_readings(prometheus: Prometheus, fleet: RunningFleet) -> None:
    until_idle(fleet)
    for theirs, ours in {
        "vllm:prefix_cache_queries_total": "sum without (tenant) (prefixgate_worker_queried_tokens_total)",
        "vllm:prefix_cache_hits_total": "sum without (tenant) (prefixgate_worker_hit_tokens_total)",
        "vllm:generation_tokens_total": "sum without (tenant) (prefixgate_worker_generated_tokens_total)",
        "vllm:num_requests_running": "prefixgate_worker_running_sequences",
        "vllm:num_preemptions_total": "prefixgate_worker_preemptions_total",
    }.items():
        prometheus.until(f"count({ours} == ignoring (model_name, engine) {theirs})", lambda equal: equal == 2)


def test_gauges_fall_when_every_client_leaves_and_nothing_comes_after(
    prometheus: Prometheus, fleet: RunningFleet, channel: grpc.Channel
) -> None:
    until_idle(fleet)
    streams = [Stream(channel, prompt(f"{number:016}", 400)).wait_for_tokens() for number in range(8)]
    for stream in streams:
        stream.cancel()
    for gauge in (
        "sum(prefixgate_worker_running_calls)",
        "sum(prefixgate_worker_waiting_calls)",
        'sum(prefixgate_worker_pool_blocks{state="active"})',
        "sum(prefixgate_gateway_live_calls)",
        "max(vllm:kv_cache_usage_perc)",
    ):
        prometheus.until(gauge, lambda value: value == 0)


def test_our_names_pass_the_linter_of_prometheus(fleet: RunningFleet) -> None:
    for url in (fleet.metrics_url, fleet.workers[0].metrics_url):
        # It knows no colon in a name, which those of vLLM have.
        lines = [line for line in fetch(url).splitlines(keepends=True) if "vllm:" not in line]
        checked = promtool("check", "metrics", stdin="".join(lines))
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def pages(fleet: RunningFleet) -> list[Page]:
    return [scrape(url) for url in (fleet.metrics_url, *(worker.metrics_url for worker in fleet.workers))]


def until_idle(fleet: RunningFleet) -> None:
    names = ("prefixgate_gateway_live_calls", "prefixgate_worker_running_calls", "prefixgate_worker_waiting_calls")
    until(lambda: not any(page.total(name) for page in pages(fleet) for name in names), "no call is live")
