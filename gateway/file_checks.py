"""Whether files that hold secrets, and folders that hold sockets, are for their owner alone."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from prefixgate.config.address import Address
from prefixgate.config.settings import Settings
from prefixgate.proto.finding import Finding


def check_secret_files(settings: Settings, config: Path | None) -> Iterator[Finding]:
    """Look at the files with keys that the settings name, and at the file of settings where it holds one itself."""
    gateway, worker, cache = settings.gateway, settings.worker, settings.cache
    named = {
        "cache.hash_key_file": cache.hash_key_file,
        "gateway.tls_key": gateway.tls_key,
        "gateway.worker_client_key": gateway.worker_client_key,
        "worker.tls_key": worker.tls_key,
    }
    if config is not None and cache.hash_key:
        named["cache.hash_key"] = str(config)
    for key, path in named.items():
        if path:
            yield _secret(key, Path(path))


def _secret(key: str, path: Path) -> Finding:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        remedy = f"name a file in {key} that this user can read"
        return Finding("secrets", "problem", f"{key}: {path} cannot be read: {error.strerror}", remedy)
    if mode & 0o077:
        who = "every user" if mode & 0o007 else "its group"
        return Finding("secrets", "warning", f"{key}: {path} is open to {who} (mode {mode:04o})", f"chmod 600 {path}")
    return Finding("secrets", "ok", f"{key}: {path} is for its owner alone")


def check_socket_folder(key: str, address: Address) -> Iterator[Finding]:
    """Look at the folder that a Unix socket is to lie in: whether one can be made there, and whether by others too."""
    folder = Path(address.path).parent
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    status = existing.stat()
    if not os.access(existing, os.W_OK | os.X_OK):
        remedy = f"make {folder} for this user, or name another path in {key}"
        yield Finding("sockets", "problem", f"{key}: {existing} cannot be written to", remedy)
    elif status.st_uid not in (0, os.getuid()):
        remedy = f"use a folder of this user's own in {key}"
        yield Finding("sockets", "problem", f"{key}: {existing} belongs to another user", remedy)
    elif status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        # Who can rename the socket can put one of their own in its place.
        message = f"{key}: others can write to {existing} (mode {stat.S_IMODE(status.st_mode):04o})"
        yield Finding("sockets", "problem", message, f"chmod 700 {existing}")
    else:
        yield Finding("sockets", "ok", f"{key}: a socket can be made in {folder}")
