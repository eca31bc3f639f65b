"""A worker with the witness, a gateway before it, and a pass-through before that, as processes of their own."""

import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from prefixgate.cache.hashing import BlockHasher
from prefixgate.config.hash_key import HASH_KEY_VARIABLE
from prefixgate.gateway.tenants import digest_api_key
from prefixgate.gateway.worker_link import WorkerLink
from prefixgate.proto.access import ACCESS_PURPOSE

TENANTS = tuple(f"tenant-{number:02}" for number in range(16))
START_SECONDS = 60.0
BARE_SERIES = 1_200


def credential(tenant: str) -> tuple[tuple[str, str], ...]:
    """Make the metadata by which a tenant calls."""
    return (("authorization", f"Bearer key of {tenant}"),)


@dataclass(frozen=True)
class Served:
    """Where everything listens, and which processes they are."""

    gateway: str
    worker: str
    relay: str
    """The pass-through to the gateway."""
    gateway_page: str
    bare_page: str
    """As long as the gateway's, in a process that does nothing else."""
    link: WorkerLink
    """How a gateway calls the worker."""
    gateway_process: psutil.Process
    relay_process: psutil.Process


@contextlib.contextmanager
def served(model: str) -> Iterator[Served]:
    """Start all, with 16 tenants, and end all."""
    with tempfile.TemporaryDirectory(prefix="pg-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        config = folder / "settings.toml"
        digests = {tenant: digest_api_key(f"key of {tenant}".encode()) for tenant in TENANTS}
        config.write_text("".join(f'[tenants.{name}]\napi_keys = ["{key}"]\n' for name, key in digests.items()))
        worker, gateway = f"unix:{folder}/worker.sock", f"unix:{folder}/gateway.sock"
        relay = f"unix:{folder}/relay.sock"
        start = _Starter(folder, stack)
        start(
            ("prefixgate.worker", f"--config={config}", f"--model={model}", "--blocks=8192"),
            (f"--worker-listen={worker}", "--worker-http=127.0.0.1:0"),
            r"Serving (\S+)",
        )
        gateway_process, page = start(
            ("prefixgate.gateway", "gateway", f"--config={config}", f"--workers={worker}"),
            (f"--gateway-listen={gateway}", "--gateway-http=127.0.0.1:0"),
            r"metrics on (\S+)",
        )
        relay_process, _ = start(("benchmarks.pass_through", relay, gateway), (), "(ready)")
        _, bare_page = start(("benchmarks.bare_page", str(BARE_SERIES)), (), r"ready on (\S+)")
        link = WorkerLink(BlockHasher(start.hash_key).derive(ACCESS_PURPOSE))
        yield Served(gateway, worker, relay, page, bare_page, link, gateway_process, relay_process)


class _Starter:
    """Starts processes, and has each ended with the stack, the last one first."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.hash_key = secrets.token_bytes(32)
        # With an arena for each thread, which thread happened to do what would move the memory by megabytes.
        self._environment = {**os.environ, HASH_KEY_VARIABLE: self.hash_key.hex(), "MALLOC_ARENA_MAX": "1"}

    def __call__(self, module: tuple[str, ...], flags: tuple[str, ...], says: str) -> tuple[psutil.Process, str]:
        """Start a module, and wait until its output says something; returns what its one group matched."""
        log = self._folder / f"{len(list(self._folder.glob('*.log')))}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, *flags],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environment,
            )
        self._stack.callback(_end, process)
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(says, log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{module[0]} did not start:\n{log.read_text()}")
            time.sleep(0.05)
        return psutil.Process(process.pid), found[1]


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()
    process.wait()
