"""All workers: which there are, which may get calls, and which of them gets this one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import grpc

from prefixgate.cache.hashing import BlockHash, CacheScope
from prefixgate.gateway.common_model import CommonModel
from prefixgate.gateway.errors import CallError, NoWorkerError, is_being_cancelled
from prefixgate.gateway.member import Member, Placement
from prefixgate.gateway.membership import Membership
from prefixgate.gateway.router import PrefixRouter
from prefixgate.gateway.served_model import ServedModel
from prefixgate.gateway.worker_client import Connection, Probe, WorkerClient
from prefixgate.gateway.worker_events import WorkerEvents
from prefixgate.gateway.worker_link import WorkerLink

logger = logging.getLogger(__name__)


LONG_PROMPT = 8192
"""Tokens, of which naming the blocks takes half a millisecond: more than a turn of the event loop may."""
MAX_ATTEMPTS = 2
"""Workers that one call is sent to at most."""

Beside = Callable[[Callable[[], list[BlockHash]], str], Awaitable[list[BlockHash]]]
"""Runs work for a tenant, and brings what it returns."""


class Fleet:
    """The workers of one gateway, for as long as ``run`` runs."""

    def __init__(
        self,
        membership: Membership,
        router: PrefixRouter,
        *,
        hash_key_fingerprint: bytes,
        gateway_name: str,
        on_change: Callable[[bool], Awaitable[None]],
        link: WorkerLink = WorkerLink(),  # noqa: B008  # immutable
        probe: Probe = Probe(),  # noqa: B008  # immutable
    ) -> None:
        """``on_change`` is told whenever there begin or cease to be workers that take calls."""
        self._membership = membership
        self._router = router
        self._fingerprint = hash_key_fingerprint
        self._gateway_name = gateway_name
        self._on_change = on_change
        self._link = link
        self._probe = probe
        self._common = CommonModel(hash_key_fingerprint)
        self._members: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether a call can be placed now. May be read from other threads."""
        return any(member.is_open for member in self.members())

    @property
    def model(self) -> ServedModel:
        """What all workers serve. Raises NoWorkerError."""
        return self._common.current

    def members(self) -> tuple[Member, ...]:
        """All workers that are known, whether or not they serve. May be read from other threads."""
        return tuple(self._members.values())

    async def names_of_long(
        self, scope: CacheScope, token_ids: Sequence[int], beside: Beside
    ) -> Sequence[BlockHash] | None:
        """Name the blocks of a prompt that is long, for ``place``, beside the event loop; None for others.

        ``beside`` is a thread's turn for the tenant. It shares the interpreter, so that nothing is faster: but other
        calls have their turns meanwhile.
        """
        if len(token_ids) < LONG_PROMPT:
            return None
        return await beside(partial(self._router.names, scope, token_ids), scope.tenant)

    @contextmanager
    def place(
        self,
        scope: CacheScope,
        token_ids: Sequence[int],
        *,
        reads_cache: bool = True,
        keeps_blocks: bool = True,
        avoid: Collection[str] = (),
        hashes: Sequence[BlockHash] | None = None,
    ) -> Iterator[Placement]:
        """Choose a worker for a prompt, and hold the call's place there for as long as the body runs.

        ``reads_cache`` and ``keeps_blocks`` say what the call's cache mode allows; ``avoid`` names workers that have
        failed the call already, and ``hashes`` are what ``names_of_long`` returned. Raises NoWorkerError where no other
        is there.
        """
        able = self._able(avoid)
        if not able:
            raise NoWorkerError
        # If none is well, whoever is left may be: a call that fails there is no worse off than one that is refused.
        candidates = [member.candidate() for member in able if member.is_well] or [one.candidate() for one in able]
        choice = self._router.choose(
            scope, token_ids, candidates, reads_cache=reads_cache, keeps_blocks=keeps_blocks, hashes=hashes
        )
        pending = len(token_ids) - choice.cached_tokens
        with self._members[choice.worker].place(choice, pending, is_retry=bool(avoid)) as placement:
            yield placement

    def has_others(self, avoid: Collection[str]) -> bool:
        """Whether a call could be placed with none of these workers."""
        return bool(self._able(avoid))

    def _able(self, avoid: Collection[str]) -> list[Member]:
        return [member for member in self.members() if member.is_open and member.address not in avoid]

    def connections(self) -> list[Connection]:
        """The workers that can be asked something now, those that are leaving included."""
        return [member.client.connection for member in self._askable()]

    @property
    def num_unreachable(self) -> int:
        """Workers that are named and are not among these."""
        askable = self._askable()
        return sum(not (member in askable or member.is_leaving) for member in self.members())

    def _askable(self) -> list[Member]:
        # Whoever asks one that hangs waits for nothing; but if none answers, whoever is left may.
        ready = [member for member in self.members() if member.client.is_ready]
        return [member for member in ready if member.client.is_responsive] or ready

    async def run(self) -> None:
        """Follow the membership and keep the connections, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_membership(tasks))
            tasks.create_task(self._follow_changes())

    async def _follow_membership(self, tasks: asyncio.TaskGroup) -> None:
        async for addresses in self._membership.changes():
            for address in addresses - self._members.keys():
                self._join(address, tasks)
            for address, member in self._members.items():
                member.is_leaving = address not in addresses
            self._changed.set()

    def _join(self, address: str, tasks: asyncio.TaskGroup) -> None:
        events = WorkerEvents(address, self._router, self._changed.set)
        client = WorkerClient(
            address,
            self._common,
            events,
            hash_key_fingerprint=self._fingerprint,
            gateway_name=self._gateway_name,
            on_change=self._changed.set,
            link=self._link,
            probe=self._probe,
        )
        observe = partial(self._router.observe, address)
        self._members[address] = Member(client, events, observe, self._changed.set)
        self._tasks[address] = tasks.create_task(client.run())

    async def _follow_changes(self) -> None:
        told = False
        while True:
            await self._changed.wait()
            self._changed.clear()
            for member in self.members():
                member.renew()
            self._part()
            self._rescue()
            if self.is_ready != told:
                told = not told
                await self._on_change(told)

    def _part(self) -> None:
        """Forget workers that are no longer named, once their last call has ended."""
        for member in self.members():
            if member.is_leaving and not member.num_calls:
                logger.info("The worker at %s has left", member.address)
                del self._members[member.address]
                self._tasks.pop(member.address).cancel()

    def _rescue(self) -> None:
        """Take the calls back that wait at a worker which hangs, if others could take them."""
        members = self.members()
        for member in members:
            hangs = member.client.is_ready and not member.client.is_responsive
            if hangs and any(other.is_well for other in members if other is not member):
                member.client.connection.session.give_up_unanswered()


def may_retry(error: CallError, failed: Collection[str], fleet: Fleet) -> bool:
    """Whether a call that these workers have failed, and whose client has got nothing of it, is sent to another."""
    return (
        error.code is grpc.StatusCode.UNAVAILABLE
        and len(failed) < MAX_ATTEMPTS
        and fleet.has_others(failed)
        # Else the client is gone, and this task has only not been told yet.
        and not is_being_cancelled()
    )
