"""What gathers for a gateway until it can be sent."""

from collections.abc import Sequence

from grpc import StatusCode

from prefixgate.cache.hashing import CacheScope
from prefixgate.proto import generation_pb2
from prefixgate.proto.transport import MAX_MESSAGE_BYTES
from prefixgate.worker.backlog import Backlog
from prefixgate.worker.logprobs import TokenLogprob
from prefixgate.worker.outbox import News
from prefixgate.worker.request import End, Request, SamplingParams
from prefixgate.worker.sequence import FinishReason


class Silence:
    def deliver(self, step: int, news: Sequence[News]) -> None:
        """Hear nothing."""


def request(call_id: int, n: int = 2) -> Request:
    return Request([1, 2, 3], CacheScope("acme", "m"), SamplingParams(9), Silence(), call_id=call_id, n=n)


def test_steps_that_gather_become_one_event_a_call_with_tokens_in_order() -> None:
    backlog, first, second = Backlog(), request(1), request(2)
    backlog.add(3, [News(first, {0: [10], 1: [20]}), News(second, {0: [30]})])
    backlog.add(4, [News(first, {0: [11], 1: [21]}, {1: FinishReason.STOP})])
    first.usage.completion_tokens = 5
    backlog.add(5, [News(first, {0: [12]}, {0: FinishReason.LENGTH}, End(StatusCode.OK))])
    assert len(backlog) == 2
    message = backlog.take()
    assert message.step == 5
    event = message.events[0]
    assert [(output.index, list(output.token_ids)) for output in event.outputs] == [(0, [10, 11, 12]), (1, [20, 21])]
    assert [output.finish_reason for output in event.outputs] == [
        generation_pb2.FINISH_REASON_LENGTH,
        generation_pb2.FINISH_REASON_STOP,
    ]
    assert event.HasField("end")
    assert (event.end.code, event.end.usage.completion_tokens) == (0, 5)
    assert not message.events[1].HasField("end")


def test_what_was_taken_is_not_told_again() -> None:
    backlog, call = Backlog(), request(1)
    backlog.add(1, [News(call, {0: [10]})])
    assert 1 in backlog
    backlog.take()
    assert 1 not in backlog
    assert len(backlog) == 0
    backlog.add(2, [News(call, {0: [11]})])
    assert list(backlog.take().events[0].outputs[0].token_ids) == [11]


def test_the_end_of_a_second_call_of_a_name_stands_apart_from_the_firsts_news() -> None:
    backlog, call = Backlog(), request(1)
    backlog.add(1, [News(call, {0: [10]})])
    backlog.refuse_duplicate(1, End(StatusCode.ALREADY_EXISTS, "call_id: 1 is in use on this stream"))
    backlog.add(2, [News(call, {0: [11]})])
    first, second = backlog.take().events
    assert (list(first.outputs[0].token_ids), first.HasField("end")) == ([10, 11], False)
    assert (len(second.outputs), second.end.code) == (0, StatusCode.ALREADY_EXISTS.value[0])


def test_log_probabilities_that_gather_are_sent_in_messages_of_bounded_size() -> None:
    backlog, call, other = Backlog(), request(1), request(2)
    found = TokenLogprob(2**18, -1.5, 2**18, tuple((2**18, -1.5) for _ in range(20)))
    for step in range(110):
        backlog.add(step, [News(call, prompt_logprobs=[found] * 512)])
    backlog.add(110, [News(call, {0: [10]}, logprobs={0: [found]}), News(other, {0: [20]})])
    assert 1 in backlog
    assert 2 in backlog
    messages = []
    while len(backlog):
        messages.append(backlog.take())
    assert [len(message.events) for message in messages] == [1, 2]
    assert [message.step for message in messages] == [97, 110]
    assert sum(len(message.events[0].prompt_logprobs) for message in messages) == 110 * 512
    assert max(message.ByteSize() for message in messages) < MAX_MESSAGE_BYTES / 2
    assert list(messages[1].events[0].outputs[0].token_ids) == [10]
    assert 1 not in backlog
