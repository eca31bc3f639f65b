"""A reader that is slower than its generation: nothing is lost, nothing is kept twice, and nobody else is held up."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator, Sequence

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.gateway.errors import CallError
from prefixgate.gateway.outflow import MAX_WAITING_TOKENS, Outflow, merged
from prefixgate.proto import gateway_pb2, generation_pb2
from tests.gateway.fake_worker import LENGTH, STOP
from tests.gateway.rig import collect, ids_of, prompt, rig, run, text_of

Response = gateway_pb2.GenerateResponse
COMPLETION = Response(completion=gateway_pb2.Completion(request_id="x"))


def delta(index: int = 0, text: str = "a", ids: Sequence[int] = (64,), **fields: int) -> gateway_pb2.OutputDelta:
    logprobs = [generation_pb2.TokenLogprob(token_id=token_id, logprob=-1) for token_id in ids]
    made = gateway_pb2.OutputDelta(index=index, text=text, token_ids=ids, logprobs=logprobs)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def said(messages: Sequence[Response]) -> list[tuple[str, list[int], list[int], int, str]]:
    """Put together what three outputs were told."""
    outputs: list[tuple[str, list[int], list[int], int, str]] = []
    for index in range(3):
        deltas = [delta for message in messages for delta in message.deltas if delta.index == index]
        outputs.append(
            (
                "".join(delta.text for delta in deltas),
                [token_id for delta in deltas for token_id in delta.token_ids],
                [found.token_id for delta in deltas for found in delta.logprobs],
                sum(delta.finish_reason for delta in deltas),
                "".join(delta.matched_stop for delta in deltas),
            )
        )
    return outputs


DELTAS = st.builds(delta, st.integers(0, 2), st.text(max_size=3), st.lists(st.integers(0, 300), max_size=3))
MESSAGES = st.lists(
    st.builds(
        lambda deltas, ids: Response(
            deltas={each.index: each for each in deltas}.values(),
            prompt_logprobs=[generation_pb2.TokenLogprob(token_id=i) for i in ids],
        ),
        st.lists(DELTAS, max_size=3),
        st.lists(st.integers(0, 300), max_size=2),
    ),
    max_size=8,
)


@given(MESSAGES, st.booleans())
def test_merged_messages_say_what_they_said_apart(messages: list[Response], ends: bool) -> None:
    messages = [*messages, COMPLETION] if ends else messages
    whole = list(merged(messages))
    assert said(whole) == said(messages)
    prompts = [[found.token_id for message in some for found in message.prompt_logprobs] for some in (whole, messages)]
    assert prompts[0] == prompts[1]
    assert [message.HasField("completion") for message in whole] in ([], [False], [True], [False, True])
    assert bool(ends) == (whole[-1:] == [COMPLETION])
    assert all(len({each.index for each in message.deltas}) == len(message.deltas) for message in whole)


def test_what_ended_an_output_is_kept() -> None:
    end = delta(1, "b", (65,), finish_reason=STOP)
    end.matched_stop = "c"
    (whole,) = merged([Response(deltas=[delta(0), delta(1)]), Response(deltas=[end])])
    assert said([whole]) == [("a", [64], [64], 0, ""), ("ab", [64, 65], [64, 65], STOP, "c"), ("", [], [], 0, "")]


class Reader:
    """A client that reads when it is let."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.messages: list[Response] = []
        self.is_asked = asyncio.Event()

    async def write(self, message: Response) -> None:
        self.is_asked.set()
        await self.may_read.wait()
        self.messages.append(message)


def test_a_generation_goes_on_while_its_reader_rests_up_to_the_bound() -> None:
    async def test() -> None:
        reader, made, rests = Reader(), 0, asyncio.Event()

        async def generation() -> AsyncGenerator[Response, None]:
            nonlocal made
            for number in range(3 * MAX_WAITING_TOKENS):
                made += 1
                if made == MAX_WAITING_TOKENS + 1:
                    rests.set()
                yield Response(deltas=[delta(ids=(number % 300,))])
                if number == 0:
                    await reader.is_asked.wait()
            yield COMPLETION

        running = asyncio.create_task(Outflow(generation()).run(reader.write))
        await rests.wait()
        # One token is being written, and the rest of what was made waits. Nothing but the reader moves it now.
        for _ in range(10):
            await asyncio.sleep(0)
        assert made == MAX_WAITING_TOKENS + 1
        reader.may_read.set()
        await running
        assert ids_of(reader.messages) == [number % 300 for number in range(3 * MAX_WAITING_TOKENS)]
        assert reader.messages[-1] == COMPLETION
        assert len(reader.messages) < 100

    run(test())


def test_a_failure_comes_after_all_that_came_before_it() -> None:
    async def test() -> None:
        reader = Reader()

        async def generation() -> AsyncGenerator[Response, None]:
            for _ in range(3):
                yield Response(deltas=[delta()])
            raise CallError(grpc.StatusCode.UNAVAILABLE, "the worker went away")

        running = asyncio.create_task(Outflow(generation()).run(reader.write))
        await reader.is_asked.wait()
        reader.may_read.set()
        with pytest.raises(CallError, match="went away"):
            await running
        assert text_of(reader.messages) == "aaa"

    run(test())


@pytest.mark.parametrize("reads", [True, False])
def test_a_call_that_is_given_up_is_closed_before_its_end(reads: bool) -> None:
    async def test() -> None:
        reader, closed = Reader(), False

        async def generation() -> AsyncGenerator[Response, None]:
            nonlocal closed
            try:
                yield Response(deltas=[delta()])
                await asyncio.Event().wait()
            finally:
                closed = True

        if reads:
            reader.may_read.set()
        running = asyncio.create_task(Outflow(generation()).run(reader.write))
        await reader.is_asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert closed

    run(test())


def test_a_client_that_is_gone_ends_its_generation() -> None:
    async def test() -> None:
        closed = False

        async def generation() -> AsyncGenerator[Response, None]:
            nonlocal closed
            try:
                while True:
                    yield Response(deltas=[delta()])
                    await asyncio.sleep(0)
            finally:
                closed = True

        async def write(_: Response) -> None:
            raise grpc.aio.InternalError("nothing can be sent")

        with pytest.raises(grpc.aio.InternalError):
            await Outflow(generation()).run(write)
        assert closed

    run(test())


def test_a_failure_behind_a_client_that_is_gone_is_no_news() -> None:
    async def test() -> None:
        async def generation() -> AsyncGenerator[Response, None]:
            yield Response(deltas=[delta()])
            raise CallError(grpc.StatusCode.UNAVAILABLE, "the worker went away")

        async def write(_: Response) -> None:
            raise grpc.aio.InternalError("nothing can be sent")

        complaints: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        # Not with pytest.raises, which would keep the frames, and with them the task that asyncio looks at in the end.
        with contextlib.suppress(grpc.aio.InternalError):
            await Outflow(generation()).run(write)
        gc.collect()
        assert complaints == []

    run(test())


def test_a_client_that_stops_reading_holds_up_nobody_and_its_stop_string_counts_when_it_is_generated() -> None:
    """Over a real connection: what it can hold is full long before the answer is whole."""
    steps, many = 40, 200_000

    async def test() -> None:
        async with rig() as r:
            slow = r.stub.Generate(prompt("slow", n=2, stop=["b"]))
            call = await r.next_call()
            for _ in range(steps):
                await call.send((0, [64]), (1, [64]))
            # The stop string of the second output. Nothing of what comes before it has been read.
            await call.send((1, [65]))
            assert (await call.cancels.get()).output == 1
            for _ in range(many // 1000):
                await call.send((0, [64] * 1000))
            quick = r.stub.Complete(prompt("quick"))
            await (await r.next_call()).finish([64])
            assert (await quick).outputs[0].text == "a"
            await call.send((0, [66], LENGTH), (1, [], STOP))
            await call.end()
            messages = await collect(slow)
            assert text_of(messages) == "a" * (steps + many) + "c"
            assert text_of(messages, 1) == "a" * steps
            assert messages[-1].HasField("completion")

    run(test())
