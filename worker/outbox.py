"""What one step has to tell, collected so that each receiver is called once for a step and not for each token."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prefixgate.worker.logprobs import TokenLogprob
from prefixgate.worker.request import End, Request
from prefixgate.worker.sequence import FinishReason

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class News:
    """What one call gained in one step."""

    request: Request
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    """New tokens by output."""
    finished: dict[int, FinishReason] = field(default_factory=dict)
    """Outputs that ended, by index."""
    end: End | None = None
    """Set in a call's last news. Its blocks are free by then and its usage is final."""
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """Those of the new tokens, one for each, where the call asked for them."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Those of the prompt's next tokens, from its second one on."""
    has_prefilled: bool = False
    """Whether more of the prompt is computed, of a call that only computes that."""


class Sink(Protocol):
    """Receives the news of its calls, on the engine's thread: it must hand them on and return."""

    def deliver(self, step: int, news: Sequence[News]) -> None:
        """Take the news of one step, at most one of each call."""


class Outbox:
    """The news of the step that runs."""

    def __init__(self) -> None:
        self._news: dict[Request, News] = {}

    def of(self, request: Request) -> News:
        """Return what is collected for a call, to be added to."""
        news = self._news.get(request)
        if news is None:
            news = self._news[request] = News(request)
        return news

    def deliver(self, step: int) -> list[Request]:
        """Hand all news to their sinks, one call of each. A sink that fails hurts no other.

        Returns the calls whose sinks failed: nobody hears what becomes of them.
        """
        lost: list[Request] = []
        by_sink: dict[Sink, list[News]] = {}
        for news in self._news.values():
            by_sink.setdefault(news.request.sink, []).append(news)
        self._news.clear()
        for sink, batch in by_sink.items():
            try:
                sink.deliver(step, batch)
            except Exception:
                logger.exception("A receiver of step %d failed; its %d calls end", step, len(batch))
                lost += [news.request for news in batch]
        return lost
