"""What other threads want of the engine, kept until its next step."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from prefixgate.worker.cache_control import CacheControl
from prefixgate.worker.request import Request

MAX_QUESTIONS = 64
"""Questions of one tenant that may wait for an answer."""


class Cancellation(NamedTuple):
    """A call, or one output of it, that is no longer wanted."""

    request: Request
    output: int | None = None
    """None is the whole call."""


class Commands(NamedTuple):
    """All that came since the last step, each kind in order of arrival."""

    submits: list[Request]
    cancels: list[Cancellation]
    """To be followed after the submits, which they may mean."""


class Question(NamedTuple):
    """Work on the cache for one tenant, which must be done where the cache lives."""

    tenant: str
    work: Callable[[CacheControl], Any]
    answer: "Future[Any]"
    """Gets what the work returns or raises. Cancelled by an asker who no longer waits: the work is not done then."""
    changes: bool = False
    """Whether the work changes the cache, which is anyone's guess where it fails halfway."""


class InboxClosedError(Exception):
    """The engine takes nothing more."""


class InboxFullError(Exception):
    """Too many questions of a tenant wait."""


class Inbox:
    """The only thing that the engine's thread shares with others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._submits: list[Request] = []
        self._by_tenant: Counter[str] = Counter()
        self._cancels: list[Cancellation] = []
        self._questions: dict[str, deque[Question]] = {}
        """By tenant, the one whose turn is next first."""
        self._closed = False

    @property
    def num_submits(self) -> int:
        """Calls that no step has seen yet."""
        return len(self._submits)

    def num_submits_of(self, tenant: str) -> int:
        """Calls of a tenant that no step has seen yet."""
        return self._by_tenant[tenant]

    @property
    def is_wanted(self) -> bool:
        """Whether anything is there, or the inbox is closed."""
        return bool(self._submits or self._cancels or self._questions or self._closed)

    def submit(self, request: Request) -> None:
        """Leave a call. Raises InboxClosedError."""
        with self._changed:
            if self._closed:
                raise InboxClosedError
            self._submits.append(request)
            self._by_tenant[request.scope.tenant] += 1
            self._changed.notify()

    def cancel(self, cancellation: Cancellation) -> None:
        """Leave a cancellation; of no effect once the inbox is closed, as every call has ended then."""
        with self._changed:
            if not self._closed:
                self._cancels.append(cancellation)
                self._changed.notify()

    def ask(self, question: Question) -> None:
        """Leave a question. Raises InboxClosedError, and InboxFullError where too many of its tenant wait."""
        with self._changed:
            if self._closed:
                raise InboxClosedError
            line = self._questions.get(question.tenant, deque())
            if len(line) >= MAX_QUESTIONS:
                raise InboxFullError
            line.append(question)
            self._questions[question.tenant] = line
            self._changed.notify()

    def close(self) -> None:
        """Refuse whatever comes from now on, and wake the waiting thread. What was left before can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self) -> Commands:
        """Take everything without waiting."""
        with self._changed:
            commands = Commands(self._submits, self._cancels)
            self._submits, self._cancels, self._by_tenant = [], [], Counter()
            return commands

    def take_question(self) -> Question | None:
        """Take the question that has waited longest, of one tenant after the other; None where there is none."""
        with self._changed:
            if not self._questions:
                return None
            tenant = next(iter(self._questions))
            line = self._questions.pop(tenant)
            question = line.popleft()
            if line:  # behind the other tenants
                self._questions[tenant] = line
            return question

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until something is there or the inbox is closed; False after ``timeout`` seconds without either."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_wanted, timeout)
