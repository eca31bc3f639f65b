"""Workers that fail, hang, drain, restart and leave: what becomes of the calls, and when they are asked again."""

import asyncio
import contextlib
import random
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixgate.config.address import Address
from prefixgate.gateway import member, server
from prefixgate.gateway.backoff import Backoff
from prefixgate.gateway.circuit_breaker import CircuitBreaker
from prefixgate.gateway.fleet import Fleet
from prefixgate.gateway.membership import Membership
from prefixgate.gateway.worker_client import Probe
from prefixgate.proto import gateway_pb2, worker_pb2
from tests.counts import scaled
from tests.gateway.fake_worker import FakeCall, FakeWorker, answer_all, describe, serving
from tests.gateway.fleeted import UNAVAILABLE, Fleeted, code_of, fleeted, workers
from tests.gateway.rig import Client, collect, gateway, gateway_client, prompt, run, text_of

PATIENT = Probe(interval=0.01, timeout=1.0, misses=3)
"""Of a worker that does not hang even a process that stands still for seconds misses one answer, not three in a row."""


def test_a_worker_whose_calls_fail_in_a_row_is_left_alone_and_the_last_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For longer than the test takes on any machine.
    monkeypatch.setattr(member, "CircuitBreaker", partial(CircuitBreaker, backoff=Backoff(1e6, 1e6)))

    async def test() -> None:
        async with fleeted(tmp_path, *workers(2)) as f:
            held, answered = [], set()
            while await f.metrics("up") == [1, 1]:
                pending = f.complete("hi")
                index, call = await f.next_call()
                if index == 0:
                    await call.end(grpc.StatusCode.INTERNAL, "a fault")
                    assert await code_of(pending) is grpc.StatusCode.INTERNAL
                else:
                    held.append((pending, call))
            assert await f.metrics("ejections_total") == [1, 0]
            for _ in range(3):
                pending = f.complete("hi")
                index, call = await f.next_call()
                answered.add(index)
                held.append((pending, call))
            assert answered == {1}
            for pending, call in held:
                await call.finish([64])
                await pending
            f.workers[1].description = None  # so that it stays away
            f.sessions[1].close()
            await f.until("up", 0, 0)
            pending = f.complete("hi")
            await (await f.sessions[0].calls.get()).finish([64])
            await pending

    run(test())


def test_calls_that_wait_at_a_worker_which_hangs_go_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "Fleet", partial(Fleet, probe=PATIENT))

    async def test() -> None:
        async with fleeted(tmp_path, *workers(2)) as f:
            streams = [f.client.stub.Generate(prompt("hi")) for _ in range(4)]
            calls = [await f.next_call() for _ in streams]
            stuck = [call for index, call in calls if index == 0]
            for index, call in calls:
                if index == 1:
                    await call.finish([64])
            begun, waiting = stuck[0], stuck[1:]
            assert waiting
            await begun.send((0, [64]))
            f.workers[0].answers.clear()
            for call in waiting:
                again = await f.sessions[1].calls.get()
                await call.cancels.get()
                await again.finish([65])
            assert await f.metrics("up") == [0, 1]
            # Whoever had begun to answer is waited for, and comes back.
            f.workers[0].answers.set()
            await begun.finish([64])
            texts = sorted([text_of(await collect(stream)) for stream in streams])
            assert texts == sorted(["aa", *["b"] * len(waiting), *["a"] * (3 - len(waiting))])
            await f.until("up", 1, 1)
            assert await f.metrics("ejections_total") == [1, 0]

    run(test())


def test_a_worker_that_hangs_is_asked_nothing_while_others_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "Fleet", partial(Fleet, probe=PATIENT))

    async def test() -> None:
        async with fleeted(tmp_path, *workers(2)) as f:
            stub = f.client.stub
            f.workers[0].answers.clear()
            await f.until("up", 0, 1)
            assert len((await stub.Stats(gateway_pb2.StatsRequest())).workers) == 1
            with pytest.raises(grpc.aio.AioRpcError) as missing:
                await stub.Flush(gateway_pb2.FlushRequest())
            assert missing.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "flushed at 1 workers; 1 could not be reached" in (missing.value.details() or "")
            assert [len(worker.asked) for worker in f.workers] == [0, 1]
            f.workers[0].answers.set()
            await f.until("up", 1, 1)
            await stub.Flush(gateway_pb2.FlushRequest())
            assert [len(worker.asked) for worker in f.workers] == [1, 2]

    run(test())


def test_the_last_worker_keeps_its_calls_though_it_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "Fleet", partial(Fleet, probe=Probe(interval=0.01, timeout=0.05, misses=1)))

    async def test() -> None:
        async with fleeted(tmp_path, *workers(1)) as f:
            f.workers[0].answers.clear()
            first = f.complete()
            call = (await f.next_call())[1]
            await f.until("up", 0)
            second = f.complete()
            for each in (call, (await f.next_call())[1]):
                await each.finish([64])
            await asyncio.gather(first, second)

    run(test())


def test_a_worker_that_drains_gets_no_new_calls_and_finishes_those_it_has(tmp_path: Path) -> None:
    async def test() -> None:
        async with fleeted(tmp_path, *workers(2)) as f:
            pending = [f.complete(), f.complete()]
            calls = dict([await f.next_call() for _ in pending])
            f.workers[0].batches.put_nowait(worker_pb2.EventBatch(load=worker_pb2.WorkerLoad(draining=True)))
            await f.until("up", 0, 1)
            for _ in range(3):
                pending.append(f.complete())
                index, call = await f.next_call()
                assert index == 1
                await call.finish([64])
            for call in calls.values():
                await call.finish([64])
            await asyncio.gather(*pending)

    run(test())


def test_a_worker_that_comes_back_is_asked_anew_what_it_holds(tmp_path: Path) -> None:
    async def test() -> None:
        async with fleeted(tmp_path, *workers(2)) as f:
            assert await f.workers[0].followed.get() == "life-0"
            f.workers[0].description = describe(incarnation="life-9")
            f.sessions[0].close()
            f.sessions[0] = await f.workers[0].sessions.get()
            assert f.sessions[0].hello.incarnation == "life-9"
            assert await f.workers[0].followed.get() == "life-9"
            await f.until("up", 1, 1)
            pending = [f.complete(), f.complete()]
            for _ in pending:
                await (await f.next_call())[1].finish([64])
            await asyncio.gather(*pending)

    run(test())


def test_a_worker_that_is_named_no_more_ends_what_it_has_and_can_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[str] = []

    async def lookup(_: Address) -> list[str]:
        return list(there)

    monkeypatch.setattr(server, "Membership", partial(Membership, lookup=lookup, seconds=0.01))

    async def test() -> None:
        both = workers(2)
        async with (
            serving(both[0], tmp_path / "0") as one,
            serving(both[1], tmp_path / "1") as other,
            gateway("dns:workers:1", insecure_workers=True) as running,
            gateway_client(running) as client,
        ):
            assert await code_of(client.stub.Complete(prompt("hi"))) is UNAVAILABLE
            there[:] = [one, other]
            f = Fleeted(client, there[:], both, [await worker.sessions.get() for worker in both])
            pending = [f.complete(), f.complete()]
            calls = dict([await f.next_call() for _ in pending])
            there[:] = [other]
            await f.until("up", 0, 1)
            for _ in range(3):
                pending.append(f.complete())
                index, call = await f.next_call()
                assert index == 1
                await call.finish([64])
            assert not f.sessions[0].closed.is_set()
            for call in calls.values():
                await call.finish([64])
            await asyncio.gather(*pending)
            await f.sessions[0].closed.wait()
            assert one not in await client.metrics()
            there[:] = [one]
            await both[0].sessions.get()
            await f.sessions[1].closed.wait()

    run(test())


def test_every_call_ends_whatever_workers_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are killed, restarted in place, named no more and named again, in any order, while clients go on."""
    there: list[str] = []

    async def lookup(_: Address) -> list[str]:
        return list(there)

    monkeypatch.setattr(server, "Membership", partial(Membership, lookup=lookup, seconds=0.001))

    async def answer(call: FakeCall) -> None:
        # A worker that was killed cannot write any more.
        with contextlib.suppress(Exception):
            await call.send((0, [64]))
            await call.finish([65])

    async def live(number: int, until: asyncio.Event) -> None:
        worker = FakeWorker(describe(incarnation=f"life-{number}-{id(until)}"))
        async with serving(worker, tmp_path / str(number)):
            answering = asyncio.create_task(answer_all(worker, answer))
            await until.wait()
            answering.cancel()

    async def ask(client: Client, ended: asyncio.Queue[grpc.StatusCode], done: asyncio.Event) -> None:
        while not done.is_set():
            call = client.stub.Generate(prompt("hi"))
            try:
                texts = text_of(await collect(call))
                assert texts == "ab"
            except grpc.aio.AioRpcError:
                pass
            ended.put_nowait(await call.code())

    async def test() -> None:
        rng, done, codes, ended = random.Random(7), asyncio.Event(), list[grpc.StatusCode](), asyncio.Queue[Any]()
        addresses = [f"unix:{tmp_path}/{number}" for number in range(3)]
        there[:] = addresses
        lives: dict[int, tuple[asyncio.Event, asyncio.Task[None]]] = {}

        def start(number: int) -> None:
            until = asyncio.Event()
            lives[number] = until, asyncio.create_task(live(number, until))

        async def kill(number: int) -> None:
            until, task = lives.pop(number)
            until.set()
            await task

        async with gateway("dns:workers:1", insecure_workers=True) as running, gateway_client(running) as client:
            for number in range(3):
                start(number)
            await client.until_health(1)
            asking = [asyncio.create_task(ask(client, ended, done)) for _ in range(6)]
            for _ in range(scaled(200)):
                number = rng.randrange(3)
                if rng.random() < 0.5:
                    if number in lives:
                        await kill(number)
                    else:
                        start(number)
                elif addresses[number] in there:
                    there.remove(addresses[number])
                else:
                    there.append(addresses[number])
                # So many calls between two changes, however fast or slow they are.
                for _ in range(rng.randrange(6)):
                    codes.append(await ended.get())
            there[:] = addresses
            for number in range(3):
                if number not in lives:
                    start(number)
            done.set()
            await asyncio.gather(*asking)
            codes += [ended.get_nowait() for _ in range(ended.qsize())]
            assert set(codes) <= {grpc.StatusCode.OK, UNAVAILABLE}
            # Now that nobody goes any more, calls are answered, once the last of the killed ones is missed.
            last = grpc.StatusCode.UNKNOWN
            while last is not grpc.StatusCode.OK:
                last = await client.stub.Complete(prompt("hi")).code()
            assert await client.metric("prefixgate_gateway_live_calls") == 0
            for number in range(3):
                await kill(number)

    run(test())
