"""How processes that live streams run through are told to stop, and what the streams' clients hear."""

import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode

from prefixgate.worker.witness_options import WitnessOptions
from tests.integration.asking import Stream, prompt
from tests.integration.oracle import Oracle
from tests.integration.sidecar import KEYS, Sidecar, Started
from tests.integration.waiting import HANG_SECONDS, until

MODEL = "witness:step_ms=20"
ENDLESS, ENDLESS_MODEL = 900, "witness:step_ms=100"
"""An answer that takes a minute and a half, which is many times as long as these tests."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Started]:
    with Started(tmp_path, f"--model={MODEL}") as pair:
        yield pair


def begin(channel: grpc.Channel, max_tokens: int) -> list[Stream]:
    """Begin a stream for each tenant, and wait until each has got tokens."""
    streams = [Stream(channel, prompt(f"{tenant} asks", max_tokens), tenant) for tenant in KEYS]
    return [stream.wait_for_tokens() for stream in streams]


@pytest.mark.parametrize("first", ["gateway", "worker"])
def test_both_told_at_once_as_in_one_pod_lets_all_streams_finish_whole(pair: Started, first: str) -> None:
    with pair.channel() as channel:
        streams = begin(channel, 60)
        for process in (pair.gateway, pair.worker) if first == "gateway" else (pair.worker, pair.gateway):
            process.send_signal(signal.SIGTERM)
        assert {stream.rest() for stream in streams} == {StatusCode.OK}
        oracle = Oracle(WitnessOptions(), longest=128)
        for stream in streams:
            expected = oracle.output(stream.request, stream.tenant, 0)
            assert expected is not None
            assert stream.token_ids() == expected.token_ids
    assert [process.wait(HANG_SECONDS) for process in (pair.worker, pair.gateway)] == [0, 0]


def test_a_second_signal_ends_every_stream_at_once_with_a_status_that_says_why(tmp_path: Path) -> None:
    with Sidecar(tmp_path, model=ENDLESS_MODEL) as served:
        served.wait_until_ready()
        with served.channel() as channel:
            streams = begin(channel, ENDLESS)
            unread = Stream(channel, prompt("never read", ENDLESS))
            served.process.terminate()
            until(lambda: "shutting down" in served.log.read_text(), "the gateway drains")
            served.process.terminate()
            for stream in streams:
                assert stream.rest() is StatusCode.UNAVAILABLE
                assert "the gateway is shutting down" in stream.details()
            assert unread.rest() is StatusCode.UNAVAILABLE
        assert served.finish() == 128 + signal.SIGTERM
        assert served.complaints() == []
