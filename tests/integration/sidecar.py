"""Real processes: `prefixgate serve` with tenants, or a worker and a gateway started one by one."""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import grpc
import psutil

from prefixgate.config.hash_key import HASH_KEY_VARIABLE
from prefixgate.gateway.readiness import until_serving
from prefixgate.gateway.tenants import digest_api_key
from prefixgate.proto import gateway_pb2_grpc
from prefixgate.proto.transport import CHANNEL_OPTIONS
from tests.integration.scrape import Page, scrape
from tests.integration.waiting import HANG_SECONDS, until
from tests.served import Served

KEYS: Mapping[str, str] = {"acme": "key of acme", "bolt": "key of bolt", "crux": "key of crux"}
"""The tenants of every server here, and their API keys."""

SLOW_SEQUENCES = 6
"""Outputs that the slow worker generates at the same time."""

HASH_KEY = "5c" * 32


def credential(tenant: str) -> tuple[tuple[str, str | bytes], ...]:
    """Make the metadata by which a tenant calls; a tenant that is not there gets a key that is not known."""
    return (("authorization", f"Bearer {KEYS.get(tenant, tenant)}"),)


def write_settings(folder: Path) -> Path:
    """Write the configuration file that names the tenants, and has a page of metrics made for each scrape."""
    path = folder / "settings.toml"
    tables = [f'[tenants.{name}]\napi_keys = ["{digest_api_key(key.encode())}"]\n' for name, key in KEYS.items()]
    tables += [f"[{process}]\nmetrics_seconds = 0\n" for process in ("gateway", "worker")]
    path.write_text("\n".join(tables))
    return path


class Pair:
    """A gateway and its worker, however they were started."""

    address: str
    """Where clients call."""
    gateway_page: str
    worker_page: str
    gateway: psutil.Process
    worker: psutil.Process

    def channel(self, *options: tuple[str, int]) -> grpc.Channel:
        """Open a connection of its own to the gateway, with some options more or other than is usual."""
        own = ("grpc.use_local_subchannel_pool", 1)
        return grpc.insecure_channel(self.address, list({**dict(CHANNEL_OPTIONS), **dict([own, *options])}.items()))

    def pages(self) -> tuple[Page, Page]:
        """Scrape the gateway and the worker."""
        return scrape(self.gateway_page), scrape(self.worker_page)

    def until_idle(self) -> tuple[Page, Page]:
        """Wait until no call is live and no block is held; returns the pages that say so."""
        return until(lambda: _if_idle(*self.pages()), "no call is live and no block is held")


def _if_idle(gateway: Page, worker: Page) -> tuple[Page, Page] | None:
    live = (
        gateway.total("prefixgate_gateway_live_calls"),
        worker.total("prefixgate_worker_running_calls"),
        worker.total("prefixgate_worker_waiting_calls"),
        worker.total("prefixgate_worker_pool_blocks", state="active"),
    )
    return None if any(live) else (gateway, worker)


class Sidecar(Served, Pair):
    """`prefixgate serve` with the witness and three tenants, on a TCP port."""

    def __init__(self, folder: Path, *flags: str, model: str = "witness", blocks: int = 64) -> None:
        config = f"--config={write_settings(folder)}"
        super().__init__(
            folder, config, "--gateway-listen", "127.0.0.1:0", "--model", model, "--blocks", str(blocks), *flags
        )

    def wait_until_ready(self) -> None:
        """Wait until the gateway serves, and learn where."""
        super().wait_until_ready()
        said = next(line for line in self.lines if line.startswith("gateway: listening on"))
        self.address = said.removeprefix("gateway: listening on ").partition(";")[0]
        self.gateway_page, self.worker_page = self.metrics_url("gateway"), self.metrics_url("worker")
        self.gateway, self.worker = self.child("gateway"), self.child("worker")

    def complaints(self) -> list[str]:
        """List the lines of the log by which a process says that something went wrong."""
        fault = re.compile(r"ERROR|CRITICAL|Traceback|was destroyed|was never")
        return [line for line in self.log.read_text().splitlines() if fault.search(line)]


class Program:
    """One process and its log; as a context manager it is ended, however that goes."""

    def __init__(self, log: Path, *arguments: str, hash_key: str = HASH_KEY, script: str = "") -> None:
        """Run a module with its arguments, or a ``script`` with those."""
        self._log = log
        command = [sys.executable, "-P", *(["-c", script] if script else ["-m"]), *arguments]
        environment = {**os.environ, HASH_KEY_VARIABLE: hash_key}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file, env=environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def logged(self, pattern: str) -> str:
        """Wait for a line of the log, and return what its one group matched."""
        found = until(
            lambda: re.search(pattern, self.log) or self.process.poll() is not None, f"{pattern!r} in {self.log}"
        )
        assert isinstance(found, re.Match), f"ended without {pattern!r}:\n{self.log}"
        return str(found[1])

    def kill(self) -> None:
        """End it without a word, as a crash would."""
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Wait for its end, and return its exit code."""
        return self.process.wait(HANG_SECONDS)


class Started(Pair):
    """A worker and a gateway, started one by one with one hash key; a context manager that ends both."""

    def __init__(self, folder: Path, *worker_flags: str) -> None:
        self._folder = folder
        self._config = f"--config={write_settings(folder)}"
        self._worker_flags = worker_flags
        self._programs = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as programs:
            worker = programs.enter_context(self.another_worker("worker", "127.0.0.1:0"))
            self.worker_address = worker.logged(r"Listening on (\S+)")
            self.worker_page = worker.logged(r"Metrics on (\S+)")
            self.worker = psutil.Process(worker.process.pid)
            self.start_gateway("127.0.0.1:0", programs)
            self._programs = programs.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._programs.close()

    def start_gateway(self, listen: str, programs: contextlib.ExitStack | None = None) -> Program:
        """Start the gateway, and wait until it serves."""
        flags = (f"--gateway-listen={listen}", "--gateway-http=127.0.0.1:0", f"--workers={self.worker_address}")
        arguments = ("prefixgate.gateway", "gateway", self._config, *flags)
        program = (programs or self._programs).enter_context(Program(self._folder / "gateway.log", *arguments))
        self.address = program.logged(r"Serving on (\S+), ")
        self.gateway_page = program.logged(r"metrics on (\S+)")
        self.gateway = psutil.Process(program.process.pid)
        asyncio.run(asyncio.wait_for(until_serving(self.address), HANG_SECONDS))
        return program

    def another_worker(self, name: str, listen: str) -> Program:
        """Start a worker as this pair's, under an address of its own or of another."""
        flags = (f"--worker-listen={listen}", "--worker-http=127.0.0.1:0", "--blocks=64", *self._worker_flags)
        return Program(self._folder / f"{name}.log", "prefixgate.worker", self._config, *flags)


def gateway_stub(channel: grpc.Channel) -> "gateway_pb2_grpc.GatewayStub":
    """Make the stub of a blocking client."""
    return gateway_pb2_grpc.GatewayStub(channel)
