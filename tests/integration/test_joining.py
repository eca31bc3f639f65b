"""Workers that come to a fleet and leave it, each a process of its own: by its address, by a name, and not at all."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode

from prefixgate.gateway.readiness import until_serving
from prefixgate.worker.witness_options import WitnessOptions
from tests.integration.asking import Stream, prompt
from tests.integration.fleet import RunningFleet
from tests.integration.oracle import Oracle
from tests.integration.scrape import scrape
from tests.integration.sidecar import HASH_KEY, Program, write_settings
from tests.integration.waiting import HANG_SECONDS, until

CALLS, TOKENS = 6, 8


def assert_answered(channel: grpc.Channel, about: str) -> None:
    """Make some calls, each of which is to be answered, and rightly."""
    oracle = Oracle(WitnessOptions(), longest=256)
    streams = [Stream(channel, prompt(f"{number} {about}", TOKENS)) for number in range(CALLS)]
    for stream in streams:
        assert stream.rest() is StatusCode.OK
        expected = oracle.output(stream.request, stream.tenant, 0)
        assert expected is not None
        assert stream.token_ids() == expected.token_ids


def test_who_serves_something_else_or_has_another_key_is_refused_by_name_and_the_others_serve_on(
    tmp_path: Path,
) -> None:
    with RunningFleet(tmp_path, ["witness"] * 2, "--blocks=256") as fleet, fleet.channel() as channel:
        stranger = fleet.workers[1]
        address = stranger.address
        for model, hash_key, reason in (
            ("witness:context=4096", HASH_KEY, r"refused: .*; they differ in \w+"),
            ("witness", "77" * 32, "UNAUTHENTICATED: only a gateway "),
        ):
            stranger.kill()
            stranger.start(model, "--blocks=256", hash_key=hash_key)
            fleet.gateway.logged(rf"(No worker at {address}: .*{reason})")
            assert fleet.metric("up") == [1, 0]
            assert_answered(channel, reason)
        stranger.kill()
        fleet.restart(1, "witness")
        assert_answered(channel, "both")


NAMED = """
import pathlib, sys
from prefixgate.gateway.cli import main
from prefixgate.gateway.membership import Membership
file = pathlib.Path(sys.argv[1])
async def look_up(name):
    return file.read_text().split()
Membership.__init__.__kwdefaults__.update(lookup=look_up, seconds=0.05)
sys.exit(main(sys.argv[2:]))
"""
"""A gateway whose name server is a file, as no test may change the machine's own."""


class NamedFleet:
    """A gateway, and workers that it finds by a name."""

    def __init__(self, folder: Path, ending: ExitStack) -> None:
        write_settings(folder)
        self._folder = folder
        self._ending = ending
        self._names = folder / "names"
        self._config = f"--config={folder}/settings.toml"

    def worker(self, name: str, model: str = "witness:step_ms=2") -> str:
        """Start a worker, and return its address, which nothing tells the gateway yet."""
        flags = ("--worker-listen=127.0.0.1:0", "--worker-http=127.0.0.1:0", "--blocks=256", f"--model={model}")
        log = self._folder / f"{name}.log"
        program = self._ending.enter_context(Program(log, "prefixgate.worker", self._config, *flags))
        return program.logged(r"Listening on (\S+)")

    def name(self, *addresses: str) -> None:
        """Have the name stand for these."""
        fresh = self._names.with_suffix(".new")
        fresh.write_text("\n".join(addresses))
        fresh.rename(self._names)

    def start_gateway(self) -> None:
        """Start the gateway, and wait until it serves."""
        listen = f"--gateway-listen=unix:{self._folder}/gateway.sock"
        flags = (self._config, listen, "--gateway-http=127.0.0.1:0", "--workers=dns:fleet.test:1", "--insecure-workers")
        self.gateway = self._ending.enter_context(
            Program(self._folder / "gateway.log", str(self._names), "gateway", *flags, script=NAMED)
        )
        self.address = self.gateway.logged(r"Serving on (\S+), ")
        self._page = self.gateway.logged(r"metrics on (\S+)")
        asyncio.run(asyncio.wait_for(until_serving(self.address), HANG_SECONDS))

    def metric(self, name: str, worker: str) -> float:
        return scrape(self._page).total(f"prefixgate_gateway_worker_{name}", worker=worker)


@pytest.fixture
def named(tmp_path: Path) -> Iterator[NamedFleet]:
    with ExitStack() as ending:
        yield NamedFleet(tmp_path, ending)


def test_workers_come_and_go_as_a_name_says_and_calls_end_where_they_began(named: NamedFleet) -> None:
    oracle = Oracle(WitnessOptions(), longest=512)
    first, second, stranger = named.worker("first"), named.worker("second"), named.worker("other", "witness:context=64")
    named.name(first)
    named.start_gateway()
    with grpc.insecure_channel(named.address) as channel:
        assert_answered(channel, "one worker")
        named.name(first, second, stranger)
        named.gateway.logged(rf"(No worker at {stranger}: .*they differ in \w+)")
        until(lambda: named.metric("up", second) == 1, "the second has joined")
        streams = [Stream(channel, prompt(f"{number} of long calls", 200)).wait_for_tokens() for number in range(CALLS)]
        assert named.metric("live_calls", first) > 0
        named.name(second)
        for stream in streams:
            assert stream.rest() is StatusCode.OK
            expected = oracle.output(stream.request, stream.tenant, 0)
            assert expected is not None
            assert stream.token_ids() == expected.token_ids
        named.gateway.logged(rf"(The worker at {first} has left)")
        before = named.metric("calls_total", second)
        assert_answered(channel, "the other worker")
        assert named.metric("calls_total", second) == before + CALLS
