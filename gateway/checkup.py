"""All that can be looked at before a gateway, a worker, or both are started, without torch."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from prefixgate.config.flags import arguments_for
from prefixgate.config.hash_key import HASH_KEY_VARIABLE, read_hash_key
from prefixgate.config.settings import Settings, SettingsError
from prefixgate.gateway.address_checks import check_exposure, check_listening, check_workers
from prefixgate.gateway.certificate_checks import check_tls
from prefixgate.gateway.file_checks import check_secret_files
from prefixgate.gateway.install_checks import check_tracing, check_versions
from prefixgate.proto.finding import Finding, examine

SERVE, GATEWAY, WORKER = "serve", "gateway", "worker"
PROCESSES = (SERVE, GATEWAY, WORKER)
"""What is to be started: both together, or one of them."""

WORKER_SETTINGS = ("worker", "cache", "tracing.endpoint", "log")
_WORKER_SECONDS = 300.0
"""For what looks at the worker's part, which loads torch."""

Check = tuple[str, Callable[[], Iterator[Finding]]]


def checkup(
    process: str, load: Callable[[], Settings], config: Path | None, overrides: Mapping[str, str]
) -> Iterator[Finding]:
    """Look at everything that a process needs. What fails by itself is a finding too; nothing is changed."""
    yield from examine([("versions", check_versions)])
    try:
        settings = load()
    except SettingsError as error:
        yield Finding("settings", "problem", str(error), "correct it; docs/configuration.md lists every setting")
        return
    source = f"{config} can be used" if config is not None else "no file is named; defaults and flags can be used"
    yield Finding("settings", "ok", source)
    yield from examine(_checks(process, settings, config, overrides))


def _checks(process: str, settings: Settings, config: Path | None, overrides: Mapping[str, str]) -> Iterator[Check]:
    gateway, worker = settings.gateway, settings.worker
    yield "hash key", lambda: _check_hash_key(process, settings)
    yield "secrets", lambda: check_secret_files(settings, config)
    if process != WORKER:
        yield "access", lambda: check_exposure(settings)
        yield "tls", lambda: check_tls("gateway.tls", gateway.tls_cert, gateway.tls_key, gateway.tls_client_ca)
        yield "addresses", lambda: check_listening("gateway.listen", gateway.listen)
        yield "addresses", lambda: check_listening("gateway.http", gateway.http)
    if process == GATEWAY:
        yield "workers", lambda: check_workers(gateway.workers)
    if process == WORKER:
        yield "tls", lambda: check_tls("worker.tls", worker.tls_cert, worker.tls_key, worker.tls_client_ca)
        yield "addresses", lambda: check_listening("worker.listen", worker.listen)
    if process != GATEWAY:
        yield "addresses", lambda: check_listening("worker.http", worker.http)
    yield "tracing", lambda: check_tracing(settings)
    if process != GATEWAY:
        yield "worker", lambda: _worker_findings(config, overrides)


def _check_hash_key(process: str, settings: Settings) -> Iterator[Finding]:
    try:
        key = read_hash_key(settings.cache)
    except SettingsError as error:
        yield Finding("hash key", "problem", str(error), "`openssl rand -hex 32` makes one")
        return
    if key is not None:
        yield Finding("hash key", "ok", f"there is one, of {len(key)} bytes")
    elif process == SERVE:
        yield Finding("hash key", "ok", "`serve` makes a fresh one at each start")
    else:
        remedy = f"set cache.hash_key_file or {HASH_KEY_VARIABLE} to the same for gateway and worker"
        yield Finding("hash key", "problem", "none is set, and gateway and worker need one in common", remedy)


def _worker_findings(config: Path | None, overrides: Mapping[str, str]) -> Iterator[Finding]:
    """Have a program of the worker's look at its part, since this package never imports torch."""
    file = [] if config is None else [f"--config={config}"]
    module = [sys.executable, "-P", "-m", "prefixgate.worker.checkup"]
    command = [*module, *file, *arguments_for(overrides, WORKER_SETTINGS)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_WORKER_SECONDS, check=False)
        found: Sequence[Mapping[str, str]] = json.loads(result.stdout)
    except subprocess.TimeoutExpired:
        yield Finding(
            "worker", "problem", f"torch and the model were not looked at in {_WORKER_SECONDS:g} s", "try again"
        )
    except ValueError:
        said = (result.stderr.strip().splitlines() or ["nothing was said"])[-1]
        remedy = "install it anew: pip install 'prefixgate[worker]'"
        yield Finding("worker", "problem", f"the worker's part cannot be loaded: {said}", remedy)
    else:
        yield from (Finding(**item) for item in found)  # type: ignore[arg-type]  # written by the same class


def add_process_argument(parser: argparse.ArgumentParser) -> None:
    """Add what says which process is to be started."""
    parser.add_argument(
        "process",
        nargs="?",
        choices=PROCESSES,
        default=SERVE,
        metavar="PROCESS",
        help="what is to be started here: serve (the default), gateway, or worker",
    )
