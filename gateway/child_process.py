"""One process under supervision: how it is started, told to stop, and found to have ended."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

_LAUNCHER = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Has the kernel send SIGTERM when the parent dies (PR_SET_PDEATHSIG), and becomes the program. The same between fork
and exec was rejected: a parent with threads, as gRPC has, must not run code of its own there."""


class ChildProcess:
    """A process, from its start on. To be made on the event loop, in the main thread."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # A group of its own keeps the terminal's Ctrl-C from reaching it directly: the order of stopping is ours.
        self._process = subprocess.Popen(
            _dying_with_us(command), stdin=subprocess.DEVNULL, env=environment, process_group=0
        )
        self.started_at = asyncio.get_running_loop().time()
        self.ended = asyncio.create_task(asyncio.to_thread(self._process.wait))
        """Brings its exit status."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, if it still runs. Does not wait."""
        self._process.kill()

    def wait(self) -> None:
        """Wait for its end, without the event loop."""
        self._process.wait()


def ending(status: int) -> str:
    """Say in words how a process ended."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"


def _dying_with_us(command: Sequence[str]) -> list[str]:
    """Make the command whose process is told to stop if this one is killed. Linux alone can do that."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
