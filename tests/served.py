"""`prefixgate serve` as a user runs it: real processes, over a Unix socket, with the witness model."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Self

import psutil

STOP_SECONDS = 60.0


class Served:
    """A running `prefixgate serve`; as a context manager it is ended, however that goes, with its children.

    Lines of progress are kept in ``lines``; what the processes log goes to ``log``, a file.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self.address = f"unix:{folder}/gateway.sock"
        self.lines: list[str] = []
        self.log = folder / "serve.log"
        ports = ["--gateway-http", "127.0.0.1:0", "--worker-http", "127.0.0.1:0"]
        command = [
            sys.executable,
            "-m",
            "prefixgate.gateway",
            "serve",
            "--gateway-listen",
            self.address,
            *ports,
            *flags,
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children():
            child.kill()
        self.process.kill()
        self.process.wait()
        self._output.close()

    @property
    def _output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def read_until(self, beginning: str) -> str:
        """Read progress until a line begins so, and return it."""
        for line in self._output:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(beginning):
                return self.lines[-1]
        raise AssertionError(f"ended before {beginning!r}: {self.lines}\n{self.log.read_text()}")

    def wait_until_ready(self) -> None:
        """Wait until the gateway serves."""
        self.read_until("ready;")

    def metrics_url(self, name: str) -> str:
        """Tell where ``gateway`` or ``worker`` serves its metrics."""
        line = next(line for line in self.lines if line.startswith(f"{name}:") and "metrics on" in line)
        found = re.search(r"http://\S+", line)
        assert found is not None
        return found[0]

    def children(self) -> list[psutil.Process]:
        """List the processes that it started and that still run."""
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def child(self, name: str) -> psutil.Process:
        """Find the ``gateway`` or the ``worker``."""
        return next(child for child in self.children() if f"prefixgate.{name}" in child.cmdline())

    def stop(self) -> int:
        """Ask it to stop, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.finish()

    def finish(self) -> int:
        """Wait for its end, and return its exit code."""
        self.lines += self._output.read().splitlines()
        return self.process.wait(STOP_SECONDS)
