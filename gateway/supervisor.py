"""Supervision: starts a few processes that belong together, starts again what dies, and ends them in order."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefixgate.gateway.backoff import Backoff
from prefixgate.gateway.child_process import ChildProcess, ending

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_HURRY_SECONDS = 3.0
"""What a part gets after a second signal, to end its calls with a status. Killed, it would only reset connections."""

RESTART = Backoff(first=0.5, longest=30.0)
_STEADY_SECONDS = 60.0
"""A part that has run so long begins anew with the pauses before its next start."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process to be run."""

    name: str
    command: Sequence[str]
    stop_seconds: float
    """How long it may take to end after SIGTERM before it is killed."""
    until_ready: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Returns when it serves; None for a part of which nobody can tell."""
    until_lifeless: Callable[[], Coroutine[Any, Any, None]] | None = None
    """Returns when it hangs for good; it is killed then. Asked once it has served; None where nobody can tell."""
    restarts: bool = False
    """Whether it is started again when it ends by itself, once it has served: one that never got so far would fail
    again for the same reason."""


class _Running:
    """A part and the process that it has now."""

    def __init__(self, part: Part, process: ChildProcess) -> None:
        self.part = part
        self.process = process
        self.was_ready = asyncio.Event()
        self.num_failures = 0
        """Ends in a row, each soon after the start."""
        self.next: asyncio.Task[None] | None = None
        """Its next start, while it is down and waits for that."""


class Supervisor:
    """Runs its parts until a signal comes or one of them ends that is not started again; then all of them end.

    They are stopped in the order given, each only when the one before is gone, so that who depends on others stands
    first. A second signal has them end at once, in the same order: each is asked again, and gets a few seconds to tell
    whoever still calls it.
    """

    def __init__(self, parts: Sequence[Part], environment: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._parts = parts
        self._environment = environment
        self._say = say
        self._running: list[_Running] = []
        self._watches: set[asyncio.Task[None]] = set()

    def run(self, watch: Callable[[], Coroutine[Any, Any, None]]) -> int:
        """Start the parts and block until all have ended.

        ``watch`` runs beside them, from when all are started until they end or it is done. Returns 0 after an orderly
        stop, 128 and the signal's number after a second signal, else 1. Call it from the main thread.
        """
        runner = asyncio.Runner()
        code = runner.run(self._run(watch))
        # To close the loop is to wait for every task, for as long as it takes.
        if not asyncio.all_tasks(runner.get_loop()):
            runner.close()
        return code

    async def until_ready(self, name: str) -> None:
        """Wait until a part has served for the first time. For ``watch``."""
        await next(running for running in self._running if running.part.name == name).was_ready.wait()

    async def _run(self, watch: Callable[[], Coroutine[Any, Any, None]]) -> int:
        signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
        try:
            for part in self._parts:
                running = _Running(part, ChildProcess(part.command, self._environment))
                self._running.append(running)
                self._watch_start(running)
            code = await self._until_end(signals, asyncio.create_task(watch()))
            for task in [*self._watches, *(running.next for running in self._running if running.next)]:
                task.cancel()
            return await self._end(signals, code)
        finally:
            for running in self._running:
                running.process.kill()
                running.process.wait()
            await self._end_tasks()

    async def _end_tasks(self) -> None:
        """End what still waits for something. All parts have ended, so there is nothing more to wait for."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_HURRY_SECONDS)

    async def _until_end(self, signals: "asyncio.Queue[signal.Signals]", watching: "asyncio.Task[None]") -> int:
        """Wait for a signal, or for a part to end for good. Returns the exit code if all goes well from here."""
        asked = asyncio.create_task(signals.get())
        try:
            while True:
                live = [running.next or running.process.ended for running in self._running]
                beside = [] if watching.done() else [watching]
                await asyncio.wait({asked, *beside, *live}, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    self._say(f"{asked.result().name}: stopping; a second signal ends everything at once")
                    return 0
                if watching.done():
                    watching.result()
                # Each of them, so that all that have ended are told of.
                lasting = [self._look_after(running) for running in self._running]
                if not all(lasting):
                    return 1
        finally:
            asked.cancel()
            watching.cancel()

    def _look_after(self, running: _Running) -> bool:
        """Have a part that has ended started again. Returns False where that is not to be."""
        if running.next is not None:
            if running.next.done():
                running.next.result()
                running.next = None
            return True
        if not running.process.ended.done():
            return True
        name, how = running.part.name, ending(running.process.ended.result())
        if not (running.part.restarts and running.was_ready.is_set()):
            self._say(f"{name} ended by itself ({how}); stopping the rest")
            return False
        if asyncio.get_running_loop().time() - running.process.started_at > _STEADY_SECONDS:
            running.num_failures = 0
        pause = RESTART.delay(running.num_failures)
        running.num_failures += 1
        self._say(f"{name} ended by itself ({how}); starting it again in {pause:.1f} s")
        running.next = asyncio.create_task(self._start_again(running, pause))
        return True

    async def _start_again(self, running: _Running, pause: float) -> None:
        await asyncio.sleep(pause)
        running.process = ChildProcess(running.part.command, self._environment)
        self._watch_start(running)

    def _watch_start(self, running: _Running) -> None:
        if running.part.until_ready is not None:
            task = asyncio.create_task(self._tell_when_ready(running, running.part.until_ready()))
            self._watches.add(task)
            task.add_done_callback(self._watches.discard)

    async def _tell_when_ready(self, running: _Running, ready: Coroutine[Any, Any, None]) -> None:
        process, waiting = running.process, asyncio.create_task(ready)
        try:
            await asyncio.wait({waiting, process.ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not waiting.done() or process.ended.done():
            return
        if running.was_ready.is_set():
            seconds = asyncio.get_running_loop().time() - process.started_at
            self._say(f"{running.part.name}: ready again after {seconds:.1f} s")
        running.was_ready.set()
        if running.part.until_lifeless is not None:
            await self._kill_when_lifeless(running.part, process, running.part.until_lifeless())

    async def _kill_when_lifeless(self, part: Part, process: ChildProcess, lifeless: Coroutine[Any, Any, None]) -> None:
        """Make an end of a process that would not come to one by itself, so that its next life can begin."""
        waiting = asyncio.create_task(lifeless)
        try:
            await asyncio.wait({waiting, process.ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if waiting.done() and not process.ended.done():
            self._say(f"{part.name} hangs and is killed")
            process.kill()

    async def _end(self, signals: "asyncio.Queue[signal.Signals]", code: int) -> int:
        stopping = asyncio.create_task(self._stop_in_order())
        again = asyncio.create_task(signals.get())
        await asyncio.wait([stopping, again], return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            again.cancel()
            return code if stopping.result() else 1
        stopping.cancel()
        self._say(f"{again.result().name}: ending everything at once")
        await self._hurry()
        return 128 + again.result()

    async def _hurry(self) -> None:
        """Ask each part twice, in order, for those that were not asked yet as well, and kill what does not end then."""
        for process in (running.process for running in self._running):
            if process.ended.done():
                continue
            # Two different signals, since of two equal ones that come together only one is seen.
            for number in (signal.SIGTERM, signal.SIGINT):
                process.send_signal(number)
            await asyncio.wait([process.ended], timeout=_HURRY_SECONDS)
            process.kill()

    async def _stop_in_order(self) -> bool:
        """Stop all parts. Returns whether each ended well."""
        well = True
        for part, process in ((running.part, running.process) for running in self._running):
            if process.ended.done():
                continue
            process.send_signal(signal.SIGTERM)
            await asyncio.wait([process.ended], timeout=part.stop_seconds)
            if not process.ended.done():
                self._say(f"{part.name} did not end within {part.stop_seconds:g} s and is killed")
                process.kill()
            status = await process.ended
            # Its end by our own signal means that it was not yet far enough to handle it.
            if status not in (0, -signal.SIGTERM):
                self._say(f"{part.name} did not end well ({ending(status)})")
                well = False
        return well
