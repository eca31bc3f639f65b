"""Who may call a worker: over real channels, in every way there is to call."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import example, given
from hypothesis import strategies as st

from prefixgate.cache.hashing import BlockHasher
from prefixgate.proto import worker_pb2, worker_pb2_grpc
from prefixgate.proto.access import ACCESS_PURPOSE, AccessGuard, proving
from prefixgate.proto.health import Health

KEY = b"0123456789abcdef"
SECRET = BlockHasher(KEY).derive(ACCESS_PURPOSE)
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
METHODS = [method.name for method in worker_pb2.DESCRIPTOR.services_by_name["Worker"].methods]
KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


@asynccontextmanager
async def guarded(folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """Serve the worker's methods, none of which is implemented, behind the guard."""
    server = grpc.aio.server(interceptors=[AccessGuard(SECRET)])
    unimplemented: Any = type("Bare", (worker_pb2_grpc.WorkerServicer,), {"__abstractmethods__": frozenset()})
    worker_pb2_grpc.add_WorkerServicer_to_server(unimplemented(), server)
    health = Health("prefixgate.v1.Worker")
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server.add_insecure_port(f"unix:{folder}/worker.sock")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{folder}/worker.sock") as channel:
            health.tell(serving=True)
            yield channel
    finally:
        health.close()
        await server.stop(0)


async def code_of(channel: grpc.aio.Channel, kind: str, path: str, metadata: Any = None) -> grpc.StatusCode:
    """Call in one of the four ways. What streams sends nothing, and does not end either."""

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    multicallable: Any = getattr(channel, kind)(path)
    # A channel that proves itself passes its own metadata.
    own = {} if metadata is None else {"metadata": metadata}
    call = multicallable(nothing() if kind.startswith("stream") else b"", timeout=60, **own)
    try:
        if kind.endswith("unary"):
            await call
        else:
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_no_method_is_reached_without_the_secret_in_any_way(tmp_path: Path) -> None:
    wrong: list[Any] = [
        (),
        (("prefixgate-access-bin", b""),),
        (("prefixgate-access-bin", SECRET[:-1]),),
        (("prefixgate-access-bin", SECRET), ("prefixgate-access-bin", SECRET)),
        (("prefixgate-access-bin", BlockHasher(KEY[::-1]).derive(ACCESS_PURPOSE)),),
        (("prefixgate-access", SECRET.hex()),),
        (("authorization", f"Bearer {SECRET.hex()}"),),
    ]

    async def test() -> None:
        async with guarded(tmp_path) as channel:
            paths = [f"/prefixgate.v1.Worker/{name}" for name in (*METHODS, "Unknown")]
            paths += ["/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "/grpc.health.v1.Healthy/Check"]
            calls = [code_of(channel, kind, path, each) for path in paths for kind in KINDS for each in wrong]
            assert set(await asyncio.gather(*calls)) == {UNAUTHENTICATED}

    asyncio.run(test())


def test_with_it_every_method_is_and_what_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    async def test() -> None:
        async with guarded(tmp_path) as channel:
            mine = proving(channel, SECRET)
            for name in (*METHODS, "Unknown"):
                assert await code_of(mine, "unary_unary", f"/prefixgate.v1.Worker/{name}") is UNIMPLEMENTED
            stub: Any = worker_pb2_grpc.WorkerStub(mine)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Describe(worker_pb2.DescribeRequest())
            assert caught.value.code() is UNIMPLEMENTED

    asyncio.run(test())


def test_health_is_open(tmp_path: Path) -> None:
    async def test() -> None:
        async with guarded(tmp_path) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(test())


def test_the_refusal_says_what_to_look_at_and_not_the_secret(tmp_path: Path) -> None:
    async def test() -> None:
        async with guarded(tmp_path) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(proving(channel, b"wrong"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Describe(worker_pb2.DescribeRequest())
            assert "is hash_key the same for both?" in str(caught.value.details())
            assert "wrong" not in str(caught.value.details())

    asyncio.run(test())


@example(key=bytes(16), other=bytes(17))
@given(key=st.binary(min_size=16, max_size=64), other=st.binary(min_size=16, max_size=64))
def test_the_secret_is_the_keys_own_and_holds_nothing_of_it(key: bytes, other: bytes) -> None:
    hasher = BlockHasher(key)
    secret = hasher.derive(ACCESS_PURPOSE)
    assert secret == BlockHasher(key).derive(ACCESS_PURPOSE)
    assert (secret == BlockHasher(other).derive(ACCESS_PURPOSE)) == (key == other)
    assert secret not in (hasher.fingerprint, hasher.derive(b"another purpose"))
    assert len(secret) == 32
