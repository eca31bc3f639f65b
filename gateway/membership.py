"""Which workers a fleet has: those that the settings name, and those that a name stands for at present."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from prefixgate.config.address import Address, parse_worker_address

logger = logging.getLogger(__name__)

LOOKUP_SECONDS = 5.0
"""How often names are looked up: about as long as a cluster's DNS server takes to hear of a pod."""

Lookup = Callable[[Address], Awaitable[Sequence[str]]]
"""From a name and a port to the addresses behind it. Raises OSError or UnicodeError where there is no answer."""


async def look_up(name: Address) -> Sequence[str]:
    """Ask the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    return [str(Address(host=str(peer[0]), port=name.port)) for *_, peer in found]


class Membership:
    """The addresses of a fleet as they change."""

    def __init__(self, workers: Sequence[str], *, lookup: Lookup = look_up, seconds: float = LOOKUP_SECONDS) -> None:
        """``workers`` is as in the setting ``gateway.workers``."""
        parsed = [parse_worker_address(text) for text in workers]
        self._named = frozenset(str(worker.address) for worker in parsed if not worker.is_name)
        self._names = [worker.address for worker in parsed if worker.is_name]
        self._lookup = lookup
        self._seconds = seconds
        self._found: dict[Address, frozenset[str]] = {}
        self._complaints: dict[Address, str] = {}

    async def changes(self) -> AsyncIterator[frozenset[str]]:
        """Yield the addresses there are now, then all of them again after each change. Ends where none can come."""
        addresses = self._named
        yield addresses
        while self._names:
            await asyncio.gather(*map(self._refresh, self._names))
            now = self._named.union(*self._found.values())
            if now != addresses:
                addresses = now
                yield addresses
            await asyncio.sleep(self._seconds)

    async def _refresh(self, name: Address) -> None:
        try:
            self._found[name] = frozenset(await self._lookup(name))
            self._complaints.pop(name, None)
        except (OSError, UnicodeError) as error:  # the second for a name that no server could have
            # What was found before stays: a worker that is gone does no harm here, as nothing connects to it, while
            # forgetting them all would let a failing DNS server take the fleet down.
            # It is logged once for each reason, not once for each look-up.
            if self._complaints.get(name) != str(error):
                self._complaints[name] = str(error)
                logger.warning("Looking up %s failed, its workers stay as they were: %s", name, error)
