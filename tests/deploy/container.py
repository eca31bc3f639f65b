"""A container of a manifest as a process on this machine: its command line, its folders and ports moved."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from tests.integration.waiting import HANG_SECONDS, until
from tests.project.tree import ROOT

BIN = Path(sys.executable).parent


class Place:
    """Where on this machine a container's folders and ports are."""

    def __init__(self, folders: Mapping[str, Path], ports: Mapping[int, int], others: Mapping[str, str] = {}) -> None:
        """``others`` are texts that stand for something else here, such as the names of other machines."""
        self._ports = ports
        moved = {path.rstrip("/"): str(folder) for path, folder in folders.items()}
        self._moved = {**moved, **others}
        self._pattern = re.compile(
            "|".join(
                [rf"{re.escape(old)}(?=[/\s:\"]|$)" for old in sorted(self._moved, key=len, reverse=True)] or ["$^"]
            )
        )

    def port(self, number: int) -> int:
        return self._ports.get(number, number)

    def text(self, text: str) -> str:
        """Rewrite paths and ports, each once."""
        if self._moved:
            text = self._pattern.sub(lambda found: self._moved[found[0]], text)
        return re.sub(r":(\d{4,5})\b", lambda found: f":{self.port(int(found[1]))}", text)


class Image(NamedTuple):
    """What a Dockerfile says of the containers made of it."""

    entrypoint: Sequence[str]
    command: Sequence[str]
    environment: Mapping[str, str]


def read_image(name: str) -> Image:
    """Read the last stage of the image's Dockerfile."""
    kind = name.partition(":")[0].removeprefix("prefixgate-")
    text = (ROOT / "deploy" / "images" / f"{kind}.Dockerfile").read_text()
    stage = text[text.rindex("\nFROM ") :].replace("\\\n", " ")
    said: dict[str, str] = dict(re.findall(r"^(ENTRYPOINT|CMD|ENV) (.*)$", stage, re.MULTILINE))
    environment = dict(pair.split("=", 1) for pair in said["ENV"].split())
    return Image(json.loads(said["ENTRYPOINT"]), json.loads(said["CMD"]), environment)


class Container:
    """One container's process; as a context manager it is ended, however that goes."""

    def __init__(self, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.healthcheck: Sequence[str] = ()
        """A command that ends with 0 while the process is well; there may be none."""
        self._argv = argv
        # The image's search path has its own programs first; here they are this environment's.
        path = f"{BIN}:{os.environ['PATH']}"
        self._environment = {**environment, "PATH": path, "HOME": str(log.parent), "LANG": "C.UTF-8"}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def start(self) -> None:
        program = shutil.which(self._argv[0], path=self._environment["PATH"])
        assert program is not None, f"{self.name}: there is no {self._argv[0]!r}"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [program, *self._argv[1:]], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds, as long as the process lives."""

        def now() -> bool:
            assert self._running.poll() is None, f"{self.name} ended before {what}:\n{self.log}"
            return holds()

        until(now, f"{self.name}: {what}\n{self.log}")

    def run(self, command: Sequence[str]) -> int:
        """Run a command beside the process, as a probe or a hook does; returns its exit code."""
        return subprocess.run(command, env=self._environment, capture_output=True, timeout=HANG_SECONDS).returncode

    def is_healthy(self) -> bool:
        return self.run(self.healthcheck) == 0

    def ask_to_end(self) -> None:
        self._running.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Wait for its end, and return its exit code."""
        return self._running.wait(HANG_SECONDS)

    @property
    def is_alive(self) -> bool:
        return self._running.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, f"{self.name} has not been started"
        return self._process
