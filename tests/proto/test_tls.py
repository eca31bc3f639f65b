"""TLS files on real servers: who can connect, and what happens when the files change."""

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives import serialization

from prefixgate.proto.tls import ServerCertificates, ServerFiles, TlsError, client_credentials
from tests.certificates import Authority, Pair

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
HANG_SECONDS = 60.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def files(pair: Pair, client_ca: Path | None = None) -> ServerFiles:
    return ServerFiles(str(pair.certificate), str(pair.key), str(client_ca or ""))


@asynccontextmanager
async def listening(certificates: ServerCertificates) -> AsyncIterator[str]:
    """Serve one method, whose answer is the client's common name."""

    async def name(_: bytes, context: Any) -> bytes:
        return b",".join(context.auth_context().get("x509_common_name", [b"nobody"]))

    handlers: Any = {"Name": grpc.unary_unary_rpc_method_handler(name)}
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("who.Am", handlers),))
    port = server.add_secure_port("127.0.0.1:0", certificates.credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def ask(address: str, credentials: grpc.ChannelCredentials) -> str:
    """Call on a connection of its own."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, credentials, options=own) as channel:
        call: Any = channel.unary_unary("/who.Am/Name")
        answer: bytes = await call(b"", timeout=HANG_SECONDS)
        return answer.decode()


async def refused(address: str, credentials: grpc.ChannelCredentials) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(address, credentials)
    assert caught.value.code() is UNAVAILABLE


def test_a_server_is_trusted_by_who_trusts_its_authority(authority: Authority, tmp_path: Path) -> None:
    async def test() -> None:
        async with listening(ServerCertificates(files(authority.server()))) as address:
            assert await ask(address, client_credentials(str(authority.file))) == "nobody"
            await refused(address, client_credentials(str(Authority(tmp_path, "stranger").file)))

    asyncio.run(test())


def test_clients_show_a_certificate_of_the_right_authority_or_do_not_connect(
    authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")

    async def test() -> None:
        async with listening(ServerCertificates(files(authority.server(), authority.file))) as address:
            blue = authority.issue("blue")
            ca = str(authority.file)
            assert await ask(address, client_credentials(ca, str(blue.certificate), str(blue.key))) == "blue"
            forged, expired = stranger.issue("forged"), authority.issue("expired", days=0)
            for pair in (forged, expired):
                await refused(address, client_credentials(ca, str(pair.certificate), str(pair.key)))
            await refused(address, client_credentials(ca))

    asyncio.run(test())


def test_new_files_serve_the_next_connection_and_files_that_cannot_be_used_change_nothing(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    successor = Authority(tmp_path, "successor")
    pair = authority.server()
    later = successor.server("later")
    secret = pair.key.read_text()

    async def test() -> None:
        old, new = (client_credentials(str(each.file)) for each in (authority, successor))
        async with listening(ServerCertificates(files(pair))) as address:
            assert await ask(address, old) == "nobody"
            shutil.copy(later.certificate, pair.certificate)
            # Half of the rotation: the certificate without its key.
            assert await ask(address, old) == "nobody"
            assert "cannot be used, so the old ones stay" in caplog.text
            pair.key.unlink()
            assert await ask(address, old) == "nobody"
            shutil.copy(later.key, pair.key)
            assert await ask(address, new) == "nobody"
            await refused(address, old)

    with caplog.at_level(logging.INFO):
        asyncio.run(test())
    assert caplog.text.count("cannot be used") == 2
    assert caplog.text.count("new connections get") == 1
    assert secret not in caplog.text


def test_another_list_of_authorities_lets_in_others(authority: Authority, tmp_path: Path) -> None:
    successor = Authority(tmp_path, "successor")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.file.read_bytes())
    blue, red = authority.issue("blue"), successor.issue("red")

    async def test() -> None:
        async with listening(ServerCertificates(files(authority.server(), trusted))) as address:
            ca = str(authority.file)
            with_blue, with_red = (client_credentials(ca, str(p.certificate), str(p.key)) for p in (blue, red))
            assert await ask(address, with_blue) == "blue"
            await refused(address, with_red)
            trusted.write_bytes(successor.file.read_bytes())
            assert await ask(address, with_red) == "red"
            await refused(address, with_blue)

    asyncio.run(test())


def test_what_cannot_be_used_is_refused_with_its_file(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.server(), authority.issue("other")
    junk = tmp_path / "junk.pem"
    junk.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    private = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    for wrong, words in (
        (files(Pair(tmp_path / "none.pem", pair.key)), "none.pem with .*: No such file"),
        (files(Pair(pair.certificate, tmp_path / "none.key")), "server.pem with .*none.key: No such file"),
        (files(Pair(pair.certificate, other.key)), "other.key: no certificate and its key"),
        (files(Pair(junk, pair.key)), "junk.pem with .*: no certificate and its key"),
        (files(Pair(pair.certificate, encrypted)), "encrypted.key: no certificate and its key"),
        (files(pair, junk), "junk.pem: no certificate"),
        (files(pair, tmp_path / "none.pem"), "none.pem: No such file"),
    ):
        with pytest.raises(TlsError, match=words):
            ServerCertificates(wrong)
    with pytest.raises(TlsError, match=r"none\.pem: No such file"):
        client_credentials(str(tmp_path / "none.pem"))
