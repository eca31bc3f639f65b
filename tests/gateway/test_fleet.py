"""A gateway in front of several workers: who gets a call, and when it is sent to another one."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixgate.cache.hashing import BlockHash, BlockHasher, CacheScope
from prefixgate.gateway import fleet
from prefixgate.gateway.prompt_encoder import PromptEncoder
from prefixgate.proto import gateway_pb2, worker_pb2
from tests.gateway.fake_worker import HASH_KEY, FakeWorker, describe, serving
from tests.gateway.fleeted import UNAVAILABLE, code_of, fleeted, workers
from tests.gateway.rig import collect, prompt, run, text_of


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


def test_a_warm_that_a_worker_drops_goes_to_another_however_far_it_was(tmp_path: Path) -> None:
    async def test() -> None:
        async with fleeted(tmp_path, *workers(2)) as f:
            pending: Any = f.client.stub.Warm(gateway_pb2.WarmRequest(prompt="hi"))
            index, call = await f.next_call()
            await call.progress(3)
            f.sessions[index].close(grpc.StatusCode.INTERNAL, "dead")
            again = await f.sessions[1 - index].calls.get()
            call.submit.call_id = again.submit.call_id
            assert again.submit == call.submit
            # One by one, as what nobody has read yet becomes one message.
            assert (await pending.read()).progress.computed_tokens == 3
            for computed in (2, 4):
                await again.progress(computed)
            told = (await pending.read()).progress.computed_tokens
            assert told == 4
            await again.end(prompt_tokens=4)
            assert (await pending.read()).completion.incarnation == f"life-{1 - index}"
            # And no further than to two.
            pending = f.client.stub.Warm(gateway_pb2.WarmRequest(prompt="hi"))
            again = await f.sessions[1 - index].calls.get()
            await again.end(UNAVAILABLE, "the worker is shutting down")
            assert await code_of(pending.read()) is UNAVAILABLE

    run(test())


def test_the_prompt_of_a_call_that_is_tried_again_counts_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with fleeted(tmp_path, *workers(2)) as f:
            pending = f.complete()
            index, call = await f.next_call()
            await call.end(UNAVAILABLE, "the worker is shutting down", prompt_tokens=2, cached_tokens=1)
            again = await f.sessions[1 - index].calls.get()
            await again.finish([64], cached_tokens=1, block_hit_tokens=1)
            assert (await pending).completion.usage.prompt_tokens == 2
            assert await f.client.metric('prefixgate_gateway_prompt_tokens_total{tenant="local"}') == 2

    run(test())


@pytest.mark.parametrize("method", ["Generate", "Warm"])
def test_the_blocks_of_a_long_prompt_are_named_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    named: list[tuple[int, str]] = []
    name = BlockHasher.hash_tokens

    def noting(hasher: BlockHasher, scope: CacheScope, token_ids: Sequence[int]) -> list[BlockHash]:
        named.append((len(token_ids), threading.current_thread().name.partition("_")[0]))
        return name(hasher, scope, token_ids)

    monkeypatch.setattr(BlockHasher, "hash_tokens", noting)
    monkeypatch.setattr(fleet, "LONG_PROMPT", 100)
    requests: dict[str, Callable[[str], Any]] = {
        "Generate": prompt,
        "Warm": lambda text: gateway_pb2.WarmRequest(prompt=text),
    }

    async def test() -> None:
        async with fleeted(tmp_path, *workers(2)) as f:
            for text in ("a" * 99, "a" * 100):
                pending = getattr(f.client.stub, method)(requests[method](text))
                index, _ = await f.next_call()
                # Tried again, it is not named again.
                f.sessions[index].close()
                again = await f.sessions[1 - index].calls.get()
                await (again.finish([64]) if method == "Generate" else again.end(prompt_tokens=len(text)))
                assert [message async for message in pending]
                f.sessions[index] = await f.workers[index].sessions.get()

    run(test())
    # Where tenants take turns, so that one with many long prompts keeps none waiting but itself.
    assert named == [(99, "MainThread"), (99, "MainThread"), (100, "encode")]


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
