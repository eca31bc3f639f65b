"""Who is calling: from the metadata of a call to the tenant it acts for, and from nothing else."""

from collections.abc import Iterable, Mapping

from prefixgate.config.settings import SettingsError, TenantSettings
from prefixgate.gateway.tenants import LOCAL_TENANT, TenantKeys

_HEADER = "authorization"


class UnauthenticatedError(Exception):
    """The call proves no tenant. The text can be shown to the caller and holds nothing of what was sent."""


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
        self._keys = TenantKeys(tenants) if tenants else None

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """Name the tenant that a call's metadata proves. Raises UnauthenticatedError."""
        if self._keys is None:
            return LOCAL_TENANT
        tenant = self._keys.owner(_bearer_key(metadata))
        if tenant is None:
            raise UnauthenticatedError("the API key is not known")
        return tenant


def _bearer_key(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    values = [value for name, value in metadata if name.lower() == _HEADER]
    if not values:
        raise UnauthenticatedError("no API key: send the metadata `authorization: Bearer KEY`")
    if len(values) > 1:
        # Whatever stands between client and gateway may check one of them and pass the other.
        raise UnauthenticatedError("more than one authorization entry in the metadata")
    # Bytes, since comparing digests of text that is not ASCII would raise; surrogates are how undecodable bytes arrive.
    value = values[0] if isinstance(values[0], bytes) else values[0].encode("utf-8", "surrogatepass")
    scheme, _, key = value.partition(b" ")
    if scheme.lower() != b"bearer" or not key:
        raise UnauthenticatedError("the authorization metadata is not of the form `Bearer KEY`")
    return key
