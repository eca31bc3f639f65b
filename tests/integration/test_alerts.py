"""What goes wrong for real, and the shipped alerts in a real Prometheus: the one that is meant fires, and no other.

Time passes faster in the rules, by `prometheus.faster`; nothing else about them differs from what is shipped.
"""

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from prefixgate.proto import gateway_pb2
from tests.counts import SOAK_VARIABLE
from tests.integration.asking import Stream, prompt
from tests.integration.fleet import RunningFleet
from tests.integration.prometheus import MISSING, Prometheus, is_installed
from tests.integration.sidecar import Started
from tests.integration.traffic import traffic
from tests.integration.waiting import until

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.timeout(900)]

TEXT = "Eight blocks that each call of a kind begins with, so that they are computed once and then found again. "
SETTLED = 4
"""Evaluations of the rules after which whatever has a cause is pending at least."""

soak = pytest.mark.skipif(os.environ.get(SOAK_VARIABLE) != "1", reason="takes half a minute: make soak")


@contextlib.contextmanager
def watched(folder: Path, *worker_flags: str) -> Iterator[tuple[Started, Prometheus]]:
    """A worker, a gateway and a Prometheus that has seen both."""
    with Started(folder, *worker_flags) as pair, Prometheus(folder, [pair.gateway_page], [pair.worker_page]) as server:
        server.until('sum(up{job=~"prefixgate-.*"})', lambda up: up == 2)
        yield pair, server


def until_only(server: Prometheus, name: str) -> None:
    """Wait until an alert fires, give others the time to, and find that only this one does and no other is to come."""
    until(lambda: name in server.firing(), f"{name} fires", 240)
    server.wait_for_evaluations(SETTLED)
    # Asked until it is so: a machine that stood still for seconds is a cause of its own, which passes.
    until(
        lambda: {(alert.labels["alertname"], alert.fires) for alert in server.alerts()} == {(name, True)},
        f"{name} alone",
    )


def test_a_worker_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    def ask(number: int) -> tuple[gateway_pb2.GenerateRequest, str]:
        return prompt(f"{TEXT}{number}", 2), "acme"

    with (
        RunningFleet(tmp_path, ["witness", "witness"], "--blocks=256") as fleet,
        Prometheus(tmp_path, [fleet.metrics_url], [worker.metrics_url for worker in fleet.workers]) as server,
        fleet.channel() as channel,
        traffic(channel, ask, clients=2),
    ):
        server.until('sum(up{job=~"prefixgate-.*"})', lambda up: up == 3)
        server.wait_for_evaluations(SETTLED)
        until(lambda: not server.alerts(), "no alert has a cause")
        fleet.workers[0].kill()
        until_only(server, "PrefixgateWorkerGone")
        missed = {fleet.workers[0].address, "prefixgate-worker"}
        until(
            lambda: {alert.labels.get("worker") or alert.labels["job"] for alert in server.alerts()} == missed, "both"
        )
        # Its gauges are gone with it, and the other's are not.
        server.until('count(prefixgate_worker_pool_blocks{state="free"})', lambda workers: workers == 1)
        fleet.restart(0, "witness")
        until(lambda: not server.alerts(), "the alert ends when the worker is back")
        # The same target, which was there, was gone and is there.
        assert server.until('max(changes(up{job="prefixgate-worker"}[10m]))') >= 2


def test_a_pool_that_is_filled(tmp_path: Path) -> None:
    rng = random.Random(5)

    def ask(number: int) -> tuple[gateway_pb2.GenerateRequest, str]:
        return prompt(f"{rng.randrange(14):02}{TEXT}", 2), "acme"

    # Fourteen prompts of seven blocks, in 64.
    with (
        watched(tmp_path, "--model=witness") as (pair, server),
        pair.channel() as channel,
        traffic(channel, ask, clients=2),
    ):
        until_only(server, "PrefixgateThrashing")


def test_a_tenant_that_floods(tmp_path: Path) -> None:
    flags = ("--model=witness:step_ms=50", "--max-running=4", "--blocks=4096")
    with watched(tmp_path, *flags) as (pair, server), pair.channel() as channel, contextlib.ExitStack() as calls:

        def grow() -> bool:
            """Add to the flood, each time that the rules have been evaluated, until the alert fires."""
            for number in range(2):
                stream = Stream(channel, prompt(f"{number} flood", 4000), "crux", timeout=600)
                calls.callback(stream.cancel)
            server.wait_for_evaluations(1)
            return "PrefixgateQueueGrowing" in server.firing()

        until(grow, "the alert fires", 240)
        until_only(server, "PrefixgateQueueGrowing")
        # Others have their turn all the same.
        assert Stream(channel, prompt("a call of another", 1), "acme").rest() is grpc.StatusCode.OK


@soak
def test_calls_that_push_each_other_out(tmp_path: Path) -> None:
    def ask(number: int) -> tuple[gateway_pb2.GenerateRequest, str]:
        return prompt(f"{number:05}"[::-1] + " is a prompt of its own", 200), "acme"

    # Four calls of up to 15 blocks each, in 32.
    flags = ("--model=witness:step_ms=1", "--blocks=32")
    with watched(tmp_path, *flags) as (pair, server), pair.channel() as channel, traffic(channel, ask, clients=4):
        until_only(server, "PrefixgatePreemptionStorm")
        # What a preempted call finds of its own is no hit of anybody's.
        assert server.until('rate(prefixgate_worker_resumed_tokens_total{source="cached"}[5s])') > 0
        server.until("job:prefixgate_hit_ratio:rate15m", lambda ratio: ratio < 0.1)


@soak
def test_prompts_that_no_longer_begin_alike(tmp_path: Path) -> None:
    def alike(number: int) -> tuple[gateway_pb2.GenerateRequest, str]:
        return prompt(f"{TEXT}{number}", 1), "acme"

    def apart(number: int) -> tuple[gateway_pb2.GenerateRequest, str]:
        return prompt(f"{number:05}"[::-1] + TEXT, 1), "acme"

    flags = ("--model=witness:step_ms=20", "--blocks=16384")
    with watched(tmp_path, *flags) as (pair, server), pair.channel() as channel:
        # Enough of the one for the other not to be the usual before the alert has seen it for long.
        with traffic(channel, alike, clients=8):
            server.until("prefixgate_worker_queue_seconds_count", lambda calls: calls > 1000)
        with traffic(channel, apart, clients=1):
            until_only(server, "PrefixgateHitRateFell")


@soak
def test_prompts_that_take_long_to_compute(tmp_path: Path) -> None:
    def ask(number: int) -> tuple[gateway_pb2.GenerateRequest, str]:
        return prompt(f"{number:05}"[::-1] + TEXT, 1), "acme"

    # About a hundred tokens of 40 ms each, for each of two calls.
    flags = ("--model=witness:prefill_us_per_token=40000", "--blocks=1024")
    with watched(tmp_path, *flags) as (pair, server), pair.channel() as channel, traffic(channel, ask, clients=2):
        until_only(server, "PrefixgateFirstTokenLate")
