"""The calls that wait for admission, in order within each tenant."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prefixgate.worker.request import Request


class Line(NamedTuple):
    """What a tenant has waiting."""

    calls: int
    """Calls that were never admitted."""
    first_received_at: float
    """When the one came whose turn it is."""


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


class _Ranks:
    """Calls by tenant, each tenant's sorted by rank."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, list[Request]] = {}

    def add(self, request: Request) -> None:
        insort(self.by_tenant.setdefault(request.scope.tenant, []), request, key=_rank)

    def remove(self, request: Request) -> None:
        calls = self.by_tenant[request.scope.tenant]
        del calls[bisect_left(calls, request.rank, key=_rank)]
        if not calls:
            del self.by_tenant[request.scope.tenant]


class WaitingCalls:
    """Own no blocks: what they would hit is looked up at admission.

    A call that is set aside is still waiting, but is passed over until it is put back. New calls are those that were
    never admitted: they can be refused, while one that was preempted has begun to answer.
    """

    def __init__(self) -> None:
        self._calls: dict[Request, None] = {}
        self._in_line = _Ranks()
        self._new = _Ranks()
        self._aside: set[Request] = set()
        self.num_new = 0
        self.num_sequences = 0
        """Outputs that the calls ask for."""

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._calls)

    def __contains__(self, request: Request) -> bool:
        return request in self._calls

    def add(self, request: Request) -> None:
        """Put a call into its place."""
        self._calls[request] = None
        self._in_line.add(request)
        self.num_sequences += request.num_unfinished
        if not request.preemptions:
            self._new.add(request)
            self.num_new += 1

    def remove(self, request: Request) -> None:
        """Take a call out, wherever it stands."""
        del self._calls[request]
        self.num_sequences -= request.num_unfinished
        if not request.preemptions:
            self._new.remove(request)
            self.num_new -= 1
        if request in self._aside:
            self._aside.remove(request)
        else:
            self._in_line.remove(request)

    def set_aside(self, request: Request) -> None:
        """Pass a call over until it is put back."""
        self._in_line.remove(request)
        self._aside.add(request)

    def put_back(self, request: Request) -> None:
        """Let a call that was set aside stand in its place again."""
        self._aside.remove(request)
        self._in_line.add(request)

    def output_ended(self) -> None:
        """Note that one output of a waiting call is no longer wanted."""
        self.num_sequences -= 1

    def tenants(self) -> list[str]:
        """Tenants with a call that is not set aside."""
        return list(self._in_line.by_tenant)

    def first(self, tenant: str) -> Request | None:
        """The tenant's call whose turn it is."""
        calls = self._in_line.by_tenant.get(tenant)
        return calls[0] if calls else None

    def line(self, tenant: str) -> Line:
        """What a tenant has waiting that is new; it must have something."""
        calls = self._new.by_tenant[tenant]
        return Line(len(calls), calls[0].received_at)

    def lines(self) -> dict[str, Line]:
        """What each tenant has waiting that is new."""
        return {tenant: self.line(tenant) for tenant in self._new.by_tenant}

    def last_of_largest(self, weight: Callable[[str], float]) -> Request:
        """The last new call of the tenant that has most of them for its weight: it goes where there are too many."""
        lines = self._new.by_tenant
        return lines[max(lines, key=lambda tenant: len(lines[tenant]) / weight(tenant))][-1]
