"""What is asked of the cache from other threads, answered where the cache lives: on the engine's, between two steps."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from grpc import StatusCode

from prefixgate.worker.cache_control import CacheControl
from prefixgate.worker.inbox import MAX_QUESTIONS, Inbox, InboxClosedError, InboxFullError, Question
from prefixgate.worker.request import End, RefusedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ANSWERS = 8
"""Questions answered before one step, in which nobody computes."""
MAX_SECONDS = 0.002
"""Time after which no further one is begun: looking one prompt up takes from microseconds to ten milliseconds, by its
length."""


class Questions:
    """Takes questions from any thread, and answers them on the engine's."""

    def __init__(self, inbox: Inbox, control: CacheControl, clock: Callable[[], float]) -> None:
        self._inbox = inbox
        self._control = control
        self._clock = clock

    def ask(self, tenant: str, work: Callable[[CacheControl], T], *, changes: bool = False) -> "Future[T]":
        """Have work on the cache done for a tenant before one of the next steps, in order of its arrival.

        Tenants take turns, so that one who asks much delays the others by a few of these at most.

        ``changes`` says that the work may change the cache: what it raises but RefusedError then ends the engine.

        The future brings what the work returns or raises, and RefusedError where the engine ends first. Cancelling it
        before its turn takes the question back. Raises RefusedError where too many of the tenant's wait.
        """
        answer: Future[T] = Future()
        try:
            self._inbox.ask(Question(tenant, work, answer, changes))
        except InboxClosedError:
            raise RefusedError(StatusCode.UNAVAILABLE, "the worker is shutting down; try again later") from None
        except InboxFullError:
            raise RefusedError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{MAX_QUESTIONS} cache control calls of the tenant wait at this worker, the most that may; try again",
                1.0,
            ) from None
        return answer

    # On the engine's thread

    def answer(self) -> None:
        """Answer the next few. Raises what work that changes the cache raises, but for RefusedError.

        Who asks must not hurt who computes, but nobody can compute on a cache that was changed halfway.
        """
        began = self._clock()
        for _ in range(MAX_ANSWERS):
            question = self._inbox.take_question()
            if question is None:
                return
            self._follow(question)
            if self._clock() - began >= MAX_SECONDS:
                return

    def refuse_all(self, end: End) -> None:
        """Refuse those that are left. To be called once the inbox is closed."""
        while (question := self._inbox.take_question()) is not None:
            if question.answer.set_running_or_notify_cancel():
                question.answer.set_exception(RefusedError(*end))

    def _follow(self, question: Question) -> None:
        if not question.answer.set_running_or_notify_cancel():
            return
        try:
            answer = question.work(self._control)
        except RefusedError as error:
            question.answer.set_exception(error)
        except Exception as error:
            logger.exception("A question of tenant %r could not be answered", question.tenant)
            question.answer.set_exception(error)
            if question.changes:
                raise
        else:
            question.answer.set_result(answer)
