"""Addresses: where a server listens, and how local that is."""

import ipaddress
import re
from dataclasses import dataclass
from typing import NamedTuple

MAX_UNIX_PATH_BYTES = 107
"""Linux's limit for a socket's path, less its closing zero byte."""

DNS_PREFIX = "dns:"
"""Before a name that stands for all of its addresses, such as that of a headless Kubernetes Service."""

_TCP = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP host and port, or the path of a Unix socket."""

    host: str = ""
    """A name or an IP address without brackets; empty for a Unix socket."""
    port: int = 0
    """0 lets the system choose one when listening."""
    path: str = ""
    """Absolute path of a Unix socket; empty for TCP."""

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        """The form that ``parse_address`` and gRPC take."""
        if self.is_unix:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class WorkerAddress(NamedTuple):
    """Where one worker is, or with ``is_name`` where every worker is that a name stands for."""

    address: Address
    is_name: bool = False


def parse_worker_address(text: str) -> WorkerAddress:
    """Read what ``parse_address`` takes, or ``dns:NAME:PORT``. Raises ValueError for anything else."""
    name = text.removeprefix(DNS_PREFIX)
    address = parse_address(name)
    is_name = name != text
    if is_name and address.is_unix:
        raise ValueError(f"{text!r}: a socket has no name to look up")
    return WorkerAddress(address, is_name)


def parse_address(text: str) -> Address:
    """Read ``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:/PATH``.

    Raises ValueError for anything else, a port above 65535, a relative path, or a path too long for a socket.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path.startswith("//"):
            path = path[2:]
        if not path.startswith("/") or "\0" in path or len(path.encode()) > MAX_UNIX_PATH_BYTES:
            raise ValueError(f"{text!r}: a socket needs an absolute path of at most {MAX_UNIX_PATH_BYTES} bytes")
        return Address(path=path)
    match = _TCP.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"{text!r} is neither HOST:PORT nor unix:/PATH")
    host = match["host"]
    if host.startswith("["):
        host = str(ipaddress.IPv6Address(host[1:-1]))
    return Address(host=host, port=int(match["port"]))
