"""Who is calling: from what a call's connection and metadata prove to the tenant it acts for, and from nothing else."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from prefixgate.config.settings import SettingsError, TenantSettings
from prefixgate.gateway.tenants import LOCAL_TENANT, TenantCertificates, TenantKeys

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]
Peer: TypeAlias = Mapping[str, Iterable[bytes]]
"""What gRPC found out about the other end of a connection: its ``auth_context``."""

NOBODY: Peer = {}
"""The other end of a connection without TLS."""

_HEADER = "authorization"

_CERTIFICATE_NAMES = {"x509_subject": "subject", "peer_dns": "dns", "peer_uri": "uri", "peer_email": "email"}
"""gRPC's properties of a client certificate that it has verified, and the settings' words for them."""


class UnauthenticatedError(Exception):
    """The call proves no tenant. The text can be shown to the caller and holds nothing of what was sent."""


class _Known(NamedTuple):
    """The tenants of one configuration, exchanged as a whole."""

    keys: TenantKeys
    certificates: TenantCertificates


class Authenticator:
    """Turns credentials into tenant names.

    Without configured tenants everyone is the tenant ``local``, which is safe only where nobody from outside this
    machine can call: without ``local_allowed`` that is refused with SettingsError.
    """

    def __init__(self, tenants: Mapping[str, TenantSettings], *, local_allowed: bool) -> None:
        if not tenants and not local_allowed:
            raise SettingsError(
                "tenants: none are configured, and gateway.listen can be reached from other machines. Add "
                "[tenants.NAME] with api_keys to the configuration file (`prefixgate key` makes a key), or listen on a "
                "loopback address or a Unix socket."
            )
        self._known: _Known | None = None
        if tenants:
            self.replace(tenants)

    def replace(self, tenants: Mapping[str, TenantSettings]) -> None:
        """Know these tenants from the next call on. Raises SettingsError without any, as that would let everyone in."""
        if not tenants and self._known is not None:
            raise SettingsError("tenants: none are left; what asks for keys now goes on to do so until it is restarted")
        if tenants:
            self._known = _Known(TenantKeys(tenants), TenantCertificates(tenants))

    def authenticate(self, metadata: Metadata, peer: Peer = NOBODY) -> str:
        """Name the tenant that a call proves. Raises UnauthenticatedError.

        A certificate that is listed proves its tenant, and so does an API key. Where both are there they must prove
        the same one; a certificate that is not listed proves nothing, and leaves it to the key.
        """
        known = self._known
        if known is None:
            return LOCAL_TENANT
        owners = known.certificates.owners(_certificate_names(peer))
        if len(owners) > 1:
            raise UnauthenticatedError("the client certificate has names of more than one tenant")
        values = [value for name, value in metadata if name.lower() == _HEADER]
        if values or not owners:
            owner = known.keys.owner(_bearer_key(values))
            if owner is None:
                raise UnauthenticatedError("the API key is not known")
            if owners - {owner}:
                raise UnauthenticatedError("the API key and the client certificate are of different tenants")
            return owner
        return next(iter(owners))


def _certificate_names(peer: Peer) -> Iterator[str]:
    for key, kind in _CERTIFICATE_NAMES.items():
        for value in peer.get(key, ()):
            # A name that is no text is none that settings could list.
            yield f"{kind}:{value.decode('utf-8', 'replace')}"


def _bearer_key(values: list[str | bytes]) -> bytes:
    if not values:
        raise UnauthenticatedError(
            "no API key, and no client certificate that is listed: send the metadata `authorization: Bearer KEY`"
        )
    if len(values) > 1:
        # Whatever stands between client and gateway may check one of them and pass the other.
        raise UnauthenticatedError("more than one authorization entry in the metadata")
    # Bytes, since comparing digests of text that is not ASCII would raise; surrogates are how undecodable bytes arrive.
    value = values[0] if isinstance(values[0], bytes) else values[0].encode("utf-8", "surrogatepass")
    scheme, _, key = value.partition(b" ")
    if scheme.lower() != b"bearer" or not key:
        raise UnauthenticatedError("the authorization metadata is not of the form `Bearer KEY`")
    return key
