"""Processes that die amid streams, that are told to stop, and that find their place taken."""

import contextlib
from pathlib import Path

import grpc
from grpc import StatusCode

from prefixgate.proto import gateway_pb2
from prefixgate.worker.witness_options import WitnessOptions
from tests.integration.asking import Stream, prompt
from tests.integration.oracle import Oracle
from tests.integration.sidecar import KEYS, Pair, Sidecar, Started, credential, gateway_stub
from tests.integration.waiting import HANG_SECONDS, until

STEP_MS = 20
ORACLE = WitnessOptions()


def open_streams(channel: grpc.Channel, max_tokens: int) -> list[Stream]:
    """Begin a stream of two outputs for each tenant, and wait until each has got tokens."""
    streams = [Stream(channel, prompt(f"{tenant} asks", max_tokens, n=2), tenant) for tenant in KEYS]
    return [stream.wait_for_tokens() for stream in streams]


def assert_is_a_beginning(stream: Stream, *, whole: bool = False) -> None:
    """What came is the beginning of the right answer, or all of it, and no part of it came twice."""
    oracle = Oracle(ORACLE, longest=1024)
    for index in range(2):
        expected = oracle.output(stream.request, stream.tenant, index)
        assert expected is not None
        token_ids = stream.token_ids(index)
        assert token_ids == (expected.token_ids if whole else expected.token_ids[: len(token_ids)])


def test_told_to_stop_it_finishes_its_streams_and_takes_no_new_calls(tmp_path: Path) -> None:
    with Sidecar(tmp_path, model=f"witness:step_ms={STEP_MS}") as served:
        served.wait_until_ready()
        with served.channel() as channel:
            streams = open_streams(channel, 80)
            served.process.terminate()
            until(lambda: stats_code(channel) is StatusCode.UNAVAILABLE, "the gateway takes no new calls")
            late = Stream(channel, prompt("late", 1))
            assert late.rest() is StatusCode.UNAVAILABLE
            assert "shutting down" in late.details()
            for stream in streams:
                assert stream.rest() is StatusCode.OK
                assert_is_a_beginning(stream, whole=True)
                assert stream.completion is not None
        assert served.finish() == 0


def test_a_worker_that_dies_ends_every_stream_and_is_started_again(tmp_path: Path) -> None:
    # So much time to drain that it cannot be what ends a stream.
    with Sidecar(tmp_path, "--gateway-drain-seconds=600", model=f"witness:step_ms={STEP_MS}") as served:
        served.wait_until_ready()
        with served.channel() as channel:
            streams = open_streams(channel, 150)
            served.worker.kill()
            assert {stream.rest() for stream in streams} == {StatusCode.UNAVAILABLE}
            for stream in streams:
                assert_is_a_beginning(stream)
                assert stream.completion is None
            assert "starting it again" in served.read_until("worker ended by itself (signal SIGKILL)")
            served.read_until("worker: ready again")
            # The gateway lives on, and follows within its own pause.
            until(lambda: stats_code(channel) is StatusCode.OK, "the gateway has found the worker again")
            again = Stream(channel, prompt("acme asks", 30, n=2))
            assert again.rest() is StatusCode.OK
            assert_is_a_beginning(again, whole=True)
        assert served.gateway.is_running()
        assert served.stop() == 0


def test_a_gateway_that_dies_holds_nothing_at_the_worker_and_another_goes_on(slow: Started) -> None:
    with slow.channel() as channel:
        before = slow.pages()[1].total("prefixgate_worker_calls_ended_total", code="cancelled")
        streams = open_streams(channel, 150)
        assert slow.pages()[1].total("prefixgate_worker_pool_blocks", state="active") > 0
        slow.gateway.kill()
        assert {stream.rest() for stream in streams} == {StatusCode.UNAVAILABLE}
        for stream in streams:
            assert_is_a_beginning(stream)
    slow.start_gateway(slow.address)
    _, worker = slow.until_idle()
    assert worker.total("prefixgate_worker_calls_ended_total", code="cancelled") == before + len(streams)
    # What was computed for the dead gateway's calls is still there for this one's, under the same hash key.
    with slow.channel() as channel:
        again = Stream(channel, prompt("acme asks", 30, n=2))
        assert again.rest() is StatusCode.OK
        assert_is_a_beginning(again, whole=True)
        assert again.completion is not None
        assert again.completion.usage.cached_tokens > 0


def test_a_second_worker_on_a_taken_address_is_refused_and_the_first_goes_on(sidecar: Sidecar, slow: Started) -> None:
    arguments = sidecar.worker.cmdline()
    socket_file = next(word for word in arguments if word.startswith("--worker-listen=")).partition("=")[2]
    places: dict[str, Pair] = {slow.worker_address: slow, socket_file: sidecar}
    with contextlib.ExitStack() as programs:
        seconds = {
            address: programs.enter_context(slow.another_worker(f"second-{number}", address))
            for number, address in enumerate(places)
        }
        for address, second in seconds.items():
            assert second.end() == 1
            assert f"worker.listen: {address}" in second.log
    for pair in places.values():
        with pair.channel() as channel:
            assert Stream(channel, prompt("0 still there", 3)).rest() is StatusCode.OK


def stats_code(channel: grpc.Channel) -> StatusCode:
    """Ask how things stand, as a call that costs nothing, and return the status."""
    pending = gateway_stub(channel).Stats.future(
        gateway_pb2.StatsRequest(), metadata=credential("acme"), timeout=HANG_SECONDS
    )
    return pending.code()
