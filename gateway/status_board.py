"""What the status page shows, made when somebody looks and at most once a second, however many look."""

import asyncio
import json
import logging
import time
from collections.abc import Callable

from prefixgate.gateway.fleet import Fleet
from prefixgate.gateway.live_calls import LiveCalls
from prefixgate.gateway.routing_index import RoutingIndex
from prefixgate.gateway.status_document import StatusDocument
from prefixgate.gateway.status_history import StatusHistory
from prefixgate.gateway.worker_surveys import WorkerSurveys

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Between two documents, and between two looks at the workers for the history."""
MAX_CELLS = 4096
"""Of the maps of all workers together."""
MIN_CELLS = 128
"""Of each."""


class StatusBoard:
    """The document as bytes. On the event loop.

    The history is kept whether or not anyone looks, since what happened is asked for afterwards; it costs each worker
    one question a second, which needs no look at its blocks. Maps are asked for only while somebody looks.
    """

    def __init__(
        self,
        document: StatusDocument,
        surveys: WorkerSurveys,
        history: StatusHistory,
        *,
        num_workers: Callable[[], int],
        is_draining: Callable[[], bool],
    ) -> None:
        self._document = document
        self._surveys = surveys
        self._history = history
        self._num_workers = num_workers
        self._is_draining = is_draining
        self._body = b""
        self._made_at = float("-inf")
        self._making: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Keep the history until cancelled."""
        try:
            while True:
                try:
                    await self._surveys.ask()
                    self._note()
                except Exception:
                    # What only tells of calls must not end them.
                    logger.exception("How the workers stand could not be noted")
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            await self._surveys.close()

    async def read(self) -> bytes:
        """Return the document, a second old at most."""
        if time.monotonic() - self._made_at >= PAUSE_SECONDS:
            if self._making is None:
                self._making = asyncio.create_task(self._make())
            await asyncio.shield(self._making)
        return self._body

    async def _make(self) -> None:
        try:
            await self._surveys.ask(max(MIN_CELLS, MAX_CELLS // max(1, self._num_workers())))
            self._note()
            self._body = json.dumps(self._document.write(is_draining=self._is_draining())).encode()
            self._made_at = time.monotonic()
        finally:
            self._making = None

    def _note(self) -> None:
        self._history.note({address: found.survey for address, found in self._surveys.totals.items()})


def open_board(fleet: Fleet, index: RoutingIndex, live: LiveCalls, *, is_draining: Callable[[], bool]) -> StatusBoard:
    """Make the board of a gateway from what it knows."""
    surveys, history = WorkerSurveys(fleet), StatusHistory()
    document = StatusDocument(fleet, index, live, surveys, history)
    return StatusBoard(document, surveys, history, num_workers=lambda: len(fleet.members()), is_draining=is_draining)
