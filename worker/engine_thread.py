"""The thread that an engine runs on."""

import itertools
import logging
import sys
import threading
import traceback
from collections.abc import Callable

from grpc import StatusCode

from prefixgate.worker.engine import Engine
from prefixgate.worker.request import End

logger = logging.getLogger(__name__)

ENGINE_FAILED = End(StatusCode.INTERNAL, "the worker's engine failed")


class EngineThread:
    """Steps an engine while there is work, and rests it while there is none.

    A fault that no single call can answer for ends the engine: nothing more is taken, every call hears of it, and
    ``on_failure`` is called. Nothing is tried again, since what the pool holds then is anyone's guess.
    """

    def __init__(self, engine: Engine, on_failure: Callable[[], None], *, idle_seconds: float = 1.0) -> None:
        """``on_failure`` is called on the engine's thread. After ``idle_seconds`` without work the invariants are
        checked, which is not done at once so as not to stand in the way of the next call.
        """
        self._engine = engine
        self._on_failure = on_failure
        self._idle_seconds = idle_seconds
        self._checked_tokens = -1
        """Tokens that were computed when the invariants were last checked."""
        self.current_step: int | None = None
        """The number of the step that runs, None between two. May be read from other threads."""
        self._last_word: End | None = None
        # A daemon: a step that hangs in the model must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def stop(self, last_word: End) -> None:
        """Take nothing more and end what is live after the step that runs. ``join`` waits for it."""
        self._last_word = last_word
        self._engine.inbox.close()

    def join(self, timeout: float) -> bool:
        """Wait until the thread has ended; False where it has not after ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def where(self) -> str:
        """Tell what the thread does at this moment, as a traceback, for the log."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "it does not run"

    def _run(self) -> None:
        try:
            for number in itertools.count(1):
                if self._last_word is not None:
                    break
                self.current_step = number
                is_busy = self._engine.step()
                self.current_step = None
                if not is_busy:
                    self._rest()
            assert self._last_word is not None
            self._engine.questions.refuse_all(self._last_word)
            self._engine.end_all(self._last_word)
        except BaseException:  # whatever it is: nobody else would tell the calls
            logger.critical("The engine failed; every call ends", exc_info=True)
            self._abandon()
            self._on_failure()

    def _rest(self) -> None:
        inbox = self._engine.inbox
        if inbox.wait(self._idle_seconds):
            return
        # Once after each spell of work: a worker that is only asked how it stands would else check for ever.
        computed = self._engine.report().computed_tokens
        if computed != self._checked_tokens:
            self._checked_tokens = computed
            self._engine.check_integrity()
        inbox.wait(self._engine.seconds_to_expiry())

    def _abandon(self) -> None:
        """End whatever is live, after closing the inbox, so that no call can slip in behind."""
        self._engine.inbox.close()
        self._engine.questions.refuse_all(ENGINE_FAILED)
        try:
            self._engine.abandon_all(ENGINE_FAILED)
        except Exception:
            logger.exception("Not every call could be ended")
