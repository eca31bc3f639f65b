"""Supervision: starts a few processes that belong together, and ends them together and in order."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1

_HURRY_SECONDS = 3.0
"""What a part gets after a second signal, to end its calls with a status. Killed, it would only reset connections."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process to be run."""

    name: str
    command: Sequence[str]
    stop_seconds: float
    """How long it may take to end after SIGTERM before it is killed."""


class Supervisor:
    """Runs its parts until a signal comes or one of them ends; then all of them end.

    They are stopped in the order given, each only when the one before is gone, so that who depends on others stands
    first. A second signal has them end at once, in the same order: each is asked again, and gets a few seconds to tell
    whoever still calls it. Nothing is restarted.
    """

    def __init__(self, parts: Sequence[Part], environment: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._parts = parts
        self._environment = environment
        self._say = say
        self._processes: list[subprocess.Popen[bytes]] = []
        self._exits: list[asyncio.Task[int]] = []

    def run(self, watch: Callable[[], Coroutine[Any, Any, None]]) -> int:
        """Start the parts and block until all have ended.

        ``watch`` runs beside them, from when all are started until they end or it is done. Returns 0 after an orderly
        stop, 128 and the signal's number after a second signal, else 1. Call it from the main thread, before any other
        thread is started.
        """
        return asyncio.run(self._run(watch))

    async def _run(self, watch: Callable[[], Coroutine[Any, Any, None]]) -> int:
        signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        for number in _STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
        try:
            self._start()
            self._exits = [asyncio.create_task(asyncio.to_thread(process.wait)) for process in self._processes]
            code = await self._until_end(signals, asyncio.create_task(watch()))
            return await self._end(signals, code)
        finally:
            self._kill()

    def _start(self) -> None:
        for part in self._parts:
            # A group of its own keeps the terminal's Ctrl-C from reaching it directly: the order of stopping is ours.
            process = subprocess.Popen(
                part.command,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                process_group=0,
                preexec_fn=_dies_with_its_parent(),
            )
            self._processes.append(process)

    async def _until_end(self, signals: "asyncio.Queue[signal.Signals]", watching: "asyncio.Task[None]") -> int:
        """Wait for the first signal or the first part to end. Returns the exit code if all goes well from here."""
        asked = asyncio.create_task(signals.get())
        pending: set[asyncio.Task[Any]] = {asked, watching, *self._exits}
        done: set[asyncio.Task[Any]] = set()
        while not done or (done == {watching} and watching.exception() is None):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if asked in done:
            self._say(f"{asked.result().name}: stopping; a second signal ends everything at once")
            return 0
        asked.cancel()
        for part, ended in zip(self._parts, self._exits, strict=True):
            if ended in done:
                self._say(f"{part.name} ended by itself ({_ending(ended.result())}); stopping the rest")
        if watching in done:
            watching.result()
        return 1

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
        for process, ended in zip(self._processes, self._exits, strict=True):
            if ended.done():
                continue
            # Two different signals, since of two equal ones that come together only one is seen.
            for number in (signal.SIGTERM, signal.SIGINT):
                process.send_signal(number)
            await asyncio.wait([ended], timeout=_HURRY_SECONDS)
            process.kill()

    async def _stop_in_order(self) -> bool:
        """Stop all parts. Returns whether each ended well."""
        well = True
        for part, process, ended in zip(self._parts, self._processes, self._exits, strict=True):
            if ended.done():
                continue
            process.terminate()
            await asyncio.wait([ended], timeout=part.stop_seconds)
            if not ended.done():
                self._say(f"{part.name} did not end within {part.stop_seconds:g} s and is killed")
                process.kill()
            status = await ended
            # Its end by our own signal means that it was not yet far enough to handle it.
            if status not in (0, -signal.SIGTERM):
                self._say(f"{part.name} did not end well ({_ending(status)})")
                well = False
        return well

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _ending(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"


def _dies_with_its_parent() -> Callable[[], None] | None:
    """Make what a child runs before its program, so that it is told to stop if this process is killed.

    Linux alone can do this; elsewhere the child is left running.
    """
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask_for_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask_for_signal
