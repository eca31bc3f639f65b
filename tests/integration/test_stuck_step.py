"""A worker whose engine never comes back from a step: its calls go elsewhere, and `serve` starts it again."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc import StatusCode

from prefixgate.proto.transport import CHANNEL_OPTIONS
from prefixgate.worker.witness_options import WitnessOptions
from tests.integration.asking import Stream, prompt
from tests.integration.fleet import RunningFleet
from tests.integration.oracle import Oracle
from tests.served import Served

STUCK = "witness:step_ms=60000"
"""A step that outlasts what it may take, by far."""
CALLS, TOKENS = 8, 5


def test_its_calls_are_answered_by_another_worker(tmp_path: Path) -> None:
    oracle = Oracle(WitnessOptions(), longest=256)
    with RunningFleet(tmp_path, [STUCK, "witness"], "--blocks=256", "--max-step-seconds=3") as fleet:
        with fleet.channel() as channel, ThreadPoolExecutor(CALLS) as threads:
            streams = [Stream(channel, prompt(f"{number} of many prompts", TOKENS)) for number in range(CALLS)]
            assert list(threads.map(Stream.rest, streams)) == [StatusCode.OK] * CALLS
        for stream in streams:
            expected = oracle.output(stream.request, stream.tenant, 0)
            assert expected is not None
            assert stream.token_ids() == expected.token_ids
        assert sum(fleet.metric("retried_calls_total")) > 0
        stuck = fleet.workers[0].program
        assert stuck is not None
        assert stuck.end() == 1
        fleet.until("up", 0, 1)


def test_serve_says_so_and_starts_it_again(tmp_path: Path) -> None:
    with Served(tmp_path, "--model", STUCK, "--blocks", "64", "--max-step-seconds", "3") as served:
        served.wait_until_ready()
        with grpc.insecure_channel(served.address, CHANNEL_OPTIONS) as channel:
            assert Stream(channel, prompt("nobody answers this", 1)).rest() is StatusCode.UNAVAILABLE
        served.read_until("worker ended by itself (exit code 1); starting it again")
        served.read_until("worker: ready again after")
        assert served.stop() == 0
