"""What the gateway costs beside a bare grpc.aio server that passes the same bytes on, and whether it keeps its bounds.

    python -m benchmarks.gateway [--json FILE] [--quick] [--only CASE ...]

A worker with the witness model, a gateway and a pass-through (``benchmarks/pass_through.py``) run as processes on Unix
sockets, with 16 tenants. The contenders of a case take turns, or work at the same time on the same bytes. All
within four minutes; ``--quick`` is the same with fewer repetitions, in half a minute. Cases and their keys in the JSON
file:

- ``first``: the first token of a cached prompt of 1,000 token ids, so without tokenizing and with hardly any computing,
  in milliseconds, medians: straight from the worker, on a stream that is kept open as the gateway's is
  (``first_worker_ms``), through the gateway (``first_gateway_ms``), and through the pass-through and the gateway
  (``first_relayed_ms``). So each hop is seen by itself, with the same bytes: ``first_gateway_hop_ms`` and
  ``first_pass_through_hop_ms``, and ``first_added_ms`` (at most 1) is what the gateway's takes more.
- ``stream``: 64 concurrent streams through a pass-through and then the gateway, so that both handle the same messages
  at the same time. Microseconds of CPU time per streamed token, ``stream_gateway_us`` and ``stream_pass_through_us``,
  and ``stream_cpu_ratio`` (at most 1.5).
- ``scrapes``: reading the gateway's metrics while 64 streams run through it, milliseconds: ``metrics_p50_ms``,
  ``metrics_p99_ms`` (at most 5), and ``metrics_series``. In turn with them, a page of the same length from a process
  that does nothing else, ``metrics_bare_p50_ms`` and ``metrics_bare_p99_ms``: what the machine makes a scrape wait.
- ``memory``: the gateway's resident memory before and after 10,000 calls, 64 at a time: ``memory_grown_mib``, and
  ``memory_bytes_per_call``.
- ``isolation``: the first token of a prompt of 1,000 ids that another tenant has cached, of one that nobody has, and of
  one that the tenant itself has cached, in turn: ``isolation_other_over_cold`` and ``isolation_own_over_cold``, ratios
  of medians, and ``isolation_told_apart``, the share of pairs in which the prompt that another tenant has cached was
  the faster one. 0.5 is chance; ``isolation_chance`` is its standard deviation, twice which chance alone goes beyond in
  one of 20 runs.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio

from benchmarks.hosted_worker import Client
from benchmarks.served import TENANTS, Served, credential, served
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, generation_pb2, worker_pb2
from prefixgate.proto.transport import CHANNEL_OPTIONS

STEP_MS = 25
STREAMS = 64
PROMPT_TOKENS = 1000
SCRAPE_SECONDS = 0.025
WARM_ROUNDS = 10


class Sizes(NamedTuple):
    """How much is repeated."""

    first_rounds: int = 300
    stream_tokens: int = 300
    stream_rounds: int = 3
    scrape_tokens: int = 1_200
    warm_calls: int = 4_000
    calls: int = 10_000
    isolation_pairs: int = 200


QUICK = Sizes(
    first_rounds=50,
    stream_tokens=80,
    stream_rounds=1,
    scrape_tokens=200,
    warm_calls=500,
    calls=1_000,
    isolation_pairs=30,
)


class Bench:
    """The sizes, and what came out."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.random = random.Random(1)
        self.results: dict[str, float] = {}

    def record(self, key: str, value: float) -> None:
        self.results[key] = round(value, 4)
        print(f"  {key:28} {value:10.3f}", flush=True)

    def prompt(self) -> list[int]:
        """Make up a prompt that nobody has seen."""
        return self.random.choices(range(97, 123), k=PROMPT_TOKENS)


class GatewayClient:
    """A client of the gateway, or of what passes on to it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)

    async def first_token_ms(self, prompt: Sequence[int], tenant: str = TENANTS[0]) -> float:
        """Make a call for one token; returns how long it took to come."""
        begin = time.perf_counter()
        first = 0.0
        async for message in self._stub.Generate(_request(prompt, 1), metadata=credential(tenant)):
            if message.deltas and not first:
                first = (time.perf_counter() - begin) * 1e3
        if not first:
            raise RuntimeError("a call ended without a token")
        return first

    async def stream(self, prompt: Sequence[int], tokens: int, tenant: str = TENANTS[0]) -> None:
        """Read a stream to its end."""
        got = 0
        async for message in self._stub.Generate(_request(prompt, tokens), metadata=credential(tenant)):
            got += sum(len(delta.token_ids) for delta in message.deltas)
        if got != tokens:
            raise RuntimeError(f"{got} tokens came instead of {tokens}")


def _request(prompt: Sequence[int], tokens: int) -> gateway_pb2.GenerateRequest:
    return gateway_pb2.GenerateRequest(
        token_ids=gateway_pb2.TokenIds(ids=prompt),
        sampling=generation_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True),
    )


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)])


async def first(bench: Bench, where: Served) -> None:
    prompt = bench.prompt()
    async with _channel(where.gateway) as ours, _channel(where.relay) as relay, _channel(where.worker) as worker:
        direct = where.link.stub(worker)
        session = Client(direct, await direct.Describe(worker_pb2.DescribeRequest()))
        await session.greet()
        ways: Mapping[str, Callable[[], Awaitable[float]]] = {
            "worker": functools.partial(session.first_token_ms, prompt),
            "gateway": functools.partial(GatewayClient(ours).first_token_ms, prompt),
            "relayed": functools.partial(GatewayClient(relay).first_token_ms, prompt),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(WARM_ROUNDS + bench.sizes.first_rounds):
            for name, way in ways.items():
                milliseconds = await way()
                if number >= WARM_ROUNDS:
                    times[name].append(milliseconds)
    for name, values in times.items():
        bench.record(f"first_{name}_ms", statistics.median(values))
    rounds = list(zip(*times.values(), strict=True))
    bench.record("first_gateway_hop_ms", statistics.median(ours - worker for worker, ours, _ in rounds))
    bench.record("first_pass_through_hop_ms", statistics.median(both - ours for _, ours, both in rounds))
    bench.record("first_added_ms", statistics.median(2 * ours - worker - both for worker, ours, both in rounds))


async def stream(bench: Bench, where: Served) -> None:
    tokens = bench.sizes.stream_tokens
    ratios, ours, bare = [], [], []
    async with _channel(where.relay) as channel:
        client = GatewayClient(channel)
        await _load(bench, client, 20)
        for _ in range(bench.sizes.stream_rounds):
            before = _cpu_seconds(where)
            await _load(bench, client, tokens)
            after = _cpu_seconds(where)
            spent = [(end - start) * 1e6 / (STREAMS * tokens) for start, end in zip(before, after, strict=True)]
            ours.append(spent[0])
            bare.append(spent[1])
            ratios.append(spent[0] / spent[1])
    bench.record("stream_gateway_us", statistics.median(ours))
    bench.record("stream_pass_through_us", statistics.median(bare))
    bench.record("stream_cpu_ratio", statistics.median(ratios))


async def scrapes(bench: Bench, where: Served) -> None:
    async with _channel(where.gateway) as channel:
        client = GatewayClient(channel)
        await _load(bench, client, 20)
        async with _scraping(where.gateway_page, where.bare_page) as found:
            await _load(bench, client, bench.sizes.scrape_tokens)
    for name, page in zip(("metrics", "metrics_bare"), found, strict=True):
        bench.record(f"{name}_p50_ms", statistics.median(page["ms"]))
        bench.record(f"{name}_p99_ms", statistics.quantiles(page["ms"], n=100)[98])
    bench.record("metrics_series", found[0]["series"])


async def _load(bench: Bench, client: GatewayClient, tokens: int) -> None:
    """Run 64 streams, all tenants among them, to their ends."""
    await asyncio.gather(
        *(client.stream(bench.prompt()[:32], tokens, TENANTS[i % len(TENANTS)]) for i in range(STREAMS))
    )


def _cpu_seconds(where: Served) -> list[float]:
    times = [process.cpu_times() for process in (where.gateway_process, where.relay_process)]
    return [time.user + time.system for time in times]


@contextlib.asynccontextmanager
async def _scraping(*urls: str) -> AsyncIterator[list[Mapping[str, Any]]]:
    """Scrape pages from another process for as long as this lasts; what it found stands in the list afterwards."""
    found: list[Mapping[str, Any]] = []
    command = [sys.executable, "-m", "benchmarks.scraper", str(SCRAPE_SECONDS), *urls]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield found
    finally:
        output, _ = await process.communicate(b"")
    found += json.loads(output)


async def memory(bench: Bench, where: Served) -> None:
    async with _channel(where.gateway) as channel:
        client = GatewayClient(channel)
        left = 0

        async def calls(number: int) -> None:
            nonlocal left
            left = number
            await asyncio.gather(*(one(i) for i in range(STREAMS)))

        async def one(number: int) -> None:
            nonlocal left
            prompt = [97 + number % 26] * (20 + number)
            while left > 0:
                left -= 1
                await client.stream(prompt, 4)

        await calls(bench.sizes.warm_calls)
        before = where.gateway_process.memory_info().rss
        await calls(bench.sizes.calls)
        grown = where.gateway_process.memory_info().rss - before
    bench.record("memory_grown_mib", grown / (1 << 20))
    bench.record("memory_bytes_per_call", grown / bench.sizes.calls)


async def isolation(bench: Bench, where: Served) -> None:
    other: list[float] = []
    cold: list[float] = []
    own: list[float] = []
    async with _channel(where.gateway) as channel:
        client = GatewayClient(channel)
        for number in range(bench.sizes.isolation_pairs):
            cached, unseen = bench.prompt(), bench.prompt()
            await client.first_token_ms(cached, TENANTS[0])
            turns = [(other, cached), (cold, unseen)]
            for times, prompt in turns if number % 2 else reversed(turns):
                times.append(await client.first_token_ms(prompt, TENANTS[1]))
            own.append(await client.first_token_ms(cached, TENANTS[1]))
    pairs = len(cold)
    bench.record("isolation_other_over_cold", statistics.median(other) / statistics.median(cold))
    bench.record("isolation_own_over_cold", statistics.median(own) / statistics.median(cold))
    bench.record("isolation_told_apart", sum(a < b for a, b in zip(other, cold, strict=True)) / pairs)
    bench.record("isolation_chance", 0.5 / pairs**0.5)


SLOW_CASES = ("stream", "scrapes")
CASES: Mapping[str, Callable[[Bench, Served], Awaitable[None]]] = {
    "first": first,
    "isolation": isolation,
    "stream": stream,
    "scrapes": scrapes,
    "memory": memory,
}


async def _run(bench: Bench, names: Sequence[str]) -> None:
    # A step as long as on a small accelerator where messages are counted, and none where milliseconds are.
    for model, own in (
        (f"witness:step_ms={STEP_MS}", SLOW_CASES),
        ("witness", [name for name in CASES if name not in SLOW_CASES]),
    ):
        if not (wanted := [name for name in own if name in names]):
            continue
        with served(model) as where:
            for name in wanted:
                print(name, flush=True)
                await CASES[name](bench, where)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the gateway beside a bare pass-through of the same bytes.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="of " + ", ".join(CASES))
    arguments = parser.parse_args()
    bench = Bench(QUICK if arguments.quick else Sizes())
    asyncio.run(_run(bench, arguments.only or list(CASES)))
    if arguments.json:
        arguments.json.write_text(json.dumps(bench.results, indent=2) + "\n")


if __name__ == "__main__":
    main()
