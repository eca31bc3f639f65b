"""Both clients over TLS: to a gateway that proves itself, and as a tenant that a certificate proves."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from prefixgate.config.settings import TenantSettings
from prefixgate.gateway.client import AsyncClient, Client, RetryPolicy, Tls, UnavailableError
from tests.certificates import Authority
from tests.gateway.client.callers import calling
from tests.gateway.rig import rig, run

ONCE = RetryPolicy(attempts=1)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_certificate_proves_each_side_to_the_other(kind: Any, tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    server, client = authority.server(), authority.issue("search", [x509.DNSName("search.example")])
    settings: dict[str, Any] = {
        "tls_cert": str(server.certificate),
        "tls_key": str(server.key),
        "tls_client_ca": str(authority.file),
    }
    tenants = {"search": TenantSettings(certificates=("dns:search.example",))}

    async def test() -> None:
        async with rig(tenant_settings=tenants, **settings) as r:
            async with calling(kind, r, tls=Tls(authority.file, client.certificate, client.key), retry=ONCE) as c:
                answer = asyncio.create_task(c.do(c.client.complete, "hi"))
                call = await r.next_call()
                assert call.submit.tenant == "search"
                await call.finish([1])
                await answer
            for tls in (Tls(stranger.file, client.certificate, client.key), Tls(authority.file), None):
                async with calling(kind, r, tls=tls, retry=ONCE) as c:
                    with pytest.raises(UnavailableError):
                        await c.do(c.client.stats)

    run(test())


def test_files_are_read_when_the_client_is_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        Client(tls=Tls(tmp_path / "missing.pem"))
    with pytest.raises(ValueError, match="come together"):
        Client(tls=Tls(certificate=tmp_path / "own.pem"))
