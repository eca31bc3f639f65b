"""Tenants, and the keys and certificates that speak for them.

Only digests of keys are kept: a configuration that is read opens nothing.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping

from prefixgate.config.settings import TenantSettings

LOCAL_TENANT = "local"
"""The one tenant of a gateway without configured tenants."""

_PREFIX = "sha256:"


def new_api_key() -> str:
    """Make a random API key of 256 bits."""
    return "pg-" + secrets.token_urlsafe(32)


def digest_api_key(key: bytes) -> str:
    """Write a key's digest the way the configuration holds it.

    A plain SHA-256 is enough, where a password would need a slow hash: keys are random and too many to try.
    """
    return _PREFIX + hashlib.sha256(key).hexdigest()


class KeyDigests:
    """Knows whose key a key is."""

    def __init__(self, owners: Iterable[tuple[str, str]]) -> None:
        """``owners`` are pairs of a digest and whose key it is."""
        self._owners = [(digest.encode(), name) for digest, name in owners]

    def __bool__(self) -> bool:
        """Whether there is any key at all."""
        return bool(self._owners)

    def owner(self, key: bytes) -> str | None:
        """Find the owner of a key, or None.

        Compares with every digest and in constant time, so that the time taken tells nothing about any key.
        """
        offered, found = digest_api_key(key).encode(), None
        for digest, name in self._owners:
            if hmac.compare_digest(offered, digest):
                found = name
        return found


class TenantKeys(KeyDigests):
    """The API keys of tenants."""

    def __init__(self, tenants: Mapping[str, TenantSettings]) -> None:
        super().__init__((digest, name) for name, tenant in tenants.items() for digest in tenant.api_keys)


class TenantCertificates:
    """Knows whose client certificate a certificate is, by the names that it holds."""

    def __init__(self, tenants: Mapping[str, TenantSettings]) -> None:
        self._owners = {name: tenant for tenant, settings in tenants.items() for name in settings.certificates}

    def owners(self, names: Iterable[str]) -> frozenset[str]:
        """Find the tenants of the names of one certificate, each with its kind, such as ``dns:a.example``."""
        return frozenset(self._owners[name] for name in names if name in self._owners)
