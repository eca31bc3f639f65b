"""The news of a step reach their sinks, each called once."""

from collections.abc import Sequence

from grpc import StatusCode

from prefixgate.cache.hashing import CacheScope
from prefixgate.worker.outbox import News, Outbox
from prefixgate.worker.request import End, Request, SamplingParams


class Sink:
    def __init__(self, *, broken: bool = False) -> None:
        self.batches: list[tuple[int, list[News]]] = []
        self.broken = broken

    def deliver(self, step: int, news: Sequence[News]) -> None:
        self.batches.append((step, list(news)))
        if self.broken:
            raise RuntimeError("the loop is closed")

    def request(self) -> Request:
        return Request([1], CacheScope("acme", "m"), SamplingParams(1), self)


def test_each_sink_is_called_once_a_step_with_all_of_its_calls() -> None:
    outbox, left, right = Outbox(), Sink(), Sink()
    calls = [left.request(), right.request(), left.request()]
    for call in calls:
        outbox.of(call).token_ids[0] = [7]
    outbox.of(calls[0]).end = End(StatusCode.OK)
    outbox.deliver(5)
    outbox.deliver(6)
    assert [(step, [news.request for news in batch]) for step, batch in left.batches] == [(5, [calls[0], calls[2]])]
    assert [(step, [news.request for news in batch]) for step, batch in right.batches] == [(5, [calls[1]])]
    assert left.batches[0][1][0].end == End(StatusCode.OK)


def test_a_sink_that_fails_keeps_no_other_from_hearing() -> None:
    outbox, broken, whole = Outbox(), Sink(broken=True), Sink()
    lost = broken.request()
    outbox.of(lost)
    outbox.of(whole.request())
    assert outbox.deliver(1) == [lost]
    assert len(broken.batches) == len(whole.batches) == 1
