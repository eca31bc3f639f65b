"""One worker of the fleet, as this gateway sees it: what it has in hand there, and whether it may get more."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefixgate.gateway.candidate import Candidate, Choice
from prefixgate.gateway.circuit_breaker import CircuitBreaker
from prefixgate.gateway.pending_prompts import PendingPrompts
from prefixgate.gateway.worker_client import Connection, WorkerClient
from prefixgate.gateway.worker_events import WorkerEvents
from prefixgate.proto import generation_pb2


class Placement:
    """A call's place at a worker, for as long as it lasts."""

    def __init__(self, member: "Member", connection: Connection, choice: Choice, pending_tokens: int) -> None:
        self.worker = member.address
        self.choice = choice
        self.connection = connection
        self._member = member
        self._is_answered = False
        self._prompt = member.pending.add(pending_tokens, time.monotonic())

    def answered(self) -> None:
        """Note that the worker has begun to answer: the prompt is computed, and the worker is well. Idempotent."""
        if not self._is_answered:
            self._is_answered = True
            self._member.circuit.succeed()
        self.settle()

    def ended(self, usage: generation_pb2.Usage) -> None:
        """Note that the worker ended the call well, and what it cost."""
        computed = usage.prompt_tokens - usage.cached_tokens
        self._member.observe(computed, usage.first_token_seconds - usage.queue_seconds)

    def failed(self) -> None:
        """Note that the call failed by the worker's fault."""
        # A worker that went away is another one when it comes back, and one that hangs is left alone until it answers.
        is_there = self.connection.session.is_open and self._member.client.is_responsive
        if is_there and self._member.circuit.fail():
            self._member.num_ejections += 1

    def settle(self) -> None:
        """Note that its prompt is no load any more. Idempotent."""
        self._member.pending.remove(self._prompt, time.monotonic())


class Member:
    """What is kept of a worker beside the connection to it. Totals count from when it joined."""

    def __init__(
        self,
        client: WorkerClient,
        events: WorkerEvents,
        observe: Callable[[int, float], None],
        on_idle: Callable[[], None],
    ) -> None:
        """``observe`` is told the tokens that a call's prompt took, and the time; ``on_idle`` when no call is left."""
        self.client = client
        self.events = events
        self.observe = observe
        self._on_idle = on_idle
        self.circuit = CircuitBreaker()
        self._connection: Connection | None = None
        """The one that the circuit is of."""
        self._was_responsive = True
        self.is_leaving = False
        """Whether it is no longer named: its calls end there, and no new ones come."""
        self.num_calls = 0
        """Calls in its hands."""
        self.pending = PendingPrompts()
        """Those of them that wait for their first tokens."""
        self.num_placed = 0
        self.num_retried = 0
        """Of those placed, calls that had failed at another worker."""
        self.num_ejections = 0

    @property
    def address(self) -> str:
        return self.client.address

    @property
    def is_open(self) -> bool:
        """Whether calls can be sent to it at all."""
        return self.client.is_ready and not (self.is_leaving or self.events.load.draining)

    @property
    def is_well(self) -> bool:
        """Whether there is no reason to prefer others."""
        return self.is_open and self.client.is_responsive and self.circuit.allows

    def renew(self) -> None:
        """Take note of what has changed at the connection.

        What was learned of a worker is forgotten where another life of it is connected now.
        """
        was_responsive, self._was_responsive = self._was_responsive, self.client.is_responsive
        self.num_ejections += was_responsive and not self._was_responsive
        if self.client.is_ready and self.client.connection is not self._connection:
            self._connection, self.circuit = self.client.connection, CircuitBreaker()

    def candidate(self) -> Candidate:
        """Stand for election."""
        load = self.events.load
        # What it says of all gateways' calls is a moment old; what this one has sent it since is not in it.
        return Candidate(self.address, max(self.num_calls, load.running + load.waiting), self.pending)

    @contextmanager
    def place(self, choice: Choice, pending_tokens: int, *, is_retry: bool) -> Iterator[Placement]:
        """Hold a place for a call that has so many tokens of its prompt to be computed here.

        Every exit gives it back. Raises NoWorkerError.
        """
        connection = self.client.connection
        placement = Placement(self, connection, choice, pending_tokens)
        self.num_placed += 1
        self.num_retried += is_retry
        self.num_calls += 1
        is_trial = self.circuit.begin()
        try:
            yield placement
        finally:
            self.num_calls -= 1
            placement.settle()
            if is_trial:
                self.circuit.end()
            if not self.num_calls:
                self._on_idle()
