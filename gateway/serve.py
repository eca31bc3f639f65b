"""`prefixgate serve`: a gateway and its worker as one sidecar of two processes."""

import asyncio
import contextlib
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from prefixgate.config.address import Address, parse_address
from prefixgate.config.flags import arguments_for, setting_keys
from prefixgate.config.hash_key import HASH_KEY_VARIABLE, new_hash_key, read_hash_key
from prefixgate.config.settings import Settings, load_settings
from prefixgate.gateway.readiness import until_page_fails, until_page_ready, until_serving
from prefixgate.gateway.supervisor import Part, Supervisor

SERVE_SETTINGS = tuple(
    key
    for key in setting_keys(["gateway", "worker", "cache", "limits", "tracing", "log"])
    if key not in ("gateway.workers", "gateway.operator_keys", "worker.listen")
    and not key.startswith(("gateway.worker_", "worker.tls_"))
)
"""The settings that `serve` takes as flags: all but the digests of keys, and those of the link between the
two processes, its own affair."""

_GRACE_SECONDS = 5.0
"""What a process gets beyond its own drain time to end by itself."""

_PROGRESS_SECONDS = 5.0


def serve(config: Path | None, overrides: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Run both processes until a signal comes or the gateway ends; returns the exit code.

    A worker that ends is started again, once it has served.

    Progress is told to ``say`` line by line. Raises SettingsError before anything is started.
    """
    settings = load_settings(config, overrides)
    key = read_hash_key(settings.cache) or new_hash_key()
    # In the environment and not in the arguments, which every user of the machine can read.
    environment = {**os.environ, HASH_KEY_VARIABLE: key.hex()}
    with tempfile.TemporaryDirectory(prefix="prefixgate-") as directory:  # made with mode 0700
        link = f"unix:{directory}/worker.sock"
        overrides = {**overrides, **_choose_ports(settings), "gateway.workers": link, "worker.listen": link}
        settings = load_settings(config, overrides)
        supervisor = Supervisor(_parts(settings, config, overrides), environment, say)
        return supervisor.run(lambda: _announce(settings, supervisor, say))


def _parts(settings: Settings, config: Path | None, overrides: Mapping[str, str]) -> list[Part]:
    """List what is run. The gateway stands first: it is stopped first, and its calls finish on a live worker."""
    # -P keeps the current directory, whatever lies in it, out of the modules' search path.
    python = [sys.executable, "-P", "-m"]
    file = [] if config is None else [f"--config={config}"]
    gateway = [
        *python,
        "prefixgate.gateway",
        "gateway",
        *file,
        *arguments_for(overrides, ["gateway", "limits", "tracing", "log"]),
    ]
    worker = [
        *python,
        "prefixgate.worker",
        *file,
        *arguments_for(overrides, ["worker", "cache", "tracing.endpoint", "log"]),
    ]
    return [
        Part(
            "gateway",
            gateway,
            settings.gateway.drain_seconds + _GRACE_SECONDS,
            until_ready=lambda: until_page_ready(settings.gateway.http),
        ),
        # Its calls end with it, and the gateway says so; the next ones find it again when it is back.
        Part(
            "worker",
            worker,
            settings.worker.drain_seconds + _GRACE_SECONDS,
            until_ready=lambda: until_serving(settings.worker.listen),
            until_lifeless=lambda: until_page_fails(settings.worker.http),
            restarts=True,
        ),
    ]


async def _announce(settings: Settings, supervisor: Supervisor, say: Callable[[str], None]) -> None:
    """Tell how the start goes, until the gateway serves."""
    started = time.monotonic()
    gateway = settings.gateway
    say(f"worker: loading {settings.worker.model}; metrics on http://{settings.worker.http}/metrics")
    say(f"gateway: listening on {gateway.listen}; metrics on http://{gateway.http}/metrics")
    say(f"gateway: status page on http://{gateway.http}/status")
    for name in ("worker", "gateway"):
        serving = asyncio.create_task(supervisor.until_ready(name))
        try:
            while not (await asyncio.wait([serving], timeout=_PROGRESS_SECONDS))[0]:
                say(f"{name}: not ready yet after {time.monotonic() - started:.0f} s")
            await serving
        finally:
            serving.cancel()
        say(f"{name}: ready after {time.monotonic() - started:.1f} s")
    option = "" if gateway.listen == type(gateway)().listen else f" --address {shlex.quote(gateway.listen)}"
    if gateway.tls_cert:
        option += " --ca FILE" + (" --cert FILE --cert-key FILE" if gateway.tls_client_ca else "")
    say(f'ready; try: prefixgate generate{option} "What is the capital of France?"')


def _choose_ports(settings: Settings) -> dict[str, str]:
    """Choose a free port for every address with port 0, so that the address can be told and asked for readiness.

    Another program could take such a port before it is bound again; the process then ends and says which it was.
    """
    wanted = {
        "gateway.listen": settings.gateway.listen,
        "gateway.http": settings.gateway.http,
        "worker.http": settings.worker.http,
    }
    chosen = {}
    with contextlib.ExitStack() as held:  # all at the same time, so that no two are equal
        for key, address in ((key, parse_address(text)) for key, text in wanted.items()):
            if not address.is_unix and address.port == 0:
                family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
                probe = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
                probe.bind((address.host, 0))
                chosen[key] = str(Address(address.host, probe.getsockname()[1]))
    return chosen
