"""What the workers tell of themselves to the operator, as they last told it."""

import asyncio
import logging
import time
from typing import NamedTuple

from prefixgate.gateway.fleet import Fleet
from prefixgate.gateway.member import Member
from prefixgate.proto import worker_pb2

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 30.0
"""Time that a worker gets: a map waits for the step that runs."""
_WAIT_SECONDS = 1.0
"""Time that is waited for an answer. What comes later is there the next time."""


class Surveyed(NamedTuple):
    """One answer."""

    survey: worker_pb2.WorkerSurvey
    asked_at: float
    """On the monotonic clock."""
    received_at: float


class WorkerSurveys:
    """Asks, and keeps of each worker that is connected its last totals and its last map."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.totals: dict[str, Surveyed] = {}
        """By address; with tenants and map where the question was for those."""
        self.maps: dict[str, Surveyed] = {}
        """The same, of answers with a map alone."""
        self._asking: dict[tuple[str, bool], asyncio.Task[None]] = {}

    async def ask(self, max_cells: int = 0) -> None:
        """Ask all workers, for a map if it may have any cells, and wait a moment for their answers.

        A worker that has not answered the last time is not asked anew. What goes wrong is not told: a worker that
        answers nothing is seen by what it last said growing old.
        """
        # What a worker had is no more once it is lost, however long it stays on the list.
        members = {member.address: member for member in self._fleet.members() if member.client.is_ready}
        for kept in (self.totals, self.maps):
            for address in kept.keys() - members.keys():
                del kept[address]
        for address, member in members.items():
            key = (address, max_cells > 0)
            if key not in self._asking:
                task = self._asking[key] = asyncio.create_task(self._ask(member, max_cells))
                task.add_done_callback(lambda _, key=key: self._asking.pop(key))  # type: ignore[misc]
        waiting = [task for (_, has_map), task in self._asking.items() if has_map == (max_cells > 0)]
        if waiting:
            await asyncio.wait(waiting, timeout=_WAIT_SECONDS)

    async def close(self) -> None:
        """Wait for no further answer."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, member: Member, max_cells: int) -> None:
        asked_at = time.monotonic()
        try:
            request = worker_pb2.SurveyRequest(max_cells=max_cells)
            survey = await member.client.connection.stub.Survey(request, timeout=_ANSWER_SECONDS)
        except Exception:
            # Lost meanwhile, or too busy, or of another version: none of that is news here.
            logger.debug("The worker at %s tells nothing of itself", member.address, exc_info=True)
            return
        found = Surveyed(survey, asked_at, time.monotonic())
        last = self.totals.get(member.address)
        # A map comes a step later than it was asked for, with totals of then: what has grown since would count twice.
        if last is None or last.asked_at <= asked_at:
            self.totals[member.address] = found
        if survey.HasField("map"):
            self.maps[member.address] = found
