"""How a gateway reaches its workers: real servers behind the workers' guard, with and without TLS."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509

from prefixgate.config.settings import GatewaySettings, SettingsError
from prefixgate.gateway.client import AsyncClient, GatewayError
from prefixgate.gateway.worker_link import WorkerLink, link_of
from prefixgate.proto import worker_pb2, worker_pb2_grpc
from prefixgate.proto.access import AccessGuard
from prefixgate.proto.tls import ServerCertificates, ServerFiles, TlsError
from tests.certificates import Authority, Pair
from tests.gateway.fake_worker import FakeWorker

SECRET = b"0123456789abcdef0123456789abcdef"


@asynccontextmanager
async def guarded_worker(address: str, files: ServerFiles | None = None) -> AsyncIterator[str]:
    """Serve a fake worker behind the guard."""
    server = grpc.aio.server(interceptors=[AccessGuard(SECRET)], options=[("grpc.so_reuseport", 0)])
    worker_pb2_grpc.add_WorkerServicer_to_server(FakeWorker(), server)
    if files is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, ServerCertificates(files).credentials())
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def describe(link: WorkerLink, address: str) -> str:
    """Ask a worker for its model, and return the name or how the call failed."""
    async with link.open(address) as channel:
        try:
            return (await link.stub(channel).Describe(worker_pb2.DescribeRequest(), timeout=60)).model
        except grpc.aio.AioRpcError as error:
            return error.code().name


def files(pair: Pair, client_ca: Path | None = None) -> ServerFiles:
    return ServerFiles(str(pair.certificate), str(pair.key), str(client_ca or ""))


@pytest.mark.parametrize("worker", ["dns:workers.example:8060", "10.0.0.7:8060", "worker.example:8060"])
def test_workers_on_other_machines_are_reached_by_tls_or_by_the_operators_word(worker: str) -> None:
    with pytest.raises(SettingsError, match="insecure_workers") as refused:
        link_of(GatewaySettings(workers=("unix:/a", worker)), SECRET)
    assert worker in str(refused.value)
    link_of(GatewaySettings(workers=(worker,), worker_ca="/ca.pem"), SECRET)
    link_of(GatewaySettings(workers=(worker,), insecure_workers=True), SECRET)
    link_of(GatewaySettings(workers=("unix:/a", "127.0.0.1:1", "[::1]:1", "localhost:1")), SECRET)


def test_what_is_in_the_clear_goes_through_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    # Where nothing listens: what would go there fails.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def test() -> None:
        async with guarded_worker("127.0.0.1:0") as address:
            assert await describe(WorkerLink(SECRET), address) == "fake"
            async with AsyncClient(address) as client:
                # It is reached, and is no gateway.
                with pytest.raises(GatewayError) as refused:
                    await client.stats()
            assert refused.value.code is not grpc.StatusCode.UNAVAILABLE

    asyncio.run(test())


def test_each_call_shows_the_proof_also_on_a_unix_socket(tmp_path: Path) -> None:
    async def test() -> None:
        async with guarded_worker(f"unix:{tmp_path}/worker.sock") as address:
            assert await describe(WorkerLink(SECRET), address) == "fake"
            assert await describe(WorkerLink(SECRET[::-1]), address) == "UNAUTHENTICATED"
            # Where TLS is set up it is for the network.
            assert await describe(WorkerLink(SECRET, ca=str(tmp_path / "none.pem")), address) == "fake"

    asyncio.run(test())


def test_tls_checks_the_name_in_the_address_or_the_one_that_is_set(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    elsewhere = authority.issue("elsewhere", [x509.DNSName("worker.example")])
    ca = str(authority.file)

    async def test() -> None:
        async with guarded_worker("127.0.0.1:0", files(authority.server())) as address:
            assert await describe(WorkerLink(SECRET, ca), address) == "fake"
            assert await describe(WorkerLink(SECRET), address) == "UNAVAILABLE"
        async with guarded_worker("127.0.0.1:0", files(elsewhere)) as address:
            assert await describe(WorkerLink(SECRET, ca), address) == "UNAVAILABLE"
            assert await describe(WorkerLink(SECRET, ca, name="worker.example"), address) == "fake"

    asyncio.run(test())


def test_a_worker_that_wants_a_certificate_gets_the_gateways(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("gateway")
    with_own = link_of(
        GatewaySettings(
            worker_ca=str(authority.file), worker_client_cert=str(own.certificate), worker_client_key=str(own.key)
        ),
        SECRET,
    )

    async def test() -> None:
        async with guarded_worker("127.0.0.1:0", files(authority.server(), authority.file)) as address:
            assert await describe(with_own, address) == "fake"
            assert await describe(WorkerLink(SECRET, str(authority.file)), address) == "UNAVAILABLE"

    asyncio.run(test())


def test_files_are_read_for_each_connection(tmp_path: Path) -> None:
    authority, successor = Authority(tmp_path), Authority(tmp_path, "successor")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.file.read_bytes())
    link, pair = WorkerLink(SECRET, str(trusted)), successor.server("later")

    async def test() -> None:
        async with guarded_worker("127.0.0.1:0", files(pair)) as address:
            assert await describe(link, address) == "UNAVAILABLE"
            trusted.write_bytes(successor.file.read_bytes())
            assert await describe(link, address) == "fake"

    asyncio.run(test())
    trusted.unlink()
    with pytest.raises(TlsError, match=r"trusted\.pem: No such file"):
        link.open("127.0.0.1:1")


def test_the_proof_is_not_in_the_links_text() -> None:
    assert SECRET.decode() not in repr(WorkerLink(SECRET))
