"""A gateway and its worker as real processes with TLS on both hops: who gets in, and what changes while they run."""

import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from prefixgate.cache.hashing import BlockHasher
from prefixgate.gateway.tenants import digest_api_key
from prefixgate.proto import gateway_pb2, worker_pb2, worker_pb2_grpc
from prefixgate.proto.access import ACCESS_PURPOSE
from prefixgate.proto.tls import client_credentials
from prefixgate.proto.transport import CHANNEL_OPTIONS
from tests.certificates import Authority, Pair
from tests.integration.sidecar import HASH_KEY, Program, gateway_stub
from tests.integration.waiting import HANG_SECONDS, until

UNAUTHENTICATED, UNAVAILABLE = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE


class Secured:
    """Both processes and their files."""

    def __init__(self, folder: Path, programs: ExitStack) -> None:
        self._folder = folder
        self.authority = Authority(folder)
        self.config = folder / "settings.toml"
        self.acme = self.authority.issue("acme", [x509.DNSName("acme.example")])
        self.nobody = self.authority.issue("nobody")
        self.gateway_pair = self.authority.server("gateway")
        worker_pair = self.authority.server("worker")
        link = self.authority.issue("link")
        ca = self.authority.file
        self._tls = f"""
            [gateway]
            metrics_seconds = 0
            tls_cert = "{self.gateway_pair.certificate}"
            tls_key = "{self.gateway_pair.key}"
            tls_client_ca = "{ca}"
            worker_ca = "{ca}"
            worker_client_cert = "{link.certificate}"
            worker_client_key = "{link.key}"
            [worker]
            model = "witness"
            tls_cert = "{worker_pair.certificate}"
            tls_key = "{worker_pair.key}"
            tls_client_ca = "{ca}"
            [cache]
            blocks = 64
            """
        self.write_keys("first")
        flags = (f"--config={self.config}", "--worker-listen=127.0.0.1:0", "--worker-http=127.0.0.1:0")
        self.worker = programs.enter_context(Program(folder / "worker.log", "prefixgate.worker", *flags))
        self.worker_address = self.worker.logged(r"Listening on (\S+)")
        flags = (f"--config={self.config}", "--gateway-listen=127.0.0.1:0", "--gateway-http=127.0.0.1:0")
        self.gateway = programs.enter_context(
            Program(folder / "gateway.log", "prefixgate.gateway", "gateway", *flags, f"--workers={self.worker_address}")
        )
        self.address = self.gateway.logged(r"Serving on (\S+), ")
        self._page = self.gateway.logged(r"metrics on (\S+)/metrics")
        until(self._is_ready, "the gateway is ready")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._page}/readyz", timeout=HANG_SECONDS) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False

    def write_keys(self, *keys: str, limits: str = "") -> None:
        """Write the file with these keys of the one tenant, which has a certificate too."""
        digests = ", ".join(f'"{digest_api_key(key.encode())}"' for key in keys)
        tenant = f'[tenants.acme]\napi_keys = [{digests}]\ncertificates = ["dns:acme.example"]\n{limits}\n'
        written = self._folder / "written.toml"
        written.write_text(self._tls + tenant)
        # At once, as whoever rotates keys should: a half-written file is one that cannot be used.
        written.replace(self.config)

    def call(self, pair: Pair, key: str = "", *, authority: Authority | None = None, n: int = 1) -> grpc.StatusCode:
        """Call on a connection of its own, and return how that ended."""
        credentials = client_credentials(str((authority or self.authority).file), str(pair.certificate), str(pair.key))
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        with grpc.secure_channel(self.address, credentials, options) as channel:
            request = gateway_pb2.GenerateRequest(prompt="hi", n=n, sampling={"max_tokens": 2})
            try:
                gateway_stub(channel).Complete(request, metadata=metadata, timeout=HANG_SECONDS)
            except grpc.RpcError as error:
                code = error.code()
                assert isinstance(code, grpc.StatusCode)
                return code
        return grpc.StatusCode.OK


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with ExitStack() as programs:
        yield Secured(tmp_path_factory.mktemp("secured"), programs)


def test_certificates_and_keys_let_in_who_they_belong_to(secured: Secured, tmp_path: Path) -> None:
    secured.write_keys("first")
    assert secured.call(secured.acme) is grpc.StatusCode.OK
    assert secured.call(secured.nobody) is UNAUTHENTICATED
    assert secured.call(secured.nobody, "wrong") is UNAUTHENTICATED
    stranger = Authority(tmp_path, "stranger").issue("acme", [x509.DNSName("acme.example")])
    assert secured.call(stranger) is UNAVAILABLE


@pytest.mark.parametrize("is_told", [True, False], ids=["by SIGHUP", "by looking"])
def test_keys_and_limits_are_exchanged_while_calls_go_on(secured: Secured, is_told: bool) -> None:
    new = f"new {is_told}"
    secured.write_keys("first", new)
    until(lambda: secured.call(secured.nobody, new) is grpc.StatusCode.OK, "the new key is known")
    assert secured.call(secured.nobody, "first") is grpc.StatusCode.OK
    secured.write_keys(new, limits="limits = { max_outputs = 1 }")
    if is_told:
        secured.gateway.process.send_signal(signal.SIGHUP)
    until(lambda: secured.call(secured.nobody, "first") is UNAUTHENTICATED, "the first key is unknown")
    assert secured.call(secured.nobody, new) is grpc.StatusCode.OK
    assert secured.call(secured.nobody, new, n=2) is grpc.StatusCode.INVALID_ARGUMENT


def test_a_file_that_cannot_be_used_changes_nothing(secured: Secured) -> None:
    secured.write_keys("kept")
    until(lambda: secured.call(secured.nobody, "kept") is grpc.StatusCode.OK, "the key is known")
    for broken, words in (
        ("[tenants.acme\n", "is not TOML"),
        ("", "tenants: none are left"),
        ('[tenants.acme]\napi_keys = ["pg-the-key-itself"]\n', r"tenants\.acme\.api_keys: \(not shown\)"),
    ):
        secured.config.write_text(broken)
        secured.gateway.process.send_signal(signal.SIGHUP)
        secured.gateway.logged(f"(cannot be used, so the old one stays: .*{words})")
        assert secured.call(secured.nobody, "kept") is grpc.StatusCode.OK


def test_a_new_certificate_serves_new_connections(secured: Secured, tmp_path: Path) -> None:
    secured.write_keys("first")
    successor = Authority(tmp_path, "successor")
    later = successor.server("later")
    before = [path.read_bytes() for path in secured.gateway_pair]
    try:
        secured.gateway_pair.certificate.write_bytes(later.certificate.read_bytes())
        secured.gateway_pair.key.write_bytes(later.key.read_bytes())
        assert secured.call(secured.acme, authority=successor) is grpc.StatusCode.OK
        assert secured.call(secured.acme) is UNAVAILABLE
    finally:
        for path, content in zip(secured.gateway_pair, before, strict=True):
            path.write_bytes(content)
    assert secured.call(secured.acme) is grpc.StatusCode.OK


def test_the_worker_answers_nobody_but_its_gateway(secured: Secured) -> None:
    ca, pair = str(secured.authority.file), secured.nobody
    with grpc.secure_channel(secured.worker_address, client_credentials(ca)) as without:
        stub = worker_pb2_grpc.WorkerStub(without)
        with pytest.raises(grpc.RpcError) as refusal:
            stub.Describe(worker_pb2.DescribeRequest(), timeout=HANG_SECONDS)
        assert refusal.value.code() is UNAVAILABLE
    # A certificate opens the connection; only the proof opens the methods.
    credentials = client_credentials(ca, str(pair.certificate), str(pair.key))
    with grpc.secure_channel(secured.worker_address, credentials) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.RpcError) as refusal:
            stub.Describe(worker_pb2.DescribeRequest(), timeout=HANG_SECONDS)
        assert refusal.value.code() is UNAUTHENTICATED


def test_no_log_holds_a_key_or_the_proof(secured: Secured) -> None:
    secret = BlockHasher(bytes.fromhex(HASH_KEY)).derive(ACCESS_PURPOSE)
    logs = secured.gateway.log + secured.worker.log
    private = [line for line in secured.gateway_pair.key.read_text().splitlines() if not line.startswith("-")]
    for word in (HASH_KEY, secret.hex(), str(secret), "pg-the-key-itself", *private):
        assert word not in logs
