"""A gateway in front of several workers: who gets a call, and what becomes of it when a worker does not answer."""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.config.address import Address
from prefixgate.gateway import member, server
from prefixgate.gateway.backoff import Backoff
from prefixgate.gateway.circuit_breaker import CircuitBreaker
from prefixgate.gateway.fleet import Fleet
from prefixgate.gateway.membership import Membership
from prefixgate.gateway.prompt_encoder import PromptEncoder
from prefixgate.gateway.worker_client import Probe
from prefixgate.proto import gateway_pb2, worker_pb2
from tests.counts import scaled
from tests.gateway.fake_worker import HASH_KEY, FakeCall, FakeSession, FakeWorker, answer_all, describe, serving
from tests.gateway.rig import Client, collect, gateway, gateway_client, prompt, run, text_of

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Fleeted:
    """A gateway, its client, and the workers with the gateway's session at each."""

    def __init__(
        self, client: Client, addresses: list[str], workers: list[FakeWorker], sessions: list[FakeSession]
    ) -> None:
        self.client = client
        self.addresses = addresses
        self.workers = workers
        self.sessions = sessions
        self._arrived: list[tuple[int, FakeCall]] = []

    def complete(self, text: str = "hi", **fields: Any) -> Any:
        return self.client.stub.Complete(prompt(text, **fields))

    async def next_call(self) -> tuple[int, FakeCall]:
        """Wait until a call comes to any of the workers, and tell which."""
        if not self._arrived:
            waits = [asyncio.ensure_future(session.calls.get()) for session in self.sessions]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for index, wait in enumerate(waits):
                if wait.done():
                    self._arrived.append((index, wait.result()))
                else:
                    wait.cancel()
        return self._arrived.pop(0)

    def is_idle(self) -> bool:
        """Whether no worker has a call that the test has not taken."""
        return not self._arrived and all(session.calls.empty() for session in self.sessions)

    async def metrics(self, name: str) -> list[float]:
        """Read a metric of each worker."""
        page = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in await self._lines() if line[0] != "#"
        }
        return [page[f'prefixgate_gateway_worker_{name}{{worker="{address}"}}'] for address in self.addresses]

    async def until(self, name: str, *values: float) -> None:
        """Wait until a metric of the workers has these values."""
        while await self.metrics(name) != list(values):
            pass

    async def _lines(self) -> list[str]:
        return (await self.client.metrics()).splitlines()


@asynccontextmanager
async def fleeted(folder: Path, *workers: FakeWorker, also: Sequence[str] = ()) -> AsyncIterator[Fleeted]:
    async with AsyncExitStack() as stack:
        addresses = [
            await stack.enter_async_context(serving(worker, folder / str(index)))
            for index, worker in enumerate(workers)
        ]
        running = await stack.enter_async_context(gateway(*addresses, *also))
        client = await stack.enter_async_context(gateway_client(running))
        sessions = [await worker.sessions.get() for worker in workers]
        yield Fleeted(client, addresses, list(workers), sessions)


async def code_of(pending: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pending
    return caught.value.code()


def workers(count: int) -> list[FakeWorker]:
    return [FakeWorker(describe(incarnation=f"life-{index}")) for index in range(count)]


def test_calls_that_wait_are_spread_and_their_load_ends_with_them(tmp_path: Path) -> None:
    async def test() -> None:
        async with fleeted(tmp_path, *workers(3)) as f:
            pending, taken = [], []
            for number in range(6):
                pending.append(f.complete(f"{number} " * 40))
                taken.append(await f.next_call())
            assert sorted(index for index, _ in taken) == [0, 0, 1, 1, 2, 2]
            assert await f.metrics("live_calls") == [2, 2, 2]
            for _, call in taken:
                await call.finish([64])
            await asyncio.gather(*pending)
            cancelled = f.complete()
            await f.next_call()
            cancelled.cancel()
            await f.until("live_calls", 0, 0, 0)
            assert sum(await f.metrics("calls_total")) == 7

    run(test())


@pytest.mark.parametrize("how", ["status", "ok", "refusal"])
def test_a_call_that_a_worker_drops_before_it_has_answered_goes_to_another(tmp_path: Path, how: str) -> None:
    async def test() -> None:
        async with fleeted(tmp_path, *workers(2)) as f:
            pending = f.client.stub.Generate(prompt("hi"))
            index, call = await f.next_call()
            if how == "refusal":
                await call.end(UNAVAILABLE, "the worker is shutting down")
            else:
                f.sessions[index].close(grpc.StatusCode.INTERNAL if how == "status" else grpc.StatusCode.OK, "dead")
            again = await f.sessions[1 - index].calls.get()
            call.submit.call_id = again.submit.call_id
            assert again.submit == call.submit
            await again.finish([64, 65])
            responses = await collect(pending)
            assert text_of(responses) == "ab"
            assert responses[-1].completion.incarnation == f"life-{1 - index}"
            assert (await f.metrics("retried_calls_total"))[1 - index] == 1
            assert await f.metrics("calls_total") == [1, 1]

    run(test())


def test_a_call_that_has_begun_to_answer_is_never_sent_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with fleeted(tmp_path, *workers(2)) as f:
            stream = f.client.stub.Generate(prompt("hi"))
            index, call = await f.next_call()
            await call.send((0, [64]))
            first: Any = await stream.read()
            assert first.deltas[0].text == "a"
            f.sessions[index].close(grpc.StatusCode.INTERNAL, "dead")
            assert await code_of(stream.read()) is UNAVAILABLE
            assert f.is_idle()

    run(test())


def test_a_call_is_sent_to_two_workers_at_most(tmp_path: Path) -> None:
    async def test() -> None:
        async with fleeted(tmp_path, *workers(3)) as f:
            pending = f.complete()
            for _ in range(2):
                _, call = await f.next_call()
                await call.end(UNAVAILABLE, "cannot")
            assert await code_of(pending) is UNAVAILABLE
            assert f.is_idle()

    run(test())


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL]
)
def test_what_a_worker_has_decided_is_the_answer(tmp_path: Path, code: grpc.StatusCode) -> None:
    async def test() -> None:
        async with fleeted(tmp_path, *workers(2)) as f:
            pending = f.complete()
            _, call = await f.next_call()
            await call.end(code, "no")
            assert await code_of(pending) is code
            assert f.is_idle()

    run(test())


def test_a_call_whose_client_has_gone_is_not_sent_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with fleeted(tmp_path, *workers(2)) as f:
            pending = f.complete()
            index, call = await f.next_call()
            pending.cancel()
            await call.cancels.get()
            f.sessions[index].close(grpc.StatusCode.INTERNAL, "dead")
            await f.until("live_calls", 0, 0)
            assert f.is_idle()

    run(test())


def test_the_only_worker_is_not_asked_twice(tmp_path: Path) -> None:
    async def test() -> None:
        async with fleeted(tmp_path, *workers(1)) as f:
            pending = f.complete()
            _, call = await f.next_call()
            await call.end(UNAVAILABLE, "the worker is shutting down; try again later")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await pending
            assert (caught.value.code(), caught.value.details()) == (
                UNAVAILABLE,
                "the worker is shutting down; try again later",
            )
            assert f.is_idle()

    run(test())


def test_a_worker_that_serves_something_else_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = [describe(fingerprint="beef"), describe(context_length=4096), describe(vocabulary_size=999)]

    async def test() -> None:
        paths = [tmp_path / f"other-{number}" for number in range(len(others))]
        async with fleeted(tmp_path, FakeWorker(), also=[f"unix:{path}" for path in paths]) as f:
            for path, description in zip(paths, others, strict=True):
                other = FakeWorker(description)
                async with serving(other, path):
                    for _ in range(2):
                        await other.described.get()
                    assert other.sessions.empty()
            pending = f.complete()
            await (await f.next_call())[1].finish([64])
            await pending

    with caplog.at_level(logging.WARNING):
        run(test())
    refusals = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(refusals) == len(others)
    for named, refusal in zip(("fingerprint", "context_length", "vocabulary_size"), refusals, strict=True):
        assert f"they differ in {named}" in refusal


def test_a_prompt_that_was_encoded_for_one_model_is_not_sent_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, encoding = asyncio.Event(), asyncio.Event()
    encode = PromptEncoder.encode

    async def slow(*arguments: Any) -> Any:
        encoding.set()
        await may_end.wait()
        return await encode(*arguments)

    monkeypatch.setattr(PromptEncoder, "encode", slow)

    async def test() -> None:
        async with fleeted(tmp_path, FakeWorker()) as f:
            pending = f.complete()
            await encoding.wait()
            f.workers[0].description = describe(fingerprint="beef", incarnation="life-2")
            f.sessions[0].close()
            f.sessions[0] = await f.workers[0].sessions.get()
            may_end.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await pending
            assert caught.value.code() is UNAVAILABLE
            assert "another model" in (caught.value.details() or "")
            assert f.is_idle()

    run(test())


def test_a_bound_on_calls_is_that_of_the_smallest_worker(tmp_path: Path) -> None:
    async def test() -> None:
        small, large = describe(max_call_tokens=64), describe(max_call_tokens=4096)
        async with fleeted(tmp_path, FakeWorker(small), FakeWorker(large)) as f:
            request = prompt("hi", sampling={"max_tokens": 100})
            assert await code_of(f.client.stub.Complete(request)) is grpc.StatusCode.INVALID_ARGUMENT

    run(test())


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
    # Two seconds for an answer of a worker in this process: those that do not hang give it even on a busy machine.
    probe = Probe(interval=0.01, timeout=2.0, misses=1)
    monkeypatch.setattr(server, "Fleet", partial(Fleet, probe=probe))

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
    monkeypatch.setattr(server, "Fleet", partial(Fleet, probe=Probe(interval=0.01, timeout=2.0, misses=1)))

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


PREFIX = " ".join(map(str, range(60)))


def stored(text_ids: list[int], number: int, **changes: Any) -> worker_pb2.EventBatch:
    """A snapshot by which a worker holds a prompt of the local tenant."""
    hasher, model = BlockHasher(HASH_KEY), describe()
    hashes = hasher.hash_tokens(CacheScope("local", f"{model.model}@{model.fingerprint}"), text_ids)
    blocks = worker_pb2.TenantBlocks(tenant="local", hashes=b"".join(hashes))
    fields = {"snapshot": worker_pb2.SNAPSHOT_PART_LAST} | changes
    return worker_pb2.EventBatch(first_number=number, events=[worker_pb2.CacheEvent(stored=blocks)], **fields)


def test_calls_go_where_their_prefix_is_until_it_is_there_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with fleeted(tmp_path, *workers(3)) as f:

            async def ask(text: str) -> tuple[int, list[int]]:
                pending = f.complete(text)
                index, call = await f.next_call()
                await call.finish([64])
                await pending
                return index, list(call.submit.token_ids)

            ids = list((await f.client.stub.Tokenize(gateway_pb2.TokenizeRequest(prompt=PREFIX))).token_ids)
            blocks = len(ids) // 16
            for index, worker in enumerate(f.workers):
                assert await worker.followed.get() == f"life-{index}"
                worker.batches.put_nowait(
                    stored(ids, 7) if index == 1 else worker_pb2.EventBatch(snapshot=worker_pb2.SNAPSHOT_PART_LAST)
                )
            await f.until("known_blocks", 0, blocks, 0)
            assert (await ask(PREFIX))[1] == ids
            assert [(await ask(f"{PREFIX} and {number}"))[0] for number in range(4)] == [1] * 4
            # A number that is missing drops the picture, and another stream brings it anew.
            f.workers[1].batches.put_nowait(stored(ids, 9, snapshot=worker_pb2.SNAPSHOT_PART_NONE))
            assert await f.workers[1].followed.get() == "life-1"
            assert await f.metrics("resyncs_total") == [0, 1, 0]
            f.workers[1].batches.put_nowait(stored(ids, 9))
            await f.until("known_blocks", 0, blocks, 0)
            removed = worker_pb2.CacheEvent(cleared="local")
            f.workers[1].batches.put_nowait(worker_pb2.EventBatch(first_number=10, events=[removed]))
            await f.until("known_blocks", 0, 0, 0)

    with caplog.at_level(logging.WARNING):
        run(test())
    assert "event 9 does not follow" in caplog.text


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
            gateway("dns:workers:1") as running,
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

        async with gateway("dns:workers:1") as running, gateway_client(running) as client:
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
