"""The step behind one that still runs, planned without knowing what that gives.

Only one kind of step can be planned so: the next token of each output that decodes in the step that runs. Where
anything else is to be done, a call to take in, a command to follow, a block to take back from somebody, the step that
runs lands first. An output that turns out to have ended in it computes one token for nobody. That is written to a slot
of a block that it has let go of meanwhile; whoever gets the block next writes it in a later step, which the device runs
later.
"""

from collections import Counter

from prefixgate.cache.block_pool import NoFreeBlocksError
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.executor import Executor
from prefixgate.worker.flight import Flight, Turn
from prefixgate.worker.limits import Limits
from prefixgate.worker.request import Request
from prefixgate.worker.scheduler import Scheduler
from prefixgate.worker.sequence import Sequence
from prefixgate.worker.step_plan import Chunk

MAX_AHEAD_OF_WAITING = 16
"""Steps in a row that are launched ahead while calls of several tenants are there and some wait, before it is looked
again whose turn it is. A full batch can have to make way for a tenant that was served less, and who was changes with
each step: without a bound that tenant would wait until something ends. It is not looked at each time, as such a step is
not launched ahead."""


class Lookahead:
    """Launches steps behind others. Runs on the engine's thread."""

    def __init__(self, executor: Executor, cache: PrefixCache, scheduler: Scheduler, limits: Limits) -> None:
        self._executor = executor
        self._cache = cache
        self._scheduler = scheduler
        self._limits = limits

    def launch_behind(self, flight: Flight) -> Flight | None:
        """Launch the step behind one that was launched; None where that must land first."""
        if not self._executor.goes_ahead or flight.awaited is None:
            return None
        chunks = self._plan(flight)
        behind = self._executor.launch_behind(flight, chunks) if chunks else None
        if behind is not None:
            for tenant, count in Counter(chunk.request.scope.tenant for chunk in chunks).items():
                self._scheduler.fair.charge(tenant, count)
        return behind

    def _plan(self, flight: Flight) -> list[Chunk]:
        """Return the next tokens' chunks, or none. What it took of the pool for them stays theirs either way."""
        # Outputs that ended before it could be known here are in the flight, and have let go of their blocks.
        turns = [turn for turn in flight.turns if turn.output.table is not None]
        if not self._is_settled(flight, turns):
            return []
        chunks: list[Chunk] = []
        for request, output, _ in turns:
            if output.num_output + 1 >= request.sampling.max_tokens:
                continue
            # Penalties weigh the token that is not known yet.
            if request.sampling.has_penalties or not self._make_room(request, output):
                return []
            chunks.append(Chunk(request, output, 1))
        return chunks

    def _is_settled(self, flight: Flight, turns: list[Turn]) -> bool:
        """Whether nothing but these outputs is to compute next: all that runs is among them, and nothing joins."""
        scheduler = self._scheduler
        running = scheduler.num_running_sequences
        if running != len(turns):
            return False
        # Each has one token to compute, and none is carried by another sequence.
        if any(output.num_uncomputed != 1 or request.carrier is not None for request, output, _ in turns):
            return False
        if not scheduler.waiting:
            return True
        # Until something ends there is less room for who waits and not more, but other tenants can have to make way.
        may_wait = scheduler.fair.num_active == 1 or flight.num_ahead < MAX_AHEAD_OF_WAITING
        return may_wait and running >= self._limits.max_running

    def _make_room(self, request: Request, output: Sequence) -> bool:
        """Get the slot of the token that comes out of the step that runs; from nobody who is at work."""
        position = output.num_computed + 1
        if position < output.num_writable:
            return True
        table = output.table
        assert table is not None
        try:
            request.usage.copied_blocks += self._cache.writable(table, position, position + 1)
        except NoFreeBlocksError:
            return False
        output.num_writable = len(table.block_ids) * self._cache.block_size
        return True
