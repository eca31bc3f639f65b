"""TLS for both hops: credentials from files, and read anew when the files change."""

import logging
import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

logger = logging.getLogger(__name__)

_Signature = tuple[tuple[int, int, int] | None, ...]


class TlsError(Exception):
    """A certificate, key or list of authorities cannot be used; the text names the file and never holds a key."""


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """What a server needs: paths of PEM files."""

    certificate: str
    """Its certificate chain."""
    key: str
    client_ca: str = ""
    """Authorities of clients. Set: a client without a certificate from one of them cannot connect."""


class ServerCertificates:
    """The credentials of a server, which follow its files.

    gRPC asks before each handshake, so a new certificate serves the next connection; those that are open go on. Files
    that cannot be used are logged, once, and what was read before stays: half a rotation stops nobody.
    """

    def __init__(self, files: ServerFiles) -> None:
        """Read the files. Raises TlsError."""
        self._files = files
        self._lock = threading.Lock()
        self._signature = self._look()
        self._first = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Make the credentials to listen with."""
        changed: Any = self._changed  # which may return None, whatever the type hints say
        return grpc.dynamic_ssl_server_credentials(self._first, changed, bool(self._files.client_ca))

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what to use from now on, None for what is used already. Called on gRPC's threads; never raises."""
        try:
            with self._lock:
                signature = self._look()
                if signature == self._signature:
                    return None
                # Taken before the files are read: what changes meanwhile is seen the next time.
                self._signature = signature
                configuration = self._read()
            logger.info("TLS files have changed; new connections get %s", self._files.certificate)
            return configuration
        except TlsError as error:
            logger.error("TLS files have changed and cannot be used, so the old ones stay: %s", error)
        except Exception:
            logger.exception("Looking at TLS files failed; the old ones stay")
        return None

    def _look(self) -> _Signature:
        files = self._files
        return tuple(_state(path) for path in (files.certificate, files.key, files.client_ca) if path)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        _check(files.certificate, files.key, files.client_ca)
        pair = (_contents(files.key), _contents(files.certificate))
        return grpc.ssl_server_certificate_configuration([pair], _contents(files.client_ca) or None)


def client_credentials(ca: str, certificate: str = "", key: str = "") -> grpc.ChannelCredentials:
    """Make the credentials of a client that trusts the authorities in the file ``ca``.

    ``certificate`` and ``key`` are what it shows of itself, if anything. Read now and not again. Raises TlsError.
    """
    _check(certificate, key, ca)
    return grpc.ssl_channel_credentials(_contents(ca), _contents(key) or None, _contents(certificate) or None)


def _check(certificate: str, key: str, ca: str) -> None:
    """Find out what is wrong with files; gRPC itself would say only that it cannot use them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if certificate:
            # With a password, so that an encrypted key is refused and not asked for on the terminal.
            context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:  # what the ssl module raises is an OSError too
        raise TlsError(f"{certificate} with {key}: {_reason(error)}") from error
    try:
        if ca:
            context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise TlsError(f"{ca}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"no certificate and its key in PEM, or not of each other ({error.reason or 'unreadable'})"
    return str(getattr(error, "strerror", None) or error)


def _contents(path: str) -> bytes:
    try:
        return Path(path).read_bytes() if path else b""
    except OSError as error:
        raise TlsError(f"{path}: {error.strerror}") from error


def _state(path: str) -> tuple[int, int, int] | None:
    """Tell one state of a file from another, also where it is exchanged for one written at the same time."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
