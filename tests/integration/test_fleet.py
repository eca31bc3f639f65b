"""Three workers behind a gateway: one is killed amid streams and comes back in its place, another one drains."""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from grpc import StatusCode

from prefixgate.proto import gateway_pb2
from prefixgate.worker.witness_options import WitnessOptions
from tests.counts import SOAK_VARIABLE
from tests.integration.asking import Stream, prompt
from tests.integration.fleet import RunningFleet
from tests.integration.oracle import Oracle
from tests.integration.sidecar import KEYS
from tests.integration.waiting import until

STREAMS = 50
TOKENS = 40
FAST = "witness:step_ms=2"
SLOW = "witness:step_ms=1000"
"""An answer takes most of a minute, so that whoever has begun one has not ended it."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    models = [SLOW, FAST, FAST]
    with RunningFleet(tmp_path_factory.mktemp("fleet"), models, "--blocks=256", "--max-running=6") as running:
        yield running


class Streams:
    """Many calls at a time, each read by a thread of its own."""

    def __init__(self, fleet: RunningFleet, name: str) -> None:
        tenants = list(KEYS)
        self._channel = fleet.channel()
        self._threads = ThreadPoolExecutor(STREAMS)
        self.streams = [
            Stream(self._channel, prompt(f"{name}: call {number} of many", TOKENS), tenants[number % len(tenants)])
            for number in range(STREAMS)
        ]
        self.ends: list[Future[StatusCode]] = [self._threads.submit(stream.rest) for stream in self.streams]

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.cancel()
        self._threads.shutdown()
        self._channel.close()

    def open(self) -> list[Stream]:
        """Those that have not ended."""
        return [stream for stream, end in zip(self.streams, self.ends, strict=True) if not end.done()]

    def codes(self) -> list[StatusCode]:
        """Wait for all ends."""
        return [end.result() for end in self.ends]


def begun_at_the_slow_one(fleet: RunningFleet, calls: Streams) -> Sequence[Stream]:
    """Tell which calls of the first worker have begun to answer, once only that one has any, and some of them wait."""
    left = calls.open()
    begun = [stream for stream in left if stream.messages]
    return begun if fleet.metric("live_calls") == [len(left), 0, 0] and 0 < len(begun) < len(left) else []


def completion(stream: Stream) -> gateway_pb2.Completion:
    """Read a call to its end, which is to be good."""
    assert stream.rest() is StatusCode.OK
    assert stream.completion is not None
    return stream.completion


def assert_right(stream: Stream, code: StatusCode, oracle: Oracle) -> None:
    """What came is the whole of the right answer, or where the call failed the beginning of it; nothing came twice."""
    expected = oracle.output(stream.request, stream.tenant, 0)
    assert expected is not None
    got = stream.token_ids()
    if code is StatusCode.OK:
        assert (got, stream.text()) == (expected.token_ids, expected.text)
        assert stream.completion is not None
        assert stream.completion.usage.completion_tokens == TOKENS
    else:
        assert code is StatusCode.UNAVAILABLE
        assert 0 < len(got) < TOKENS
        assert got == expected.token_ids[: len(got)]
        assert stream.completion is None


def test_of_a_killed_worker_those_that_have_begun_fail_and_the_others_are_answered_elsewhere(
    fleet: RunningFleet,
) -> None:
    oracle = Oracle(WitnessOptions(), longest=256)
    with Streams(fleet, "kill") as calls:
        begun = until(lambda: begun_at_the_slow_one(fleet, calls), "some calls of the slow worker have begun")
        fleet.workers[0].kill()
        codes = calls.codes()
        for stream, code in zip(calls.streams, codes, strict=True):
            assert_right(stream, code, oracle)
        failed = [stream for stream, code in zip(calls.streams, codes, strict=True) if code is not StatusCode.OK]
        assert set(begun) <= set(failed)
    assert sum(fleet.metric("retried_calls_total")) > 0
    assert fleet.metric("live_calls") == [0, 0, 0]
    assert fleet.metric("up") == [0, 1, 1]


def test_it_comes_back_in_its_place_with_nothing_and_hits_resume(fleet: RunningFleet) -> None:
    assert fleet.metric("known_blocks")[0] == 0
    fleet.restart(0, FAST)
    oracle = Oracle(WitnessOptions(), longest=256)
    before = fleet.metric("calls_total")
    for _ in range(2):
        with Streams(fleet, "again") as calls:
            for stream, code in zip(calls.streams, calls.codes(), strict=True):
                assert code is StatusCode.OK
                assert_right(stream, code, oracle)
    assert all(after > earlier for after, earlier in zip(fleet.metric("calls_total"), before, strict=True))
    until(lambda: all(fleet.metric("known_blocks")), "every worker has told of blocks that it holds")
    # One after the other, so that nothing but what is cached speaks for a worker.
    with fleet.channel() as channel:
        for number in range(12):
            request = prompt(f"{number} has a prompt of some length. " * 4, 1)
            first, second = (completion(Stream(channel, request)) for _ in range(2))
            assert second.incarnation == first.incarnation
            assert second.usage.cached_tokens > first.usage.cached_tokens


def test_one_that_drains_ends_what_it_has_and_gets_no_more(fleet: RunningFleet) -> None:
    oracle = Oracle(WitnessOptions(), longest=256)
    drained = fleet.workers[1]
    with Streams(fleet, "drain") as calls:
        until(lambda: all(stream.messages for stream in calls.streams) or fleet.metric("live_calls")[1], "calls there")
        drained.signal(signal.SIGTERM)
        for stream, code in zip(calls.streams, calls.codes(), strict=True):
            assert code is StatusCode.OK
            assert_right(stream, code, oracle)
    assert drained.program is not None
    assert drained.program.end() == 0
    fleet.until("up", 1, 0, 1)
    before = fleet.metric("calls_total")
    with Streams(fleet, "after") as calls:
        assert set(calls.codes()) == {StatusCode.OK}
    assert fleet.metric("calls_total")[1] == before[1]
    assert "ERROR" not in fleet.gateway.log


@pytest.mark.skipif(os.environ.get(SOAK_VARIABLE) != "1", reason="it takes a worker many seconds to be held to hang")
def test_of_a_worker_that_hangs_those_that_wait_go_elsewhere_and_those_that_have_begun_go_on(tmp_path: Path) -> None:
    oracle = Oracle(WitnessOptions(), longest=256)
    models = ["witness:step_ms=500", FAST, FAST]
    with RunningFleet(tmp_path, models, "--blocks=256", "--max-running=6") as fleet:
        with Streams(fleet, "hang") as calls:
            begun = until(lambda: begun_at_the_slow_one(fleet, calls), "some calls of the slow worker have begun")
            fleet.workers[0].signal(signal.SIGSTOP)
            until(lambda: len(calls.open()) <= len(begun), "those that wait were answered elsewhere")
            # Before the connection is given up, so that the calls that have begun are still there.
            fleet.workers[0].signal(signal.SIGCONT)
            codes = calls.codes()
            for stream, code in zip(calls.streams, codes, strict=True):
                assert_right(stream, code, oracle)
        fleet.until("up", 1, 1, 1)
        assert fleet.metric("ejections_total") == [1, 0, 0]
