"""What a gateway has not been told yet."""

from collections.abc import Sequence

from prefixgate.proto import worker_pb2
from prefixgate.worker.outbox import News
from prefixgate.worker.request import End
from prefixgate.worker.wire import add_news, write_end


class Backlog:
    """The next message down a session's stream, as it gathers.

    A gateway that reads slowly gets the news of several steps in one message: at most one event for each call, so that
    what is kept for it is bounded by its calls and their tokens, not by the number of steps.
    """

    def __init__(self) -> None:
        self._message = worker_pb2.StepMessage()
        self._events: dict[int, worker_pb2.CallEvent] = {}

    def __contains__(self, call_id: int) -> bool:
        return call_id in self._events

    def __len__(self) -> int:
        """Events that gathered."""
        return len(self._message.events)

    def add(self, step: int, news: Sequence[News]) -> None:
        """Gather the news of a step."""
        self._message.step = step
        for item in news:
            add_news(self._event(item.request.call_id), item)

    def refuse(self, call_id: int, end: End) -> None:
        """Gather the end of a call that never began."""
        write_end(self._event(call_id), end)

    def refuse_duplicate(self, call_id: int, end: End) -> None:
        """Gather the end of a second call of a live one's name, apart from the news of the first."""
        write_end(self._message.events.add(call_id=call_id), end)

    def take(self) -> worker_pb2.StepMessage:
        """Take what gathered, to be sent."""
        message, self._message = self._message, worker_pb2.StepMessage(step=self._message.step)
        self._events.clear()
        return message

    def _event(self, call_id: int) -> worker_pb2.CallEvent:
        event = self._events.get(call_id)
        if event is None:
            event = self._events[call_id] = self._message.events.add(call_id=call_id)
        return event
