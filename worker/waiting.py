"""The calls that wait for admission, in order within each tenant."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from prefixgate.worker.request import Request


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


class WaitingCalls:
    """Own no blocks: what they would hit is looked up at admission.

    A call that is set aside is still waiting, but is passed over until it is put back.
    """

    def __init__(self) -> None:
        self._in_line: dict[str, list[Request]] = {}
        self._aside: dict[str, dict[Request, None]] = {}
        self._calls: dict[Request, None] = {}
        self._counts: dict[str, int] = {}
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
        tenant = request.scope.tenant
        self._calls[request] = None
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        self.num_sequences += request.num_unfinished
        insort(self._in_line.setdefault(tenant, []), request, key=_rank)

    def remove(self, request: Request) -> None:
        """Take a call out, wherever it stands."""
        tenant = request.scope.tenant
        del self._calls[request]
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
        self.num_sequences -= request.num_unfinished
        if request in self._aside.get(tenant, ()):
            self._forget_aside(request)
        else:
            self._leave_line(request)

    def set_aside(self, request: Request) -> None:
        """Pass a call over until it is put back."""
        self._leave_line(request)
        self._aside.setdefault(request.scope.tenant, {})[request] = None

    def put_back(self, request: Request) -> None:
        """Let a call that was set aside stand in its place again."""
        self._forget_aside(request)
        insort(self._in_line.setdefault(request.scope.tenant, []), request, key=_rank)

    def output_ended(self) -> None:
        """One output of a waiting call is no longer wanted."""
        self.num_sequences -= 1

    def tenants(self) -> list[str]:
        """Tenants with a call that is not set aside."""
        return list(self._in_line)

    def first(self, tenant: str) -> Request | None:
        """The tenant's call whose turn it is."""
        line = self._in_line.get(tenant)
        return line[0] if line else None

    def counts(self) -> dict[str, int]:
        """Waiting calls of each tenant that has some."""
        return dict(self._counts)

    def last_of_largest(self, weight: Callable[[str], float]) -> Request:
        """The last call of the tenant that has most of them for its weight: it goes where there are too many."""
        tenant = max(self._counts, key=lambda name: self._counts[name] / weight(name))
        line, aside = self._in_line.get(tenant), self._aside.get(tenant)
        ends: list[Request] = [*(line[-1:] if line else ()), *([next(reversed(aside))] if aside else ())]
        return max(ends, key=_rank)

    def _leave_line(self, request: Request) -> None:
        tenant = request.scope.tenant
        line = self._in_line[tenant]
        del line[bisect_left(line, request.rank, key=_rank)]
        if not line:
            del self._in_line[tenant]

    def _forget_aside(self, request: Request) -> None:
        tenant = request.scope.tenant
        del self._aside[tenant][request]
        if not self._aside[tenant]:
            del self._aside[tenant]
