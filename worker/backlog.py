"""What a gateway has not been told yet."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prefixgate.proto import worker_pb2
from prefixgate.worker.logprobs import TokenLogprob
from prefixgate.worker.outbox import News
from prefixgate.worker.request import End
from prefixgate.worker.wire import add_news, write_end

MAX_MESSAGE_LOGPROBS = 1 << 20
"""Log-probabilities after which the next message begins: about 15 bytes each, so that with those of one more step it
stays well below the largest message."""


@dataclass(slots=True)
class _Part:
    """A message as it gathers."""

    message: worker_pb2.StepMessage
    events: dict[int, worker_pb2.CallEvent] = field(default_factory=dict)
    """Of its calls, by id."""
    num_logprobs: int = 0


class Backlog:
    """The next messages down a session's stream, as they gather.

    A gateway that reads slowly gets the news of several steps in one message: at most one event for each call, so that
    what is kept for it is bounded by its calls and their tokens, not by the number of steps. Only log-probabilities
    can make that too much for one message.
    """

    def __init__(self) -> None:
        self._parts = deque([_Part(worker_pb2.StepMessage())])

    def __contains__(self, call_id: int) -> bool:
        return any(call_id in part.events for part in self._parts)

    def __len__(self) -> int:
        """Events that gathered."""
        return sum(len(part.message.events) for part in self._parts)

    def add(self, step: int, news: Sequence[News]) -> None:
        """Gather the news of a step."""
        if self._parts[-1].num_logprobs >= MAX_MESSAGE_LOGPROBS:
            self._parts.append(_Part(worker_pb2.StepMessage()))
        part = self._parts[-1]
        part.message.step = step
        for item in news:
            add_news(self._event(item.request.call_id), item)
            for logprobs in (item.prompt_logprobs, *item.logprobs.values()):
                part.num_logprobs += _count(logprobs)

    def refuse(self, call_id: int, end: End) -> None:
        """Gather the end of a call that never began."""
        write_end(self._event(call_id), end)

    def refuse_duplicate(self, call_id: int, end: End) -> None:
        """Gather the end of a second call of a live one's name, apart from the news of the first."""
        write_end(self._parts[-1].message.events.add(call_id=call_id), end)

    def take(self) -> worker_pb2.StepMessage:
        """Take the first message of what gathered, to be sent."""
        message = self._parts.popleft().message
        if not self._parts:
            self._parts.append(_Part(worker_pb2.StepMessage(step=message.step)))
        return message

    def _event(self, call_id: int) -> worker_pb2.CallEvent:
        part = self._parts[-1]
        event = part.events.get(call_id)
        if event is None:
            event = part.events[call_id] = part.message.events.add(call_id=call_id)
        return event


def _count(logprobs: Iterable[TokenLogprob]) -> int:
    return sum(1 + len(found.top) for found in logprobs)
