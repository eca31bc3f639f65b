"""The receiving end of a call: nothing lost, one end, and one event in memory however slow the reader."""

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.gateway.worker_call import WorkerCall
from prefixgate.proto import generation_pb2, worker_pb2
from tests.counts import scaled
from tests.gateway.rig import run

LENGTH = generation_pb2.FINISH_REASON_LENGTH


def make_call() -> tuple[WorkerCall, list[worker_pb2.Cancel]]:
    cancels: list[worker_pb2.Cancel] = []
    return WorkerCall(7, cancels.append), cancels


def tokens(index: int, *ids: int, finish: bool = False) -> worker_pb2.CallEvent:
    output = worker_pb2.OutputTokens(index=index, token_ids=ids, finish_reason=LENGTH if finish else None)
    return worker_pb2.CallEvent(call_id=7, outputs=[output])


def end(code: int = 0) -> worker_pb2.CallEvent:
    return worker_pb2.CallEvent(call_id=7, end=worker_pb2.CallEnd(code=code))


@settings(max_examples=scaled(2000), deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=20))
def test_a_reader_gets_every_token_once_and_in_order(steps: list[tuple[int, bool]]) -> None:
    """Each step brings one token to one output; the reader takes what there is after some of them."""

    async def test() -> None:
        call, _ = make_call()
        sent: dict[int, list[int]] = {}
        got: dict[int, list[int]] = {}
        events = []
        for token_id, (index, reads) in enumerate(steps):
            sent.setdefault(index, []).append(token_id)
            call.deliver(tokens(index, token_id))
            if reads:
                events.append(await call.receive())
        call.deliver(end())
        events.append(await call.receive())
        for event in events:
            assert len({output.index for output in event.outputs}) == len(event.outputs)
            for output in event.outputs:
                got.setdefault(output.index, []).extend(output.token_ids)
        assert got == sent
        assert [event.HasField("end") for event in events] == [False] * (len(events) - 1) + [True]

    run(test())


def test_a_reader_that_never_reads_costs_one_event() -> None:
    async def test() -> None:
        call, _ = make_call()
        for token_id in range(1000):
            call.deliver(tokens(0, token_id))
        call.deliver(tokens(0, 1000, finish=True))
        call.deliver(end())
        event = await call.receive()
        assert [list(output.token_ids) for output in event.outputs] == [list(range(1001))]
        assert event.outputs[0].finish_reason == LENGTH
        assert event.HasField("end")

    run(test())


def test_the_first_end_is_the_only_one() -> None:
    async def test() -> None:
        call, cancels = make_call()
        call.deliver(end(code=14))
        call.deliver(end(code=0))
        call.deliver(tokens(0, 1))
        event = await call.receive()
        assert (event.end.code, len(event.outputs)) == (14, 0)
        call.cancel_output(0)
        call.close()
        assert cancels == []

    run(test())


def test_closing_cancels_once() -> None:
    async def test() -> None:
        call, cancels = make_call()
        call.cancel_output(1)
        call.close()
        call.close()
        call.cancel_output(0)
        assert cancels == [worker_pb2.Cancel(call_id=7, output=1), worker_pb2.Cancel(call_id=7)]

    run(test())


def test_log_probabilities_of_the_prompt_are_gathered_and_told_once() -> None:
    async def test() -> None:
        call, _ = make_call()
        for token_id in range(3):
            found = generation_pb2.TokenLogprob(token_id=token_id)
            call.deliver(worker_pb2.CallEvent(call_id=7, prompt_logprobs=[found]))
        assert [found.token_id for found in (await call.receive()).prompt_logprobs] == [0, 1, 2]
        call.deliver(end())
        assert not (await call.receive()).prompt_logprobs

    run(test())
