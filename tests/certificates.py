"""An authority that makes certificates for tests, and writes them to files."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)
LOCAL_NAMES = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))


class Pair(NamedTuple):
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates, and writes them into a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject(name)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(_pem(self._sign(self._name, self._key, (), is_authority=True)))

    def issue(self, name: str, alternatives: Sequence[x509.GeneralName] = (), *, days: int = 1) -> Pair:
        """Make a certificate for CN=name,O=Example that holds for some days; for none it has ended already."""
        key = ec.generate_private_key(ec.SECP256R1())
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.certificate.write_bytes(_pem(self._sign(_subject(name), key, alternatives, days=days)))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair

    def server(self, name: str = "server") -> Pair:
        """Make a certificate for a server on this machine."""
        return self.issue(name, LOCAL_NAMES)

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        alternatives: Sequence[x509.GeneralName],
        *,
        is_authority: bool = False,
        days: int = 1,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * _DAY)
            .not_valid_after(now + (days - 0.5) * _DAY)
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        )
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(list(alternatives)), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _subject(name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Example"),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
