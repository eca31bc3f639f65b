"""Who may call, on real connections: client certificates, keys beside them, and claims that prove nothing."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from prefixgate.config.limit_settings import NO_LIMITS, LimitSettings
from prefixgate.config.settings import GatewaySettings, Settings, SettingsError, TenantSettings
from prefixgate.gateway.listening import listen
from prefixgate.gateway.tenants import digest_api_key
from prefixgate.proto import gateway_pb2, generation_pb2
from prefixgate.proto.tls import client_credentials
from tests.certificates import Authority, Pair
from tests.gateway.rig import Client, Rig, chat, collect, gateway, gateway_client, prompt, rig, run

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
METHODS = [method.name for method in gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods]
KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]

TENANTS = {
    "acme": TenantSettings((digest_api_key(b"key-a"),), ("dns:acme.example",)),
    "zenith": TenantSettings((), ("subject:CN=zenith,O=Example",)),
}


class Mutual:
    """A gateway's TLS files, and clients' certificates."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        server = self.authority.server()
        self.settings: dict[str, Any] = {
            "tls_cert": str(server.certificate),
            "tls_key": str(server.key),
            "tls_client_ca": str(self.authority.file),
        }
        self.acme = self.authority.issue("acme", [x509.DNSName("acme.example")])
        self.zenith = self.authority.issue("zenith")
        self.nobody = self.authority.issue("nobody", [x509.DNSName("nobody.example")])

    def credentials(self, pair: Pair) -> grpc.ChannelCredentials:
        return client_credentials(str(self.authority.file), str(pair.certificate), str(pair.key))


@pytest.fixture
def mutual(tmp_path: Path) -> Mutual:
    return Mutual(tmp_path)


async def code_of(pending: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pending
    return caught.value.code()


async def answer_next(r: Rig, text: str) -> str:
    """Answer the call that comes next, and name the tenant that it came as."""
    call = await r.next_call()
    await call.finish([64])
    return call.submit.tenant


def raw_calls(client: Client, path: str, metadata: Any) -> list[Any]:
    """Call a path in each of the four ways that gRPC knows; what streams sends nothing."""

    async def nothing() -> Any:
        await asyncio.Event().wait()
        yield b""

    def start(kind: str) -> Any:
        multicallable: Any = getattr(client.channel, kind)(path)
        call = multicallable(nothing() if kind.startswith("stream") else b"", metadata=metadata)
        return call if kind.endswith("unary") else collect(call)

    return [start(kind) for kind in KINDS]


def test_the_certificate_names_the_tenant_of_each_connection(mutual: Mutual) -> None:
    async def test() -> None:
        async with (
            rig(credentials=mutual.credentials(mutual.acme), tenant_settings=TENANTS, **mutual.settings) as r,
            gateway_client(r.server, mutual.credentials(mutual.zenith)) as zenith,
        ):
            for client, tenant in ((r, "acme"), (zenith, "zenith"), (r, "acme")):
                whole = client.stub.Complete(prompt("hi"))
                assert await answer_next(r, "hi") == tenant
                await whole
                stream = asyncio.create_task(collect(client.stub.Generate(prompt("hi"))))
                assert await answer_next(r, "hi") == tenant
                await stream

    run(test())


def test_a_certificate_that_is_not_listed_reaches_no_method_without_a_key(mutual: Mutual) -> None:
    async def test() -> None:
        credentials = mutual.credentials(mutual.nobody)
        async with rig(credentials=credentials, tenant_settings=TENANTS, **mutual.settings) as r:
            paths = [f"/prefixgate.v1.Gateway/{method}" for method in (*METHODS, "Unknown")]
            paths += ["/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/grpc.health.v1.Healthy/Check"]
            for path in paths:
                for pending in raw_calls(r, path, ()):
                    assert await code_of(pending) is UNAUTHENTICATED
            assert r.session.calls.empty()
            assert await r.health() == 1
            # The certificate lets it onto the port, and the key says who it is.
            pending = r.stub.Complete(prompt("hi"), metadata=(("authorization", "Bearer key-a"),))
            assert await answer_next(r, "hi") == "acme"
            await pending

    run(test())


def test_the_key_of_one_tenant_on_the_connection_of_another_is_refused(mutual: Mutual) -> None:
    async def test() -> None:
        credentials = mutual.credentials(mutual.zenith)
        async with rig(credentials=credentials, tenant_settings=TENANTS, **mutual.settings) as r:
            for key in ("key-a", "unknown"):
                pending = r.stub.Complete(prompt("hi"), metadata=(("authorization", f"Bearer {key}"),))
                assert await code_of(pending) is UNAUTHENTICATED

    run(test())


def test_without_a_certificate_or_with_a_strangers_nobody_connects(mutual: Mutual, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    forged = stranger.issue("acme", [x509.DNSName("acme.example")])
    ca = str(mutual.authority.file)

    async def test() -> None:
        settings = {"tenant_settings": TENANTS, **mutual.settings}
        async with gateway("unix:/none", **settings) as server:
            for credentials in (
                client_credentials(ca),
                client_credentials(ca, str(forged.certificate), str(forged.key)),
            ):
                async with gateway_client(server, credentials) as client:
                    assert await code_of(client.health()) is grpc.StatusCode.UNAVAILABLE
            async with gateway_client(server) as client:  # in the clear
                assert await code_of(client.health()) is grpc.StatusCode.UNAVAILABLE

    run(test())


CLAIMS = [
    "tenant",
    "x-tenant",
    "x-tenant-id",
    "tenant-id",
    "prefixgate-tenant",
    "x-forwarded-client-cert",
    "x-ssl-client-subject-dn",
    "x-api-key",
    "x-forwarded-user",
    "cookie",
]


def test_no_metadata_and_no_field_changes_the_tenant(mutual: Mutual) -> None:
    async def test() -> None:
        credentials = mutual.credentials(mutual.acme)
        async with rig(credentials=credentials, tenant_settings=TENANTS, **mutual.settings) as r:
            claims = [(name, "zenith") for name in CLAIMS] + [(f"{name}-bin", b"zenith") for name in CLAIMS]
            claims += [("x509_subject", "CN=zenith,O=Example"), ("peer_dns", "zenith")]
            for request in (
                prompt("hi", request_id="zenith"),
                prompt("hi", cache=generation_pb2.CacheControl(salt="zenith")),
            ):
                pending = r.stub.Complete(request, metadata=claims)
                assert await answer_next(r, "hi") == "acme"
                await pending
            await r.stub.Stats(gateway_pb2.StatsRequest(), metadata=claims)
            assert set(r.worker.reported_tenants) - {""} == {"acme"}

    run(test())


def test_keys_and_limits_change_while_the_gateway_runs_and_calls_go_on(mutual: Mutual) -> None:
    async def test() -> None:
        old = {"acme": TenantSettings((digest_api_key(b"old"),))}
        new = {
            "acme": TenantSettings((digest_api_key(b"new"),), limits=replace(NO_LIMITS, max_outputs=1)),
            "fresh": TenantSettings((digest_api_key(b"fresh"),)),
        }
        with_old, with_new, with_fresh = ((("authorization", f"Bearer {key}"),) for key in ("old", "new", "fresh"))
        async with rig(tenant_settings=old) as r:
            live = r.stub.Complete(prompt("hi"), metadata=with_old)
            call = await r.next_call()
            r.server.apply(Settings(tenants=new))
            assert await code_of(r.stub.Complete(prompt("hi"), metadata=with_old)) is UNAUTHENTICATED
            await call.finish([64])
            await live
            for metadata, tenant in ((with_new, "acme"), (with_fresh, "fresh")):
                pending = r.stub.Complete(prompt("hi"), metadata=metadata)
                assert await answer_next(r, "hi") == tenant
                await pending
            assert (
                await code_of(r.stub.Complete(prompt("hi", n=2), metadata=with_new)) is grpc.StatusCode.INVALID_ARGUMENT
            )
            r.server.apply(Settings(tenants=new, limits=LimitSettings(max_prompt_bytes=40)))
            said = chat(("user", "0123456789"))  # and more in the template
            too_long = r.stub.Tokenize(gateway_pb2.TokenizeRequest(chat=said.chat), metadata=with_fresh)
            assert await code_of(too_long) is grpc.StatusCode.INVALID_ARGUMENT
            r.server.apply(Settings(tenants=new))
            with pytest.raises(SettingsError, match="none are left"):
                r.server.apply(Settings(limits=LimitSettings(max_outputs=1)))
            pending = r.stub.Complete(prompt("hi", n=2), metadata=with_fresh)
            other = await r.next_call()
            assert other.submit.n == 2
            pending.cancel()

    run(test())


def test_files_that_cannot_be_used_are_refused_at_the_start(mutual: Mutual, tmp_path: Path) -> None:
    async def start(tenants: dict[str, TenantSettings], **settings: Any) -> None:
        async with gateway("unix:/none", tenant_settings=tenants, **settings):
            raise AssertionError("it started")

    missing = {**mutual.settings, "tls_cert": str(tmp_path / "none.pem")}
    with pytest.raises(SettingsError, match=r"gateway\.tls_cert: .*none\.pem"):
        run(start(TENANTS, **missing))
    with pytest.raises(SettingsError, match=r"tenants\.zenith\.certificates: nobody can show one"):
        run(start(TENANTS))
    with pytest.raises(SettingsError, match="tenants: none are configured"):
        run(start({}, **{**mutual.settings, "listen": "0.0.0.0:0"}))


def test_listening_to_other_machines_in_the_clear_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Unbound:
        """Listens nowhere, as no test should on an address that others can reach."""

        def add_insecure_port(self, address: str) -> int:
            assert address == "0.0.0.0:0"
            return 4711

    server: Any = Unbound()
    settings = Settings(gateway=GatewaySettings(listen="0.0.0.0:0"), tenants={"acme": TENANTS["acme"]})
    assert listen(server, settings).port == 4711
    assert "API keys travel in the clear" in caplog.text


def test_certificates_that_nobody_can_show_are_warned_of_where_keys_are_there_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with gateway("unix:/none", tenant_settings={"acme": TENANTS["acme"]}):
            pass

    run(test())
    assert "tenants.acme.certificates: nobody can show one" in caplog.text
