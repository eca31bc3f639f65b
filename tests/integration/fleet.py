"""Several workers and a gateway in front of them, each a process of its own."""

import asyncio
import contextlib
import signal
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import grpc

from prefixgate.gateway.readiness import until_serving
from prefixgate.proto.transport import CHANNEL_OPTIONS
from tests.integration.scrape import Page, scrape
from tests.integration.sidecar import HASH_KEY, Program, write_settings
from tests.integration.waiting import HANG_SECONDS, until


class WorkerProcess:
    """One worker, under addresses that it keeps."""

    def __init__(self, folder: Path, number: int) -> None:
        self.address = f"unix:{folder}/{number}.sock"
        self._folder = folder
        self._number = number
        self._lives = 0
        # An address of this machine that no other test listens at or calls from, so that its port stays free between
        # two lives.
        self._http = "127.0.0.2:0"
        self.program: Program | None = None

    def start(self, model: str, *flags: str, hash_key: str = HASH_KEY) -> None:
        """Start it, where the one before is gone."""
        self._lives += 1
        self.program = Program(
            self._folder / f"worker-{self._number}-{self._lives}.log",
            "prefixgate.worker",
            f"--config={self._folder}/settings.toml",
            f"--worker-listen={self.address}",
            f"--worker-http={self._http}",
            f"--model={model}",
            *flags,
            hash_key=hash_key,
        )
        self.metrics_url = self.program.logged(r"Metrics on (\S+)")
        self._http = urllib.parse.urlsplit(self.metrics_url).netloc

    @property
    def page(self) -> Page:
        return scrape(self.metrics_url)

    def kill(self) -> None:
        """End it without a word."""
        assert self.program is not None
        self.program.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.program is not None
        self.program.process.send_signal(number)


class RunningFleet:
    """A gateway and its workers; a context manager that ends all of them."""

    def __init__(self, folder: Path, models: Sequence[str], *flags: str) -> None:
        write_settings(folder)
        self._folder = folder
        self._models = models
        self._flags = flags
        self.workers = [WorkerProcess(folder, number) for number in range(len(models))]
        self._ending = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as ending:
            for worker, model in zip(self.workers, self._models, strict=True):
                ending.callback(_kill, worker)
                worker.start(model, *self._flags)
            addresses = ",".join(worker.address for worker in self.workers)
            self.gateway = ending.enter_context(
                Program(
                    self._folder / "gateway.log",
                    "prefixgate.gateway",
                    "gateway",
                    f"--config={self._folder}/settings.toml",
                    f"--gateway-listen=unix:{self._folder}/gateway.sock",
                    "--gateway-http=127.0.0.1:0",
                    "--gateway-metrics-seconds=0",
                    f"--workers={addresses}",
                )
            )
            self.address = self.gateway.logged(r"Serving on (\S+), ")
            self.metrics_url = self.gateway.logged(r"metrics on (\S+)")
            asyncio.run(asyncio.wait_for(until_serving(self.address), HANG_SECONDS))
            self.until("up", *(1.0 for _ in self.workers))
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.address, [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)])

    def restart(self, number: int, model: str) -> None:
        """Start a worker anew at its address, and wait until the gateway has it."""
        self.workers[number].start(model, *self._flags)
        until(lambda: self.metric("up")[number] == 1, "the gateway has found the worker again")

    def metric(self, name: str) -> list[float]:
        """Read one of the gateway's metrics of each worker, in their order."""
        page = scrape(self.metrics_url)
        return [page.total(f"prefixgate_gateway_worker_{name}", worker=worker.address) for worker in self.workers]

    def until(self, name: str, *values: float) -> None:
        """Wait until a metric of the workers has these values."""
        until(lambda: self.metric(name) == list(values), f"{name} is {values}")


def _kill(worker: WorkerProcess) -> None:
    if worker.program is not None:
        worker.program.kill()
