"""What a connection may do: be silent, be read slowly, be cut, or die without a word."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixgate.proto.transport import CHANNEL_OPTIONS
from prefixgate.worker.witness_options import WitnessOptions
from tests.counts import SOAK_VARIABLE
from tests.integration.asking import Stream, prompt
from tests.integration.oracle import Oracle
from tests.integration.scrape import Page
from tests.integration.sidecar import SLOW_SEQUENCES, Pair, Sidecar, Started
from tests.integration.waiting import HANG_SECONDS, until
from tests.integration.wire import Wire

PINGS_EVERY_MS = 1000
"""gRPC sends no more of them. A server that minds answers the third with the end of the connection."""


COUNTS = ("calls_received_total", "first_token_seconds_count")


def test_a_long_silence_full_of_pings_breaks_no_stream_on_either_hop(slow: Started) -> None:
    pinging = ("grpc.keepalive_time_ms", PINGS_EVERY_MS)
    with slow.channel(pinging) as channel, watching(slow.worker_address, pinging) as ended:
        calls, first_tokens = (slow.pages()[1].total(f"prefixgate_worker_{name}") for name in COUNTS)
        # 650 tokens at 10 ms: silence for six and a half seconds, in two steps that health must not wait for.
        stream = Stream(channel, prompt("#" * 650, 2))
        until(lambda: slow.pages()[1].total(f"prefixgate_worker_{COUNTS[0]}") > calls, "the worker has the call")
        assert check_health(channel) == health_pb2.HealthCheckResponse.SERVING
        with grpc.insecure_channel(slow.worker_address) as direct:
            assert check_health(direct) == health_pb2.HealthCheckResponse.SERVING
        assert slow.pages()[1].total(f"prefixgate_worker_{COUNTS[1]}") == first_tokens
        assert stream.rest() is StatusCode.OK
        assert len(stream.token_ids()) == 2
        assert not ended.is_set()


def test_a_client_that_stops_reading_costs_nobody_anything_and_hears_all(sidecar: Sidecar) -> None:
    # A window of one byte: what is not read here stays at the gateway at once, and not in buffers on the way.
    narrow = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))
    oracle = Oracle(WitnessOptions(), longest=1024)
    with contextlib.ExitStack() as connections:
        streams = [
            Stream(connections.enter_context(sidecar.channel(*narrow)), prompt(f"{number} slow", 300))
            for number in range(3)
        ]
        streams[0].wait_for_tokens()
        with sidecar.channel() as channel:
            assert Stream(channel, prompt("0 quick", 5)).rest() is StatusCode.OK
        until(lambda: worker_is_idle(sidecar.pages()[1]), "the worker is done with all of them")
        assert sidecar.pages()[0].total("prefixgate_gateway_live_calls") == len(streams)
        for stream in streams:
            assert stream.rest() is StatusCode.OK
            expected = oracle.output(stream.request, "acme", 0)
            assert expected is not None
            assert (stream.token_ids(), stream.text()) == (expected.token_ids, expected.text)
            assert len(stream.messages) < 100, "what was not read came in few messages"
    sidecar.until_idle()


def test_a_client_whose_connection_is_cut_frees_its_blocks(slow: Started) -> None:
    before = cancelled_calls(slow)
    with Wire(slow.address) as wire, grpc.insecure_channel(wire.address) as channel:
        streams = [Stream(channel, prompt(f"{number} cut", 400)).wait_for_tokens() for number in range(2)]
        assert slow.pages()[1].total("prefixgate_worker_pool_blocks", state="active") > 0
        wire.cut()
        slow.until_idle()
        assert cancelled_calls(slow) == before + len(streams)
        assert {stream.rest() for stream in streams} == {StatusCode.UNAVAILABLE}


@pytest.mark.skipif(os.environ.get(SOAK_VARIABLE) != "1", reason="waits for 20 s of pings; make soak does")
def test_a_client_that_dies_without_a_word_frees_its_blocks(tmp_path: Path) -> None:
    # So slow that the call would go on for two minutes.
    with (
        Started(tmp_path, "--model=witness:step_ms=200") as slow,
        Wire(slow.address) as wire,
        grpc.insecure_channel(wire.address) as channel,
    ):
        stream = Stream(channel, prompt("0 dead", 600), timeout=2 * HANG_SECONDS).wait_for_tokens()
        wire.die()
        slow.until_idle()
        assert cancelled_calls(slow) == 1
        assert stream.completion is None


def test_calls_that_find_no_place_wait_and_those_that_leave_make_room(slow: Started) -> None:
    with slow.channel() as channel:
        first = Stream(channel, prompt("0 first", 130, n=SLOW_SEQUENCES)).wait_for_tokens()
        second, third = Stream(channel, prompt("0 second", 30)), Stream(channel, prompt("0 third", 30))
        until(lambda: waiting_calls(slow) == 2, "two calls wait")
        second.cancel()
        until(lambda: waiting_calls(slow) == 1, "the one that left waits no more")
        assert second.rest() is StatusCode.CANCELLED
        assert running_calls(slow) == 1
        first.cancel()
        assert third.rest() is StatusCode.OK
        assert len(third.token_ids()) == 30
    slow.until_idle()


def test_calls_that_outgrow_the_pool_together_all_get_to_their_end(sidecar: Sidecar) -> None:
    # Each comes to 33 blocks of 64.
    before, oracle = sidecar.pages()[1], Oracle(WitnessOptions(), longest=1024)
    with sidecar.channel() as channel:
        # Under a salt, so that nothing of other calls can be hit.
        streams = [Stream(channel, prompt(f"{number} outgrows", 515, salt="outgrows")) for number in range(4)]
        for stream in streams:
            assert stream.rest() is StatusCode.OK
            expected = oracle.output(stream.request, "acme", 0)
            assert expected is not None
            assert stream.token_ids() == expected.token_ids
    worker = sidecar.until_idle()[1]
    for name in ("preemptions_total", "resumed_tokens_total"):
        assert worker.total(f"prefixgate_worker_{name}") > before.total(f"prefixgate_worker_{name}")
    # What they found of themselves is no hit.
    for name in ("hit_tokens_total", "metrics_errors_total", "integrity_violations_total"):
        assert worker.total(f"prefixgate_worker_{name}") == before.total(f"prefixgate_worker_{name}")


@contextlib.contextmanager
def watching(address: str, *options: tuple[str, int]) -> Iterator[threading.Event]:
    """Watch a server's health on a connection with such options; the event tells that the watch ended."""
    ended = threading.Event()
    with grpc.insecure_channel(address, list({**dict(CHANNEL_OPTIONS), **dict(options)}.items())) as channel:
        watch = health_stub(channel).Watch(health_pb2.HealthCheckRequest())
        watch.add_done_callback(lambda _: ended.set())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        yield ended
        watch.cancel()


def check_health(channel: grpc.Channel) -> int:
    return int(health_stub(channel).Check(health_pb2.HealthCheckRequest(), timeout=HANG_SECONDS).status)


def health_stub(channel: grpc.Channel) -> Any:
    """Make the stub, whose methods the type hints do not know."""
    return health_pb2_grpc.HealthStub(channel)


def worker_is_idle(worker: Page) -> bool:
    return not worker.total("prefixgate_worker_running_calls") + worker.total("prefixgate_worker_waiting_calls")


def running_calls(pair: Pair) -> float:
    return pair.pages()[1].total("prefixgate_worker_running_calls")


def waiting_calls(pair: Pair) -> float:
    return pair.pages()[1].total("prefixgate_worker_waiting_calls")


def cancelled_calls(pair: Pair) -> float:
    return pair.pages()[1].total("prefixgate_worker_calls_ended_total", code="cancelled")
