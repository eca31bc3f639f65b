"""Whether addresses can be listened on, and whether workers are where the settings say."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from prefixgate.config.address import Address, parse_address, parse_worker_address
from prefixgate.config.settings import Settings, SettingsError
from prefixgate.gateway.auth import Authenticator
from prefixgate.gateway.file_checks import check_socket_folder
from prefixgate.proto.finding import Finding

_ANSWER_SECONDS = 2.0


def check_listening(key: str, text: str) -> Iterator[Finding]:
    """Look at whether an address can be listened on now. A port is bound for a moment."""
    address = parse_address(text)
    if address.is_unix:
        yield from check_socket_folder(key, address)
        path = Path(address.path)
        if os.path.lexists(path) and (not path.is_socket() or _answers(address)):
            what = "another process listens on" if path.is_socket() else "something that is no socket lies at"
            remedy = f"stop it, or set {key} to another path"
            yield Finding("addresses", "problem", f"{key}: {what} {path}", remedy)
        return
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a port whose last connections are only just closed is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except OSError as error:
        why = "another program listens there" if error.errno == errno.EADDRINUSE else error.strerror
        remedy = f"stop that program, or set {key} to another port; port 0 takes a free one"
        if error.errno == errno.EACCES:
            remedy = f"set {key} to a port above 1023"
        elif error.errno != errno.EADDRINUSE:
            remedy = f"set {key} to an address of this machine"
        yield Finding("addresses", "problem", f"{key}: {address} cannot be listened on: {why}", remedy)
    else:
        yield Finding("addresses", "ok", f"{key}: {address} is free")


def check_exposure(settings: Settings) -> Iterator[Finding]:
    """Look at who could reach the gateway, and how they would prove who they are."""
    gateway = settings.gateway
    address = parse_address(gateway.listen)
    try:
        Authenticator(settings.tenants, local_allowed=address.is_local)
    except SettingsError as error:
        yield Finding("access", "problem", str(error), "`prefixgate key` makes a key and the lines for it")
    else:
        names = f"{len(settings.tenants)} tenants" if settings.tenants else "one local tenant, who needs no key"
        yield Finding("access", "ok", f"gateway.listen: {address}; {names}")
    if not (address.is_local or gateway.tls_cert):
        remedy = "set gateway.tls_cert and gateway.tls_key, or have something before it that ends TLS on this machine"
        yield Finding("access", "warning", f"gateway.listen: keys and prompts come to {address} in the clear", remedy)


def check_workers(workers: tuple[str, ...]) -> Iterator[Finding]:
    """Look at whether something answers where workers are said to be. A worker may also come later."""
    if not workers:
        remedy = "set gateway.workers to where the workers listen, each HOST:PORT, unix:/PATH or dns:NAME:PORT"
        yield Finding("workers", "problem", "gateway.workers is not set", remedy)
    for text in workers:
        address, _ = parse_worker_address(text)
        if _answers(address):
            yield Finding("workers", "ok", f"gateway.workers: something listens at {text}")
        else:
            remedy = "start the worker there; the gateway waits for it"
            yield Finding("workers", "warning", f"gateway.workers: nothing answers at {text}", remedy)


def _answers(address: Address) -> bool:
    try:
        if not address.is_unix:
            socket.create_connection((address.host, address.port), _ANSWER_SECONDS).close()
            return True
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_ANSWER_SECONDS)
            probe.connect(address.path)
            return True
    except TimeoutError:
        # Of a Unix socket: whoever listens has no room for one more.
        return address.is_unix
    except OSError:
        return False
