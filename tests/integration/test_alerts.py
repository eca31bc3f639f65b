"""What goes wrong for real, and the shipped alerts in a real Prometheus: the one that is meant fires, and no other.

Time passes faster in the rules, by `prometheus.faster`; nothing else about them differs from what is shipped.
"""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from prefixgate.proto import gateway_pb2
from tests.integration.asking import Stream, prompt
from tests.integration.fleet import RunningFleet
from tests.integration.prometheus import MISSING, Prometheus, is_installed
from tests.integration.sidecar import Started
from tests.integration.traffic import traffic
from tests.integration.waiting import until

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.timeout(900)]

TEXT = "Eight blocks that each call of a kind begins with, so that they are computed once and then found again. "
SETTLED = 20
"""Evaluations of the rules, for any other alert to follow that the same cause would fire."""


@contextlib.contextmanager
def watched(folder: Path, *worker_flags: str) -> Iterator[tuple[Started, Prometheus]]:
    """A worker, a gateway and a Prometheus that has seen both."""
    with Started(folder, *worker_flags) as pair, Prometheus(folder, [pair.gateway_page], [pair.worker_page]) as server:
        server.until('sum(up{job=~"prefixgate-.*"})', lambda up: up == 2)
        yield pair, server


def until_only(server: Prometheus, alert: str) -> None:
    """Wait until an alert fires, give others the time to, and find that only this one does."""
    until(lambda: alert in server.firing(), f"{alert} fires", 240)
    server.wait_for_evaluations(SETTLED)
    # Asked until it is so: a machine that stood still for seconds is a cause of its own, which passes.
    until(lambda: server.firing() == {alert}, f"{alert} alone fires")


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
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
        assert server.firing() == set()
        fleet.workers[0].kill()
        until_only(server, "PrefixgateWorkerGone")
        told = {labels.get("worker") or labels["job"] for labels in server.labels_firing()}
        assert told == {fleet.workers[0].address, "prefixgate-worker"}
        # Its gauges are gone with it, and the other's are not.
        assert len(server.query('prefixgate_worker_pool_blocks{state="free"}')) == 1


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
