"""The door: nothing but health without a credential, whatever the method is called, and whatever else fails."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from prefixgate.gateway import auth
from prefixgate.gateway.call_guard import CallGuard
from prefixgate.gateway.metrics import GatewayMetrics
from prefixgate.proto import gateway_pb2
from tests.gateway.rig import Rig, collect, prompt, rig, run, tenants

TENANTS = tenants(acme="key-a", zenith="key-z")
SERVED = [method.name for method in gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods]
METHODS = [*SERVED, "Unknown"]


def bearer(key: str) -> Any:
    return (("authorization", f"Bearer {key}"),)


async def status_of(pending: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pending
    return caught.value


def raw_calls(r: Rig, path: str, metadata: Any) -> list[Any]:
    """Call a path in each of the four ways that gRPC knows; the streaming ones send nothing."""

    async def nothing() -> Any:
        await asyncio.Event().wait()
        yield b""

    def start(kind: str, argument: Any) -> Any:
        multicallable: Any = getattr(r.channel, kind)(path)
        return multicallable(argument, metadata=metadata)

    return [
        start("unary_unary", b""),
        collect(start("unary_stream", b"")),
        start("stream_unary", nothing()),
        collect(start("stream_stream", nothing())),
    ]


CREDENTIALS: list[Any] = [
    (),
    bearer("wrong"),
    bearer(""),
    (("authorization", "Bearer"),),
    (("authorization", "Basic key-a"),),
    (("authorization-bin", b"\xff\xfe"),),
    (*bearer("key-a"), *bearer("key-z")),
]


def test_without_a_known_key_nothing_is_called_in_any_way() -> None:
    async def test() -> None:
        async with rig(tenant_settings=TENANTS) as r:
            paths = [f"/prefixgate.v1.Gateway/{method}" for method in METHODS]
            paths += ["/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/grpc.health.v1.Healthy/Check"]
            pending = [call for path in paths for each in CREDENTIALS for call in raw_calls(r, path, each)]
            for call in pending:
                error = await status_of(call)
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "key-" not in (error.details() or "")
            refused = await r.metric('prefixgate_gateway_calls_refused_total{code="UNAUTHENTICATED"}')
            assert refused == len(pending)
            assert r.session.calls.empty()

    run(test())


def test_health_needs_no_key_and_reflection_is_not_there() -> None:
    async def test() -> None:
        async with rig(tenant_settings=TENANTS) as r:
            for name in ("", "prefixgate.v1.Gateway"):
                assert await r.health(name) == health_pb2.HealthCheckResponse.SERVING
            path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
            for call in raw_calls(r, path, bearer("key-a")):
                assert (await status_of(call)).code() is grpc.StatusCode.UNIMPLEMENTED

    run(test())


def test_the_tenant_is_the_keys_and_that_of_each_call_its_own() -> None:
    async def test() -> None:
        async with rig(tenant_settings=TENANTS) as r:
            keys = ["key-a", "key-z"] * 10
            pending = [r.stub.Complete(prompt(key[-1]), metadata=bearer(key)) for key in keys]
            calls = [await r.next_call() for _ in keys]
            seen = {(call.submit.tenant, bytes(i + 33 for i in call.submit.token_ids).decode()) for call in calls}
            assert seen == {("acme", "a"), ("zenith", "z")}
            for call in calls:
                await call.finish([64])
            await asyncio.gather(*pending)

    run(test())


def test_a_tenant_named_in_the_request_or_its_metadata_means_nothing() -> None:
    async def test() -> None:
        async with rig(tenant_settings=TENANTS) as r:
            claims = (*bearer("key-a"), ("tenant", "zenith"), ("x-tenant", "zenith"))
            pending = r.stub.Complete(prompt("hi", request_id="zenith"), metadata=claims)
            call = await r.next_call()
            assert call.submit.tenant == "acme"
            await call.finish([64])
            await pending

    run(test())


def test_an_authenticator_that_fails_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("secret")

    # Before the gateway is made, which takes the method as it finds it.
    monkeypatch.setattr(auth.Authenticator, "authenticate", broken)

    async def test() -> None:
        async with rig() as r:
            error = await status_of(r.stub.Complete(prompt("hi")))
            assert error.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in (error.details() or "")
            assert await r.health() == health_pb2.HealthCheckResponse.SERVING

    run(test())


class Gone:
    """A call's context whose client has gone, and nobody knows yet."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    async def write(self, _: object) -> None:
        raise grpc.aio.InternalError


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_cannot_be_sent_any_more_ends_like_a_cancelled_call(streams: bool) -> None:
    """And not in the log, as something that failed."""

    async def whole(*_: object) -> bytes:
        return b"answer"

    async def parts(*_: object) -> AsyncIterator[bytes]:
        yield b"part"

    def handler(_: object) -> Any:
        if streams:
            return grpc.unary_stream_rpc_method_handler(parts)
        return grpc.unary_unary_rpc_method_handler(whole)

    async def found(details: object) -> Any:
        return handler(details)

    async def requests() -> AsyncIterator[bytes]:
        yield b""

    async def test() -> None:
        guard = CallGuard(lambda *_: "acme", GatewayMetrics(("acme",), {}))
        details: Any = SimpleNamespace(method="/prefixgate.v1.Gateway/Stats", invocation_metadata=())
        guarded: Any = await guard.intercept_service(found, details)
        with pytest.raises(asyncio.CancelledError):
            await guarded.stream_stream(requests(), Gone())

    run(test())
