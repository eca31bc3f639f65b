"""How a client proves who it is talking to, and with a certificate of its own who it is."""

from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM form for a connection with TLS. Read when a client is made."""

    ca: Path | None = None
    """The authorities that the gateway's certificate is checked against; None: those that gRPC brings."""
    certificate: Path | None = None
    """The client's own certificate, for a gateway that knows tenants by certificate. Needs ``key``."""
    key: Path | None = None
    """The private key of ``certificate``."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises OSError for one that cannot be read, and ValueError for half of a pair."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a client certificate and its private key come together; one of both is missing")
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
