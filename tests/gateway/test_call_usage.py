"""What was forecast of a prompt counts beside what came of it: once for each call, all of it or none."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixgate.proto import gateway_pb2, generation_pb2
from tests.gateway.fake_worker import LENGTH
from tests.gateway.rig import Rig, prompt, rig, run

# The sample tokenizer makes a token of each letter: two blocks and a bit.
TEXT = "a" * 40
STEPS = ("queried", "reusable", "predicted", "delivered")


async def counts(r: Rig) -> list[float]:
    return [await r.metric(f'prefixgate_gateway_{step}_tokens_total{{tenant="local"}}') for step in STEPS]


async def serve(r: Rig, *, cached: int, **fields: Any) -> int:
    """Have a call answered; returns the length of its prompt."""
    pending = r.stub.Complete(prompt(TEXT, **fields))
    call = await r.next_call()
    length = len(call.submit.token_ids)
    await call.send((0, [64], LENGTH))
    await call.end(prompt_tokens=length, cached_tokens=cached, completion_tokens=1)
    await pending
    return length


def test_each_step_is_counted_once_for_a_call() -> None:
    async def test() -> None:
        async with rig() as r:
            length = await serve(r, cached=0)
            assert length > 32
            assert await counts(r) == [length, 0, 0, 0]
            # The prompt's whole blocks are expected at its worker; a part of a block comes as well.
            await serve(r, cached=length - 1)
            blocks = length // 16 * 16
            assert await counts(r) == [2 * length, blocks, blocks, length - 1]

    run(test())


@pytest.mark.parametrize(
    "fields",
    [
        {"cache": generation_pb2.CacheControl(mode=generation_pb2.CACHE_MODE_BYPASS)},
        {"sampling": generation_pb2.SamplingParams(prompt_logprobs=0)},
    ],
    ids=["bypass", "prompt_logprobs"],
)
def test_a_call_that_does_not_read_the_cache_looks_nothing_up(fields: dict[str, Any]) -> None:
    async def test() -> None:
        async with rig() as r:
            length = await serve(r, cached=0)
            await serve(r, cached=0, **fields)
            assert await counts(r) == [length, 0, 0, 0]

    run(test())


@pytest.mark.parametrize("answered", [False, True], ids=["before its first token", "after its first token"])
def test_a_call_that_fails_counts_from_its_first_token_on(answered: bool) -> None:
    async def test() -> None:
        async with rig() as r:
            length = await serve(r, cached=0)
            pending = r.stub.Complete(prompt("b" * 40))
            call = await r.next_call()
            if answered:
                await call.send((0, [64]))
            await call.end(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                prompt_tokens=length,
                cached_tokens=3,
                completion_tokens=int(answered),
            )
            with pytest.raises(grpc.aio.AioRpcError):
                await pending
            assert await counts(r) == ([2 * length, 0, 0, 3] if answered else [length, 0, 0, 0])

    run(test())


def test_a_call_that_its_client_cancels_counts_in_no_step() -> None:
    async def test() -> None:
        async with rig() as r:
            length = await serve(r, cached=0)
            pending = r.stub.Generate(prompt("b" * 40))
            call = await r.next_call()
            await call.send((0, [64]))
            await pending.read()
            pending.cancel()
            await call.cancels.get()
            assert await counts(r) == [length, 0, 0, 0]

    run(test())


def test_a_prompt_that_is_warmed_counts_like_a_call() -> None:
    async def test() -> None:
        async with rig() as r:
            pending = asyncio.ensure_future(_drain(r.stub.Warm(gateway_pb2.WarmRequest(prompt=TEXT))))
            call = await r.next_call()
            length = len(call.submit.token_ids)
            await call.end(prompt_tokens=length, cached_tokens=0)
            await pending
            assert await counts(r) == [length, 0, 0, 0]

    run(test())


async def _drain(responses: Any) -> None:
    async for _ in responses:
        pass
