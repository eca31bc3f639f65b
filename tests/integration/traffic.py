"""Calls that keep coming while a test looks at something else."""

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from prefixgate.proto import gateway_pb2, generation_pb2
from tests.integration.asking import Stream, prompt
from tests.integration.load import Plan, mixed, run
from tests.integration.sidecar import KEYS
from tests.integration.waiting import HANG_SECONDS

Ask = Callable[[int], tuple[gateway_pb2.GenerateRequest, str]]
"""From the number of a call to what it asks, and as which tenant."""


@dataclass
class Traffic:
    """What the clients have heard so far. Each list grows by one entry for each call that ended."""

    usages: list[generation_pb2.Usage] = field(default_factory=list)
    codes: list[grpc.StatusCode] = field(default_factory=list)


@contextlib.contextmanager
def traffic(channel: grpc.Channel, ask: Ask, clients: int, timeout: float = 10 * HANG_SECONDS) -> Iterator[Traffic]:
    """Have so many clients call one after another until the block is left; what is live then is cancelled."""
    heard, numbers, leaving = Traffic(), itertools.count(), threading.Event()
    live: set[Stream] = set()

    def client() -> None:
        while not leaving.is_set():
            stream = Stream(channel, *ask(next(numbers)), timeout=timeout)
            live.add(stream)
            code = stream.rest()
            live.discard(stream)
            heard.codes.append(code)
            if stream.completion is not None:
                heard.usages.append(stream.completion.usage)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield heard
    finally:
        leaving.set()
        while any(thread.is_alive() for thread in threads):
            for stream in tuple(live):
                stream.cancel()
            for thread in threads:
                thread.join(0.05)


@contextlib.contextmanager
def mixed_traffic(address: str, clients: int) -> Iterator[None]:
    """Have calls of all kinds come, those that fail for a limit among them, until the block is left."""
    leaving = threading.Event()

    def plans() -> Iterator[Plan]:
        rng = random.Random(1)
        tenants = itertools.cycle(KEYS)
        for number in itertools.takewhile(lambda _: not leaving.is_set(), itertools.count()):
            beyond = Plan(prompt("beyond", 1, n=1000), next(tenants), refused=grpc.StatusCode.INVALID_ARGUMENT)
            yield beyond if number % 10 == 0 else mixed(rng, number)

    thread = threading.Thread(target=lambda: asyncio.run(run(address, plans(), clients)))
    thread.start()
    try:
        yield
    finally:
        leaving.set()
        thread.join()
