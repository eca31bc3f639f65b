"""A worker process's own door, as it is opened by `WorkerServer`."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixgate.cache.hashing import BlockHasher
from prefixgate.config.settings import SettingsError
from prefixgate.proto import worker_pb2, worker_pb2_grpc
from prefixgate.proto.access import ACCESS_PURPOSE, proving
from prefixgate.worker.server import WorkerServer
from tests.certificates import Authority
from tests.worker.hosting import HANG_SECONDS
from tests.worker.test_server import KEY, SERVING, running, settings


def test_a_worker_answers_on_its_socket_only_who_has_its_hash_key() -> None:
    other = BlockHasher(KEY[::-1] + b"\1").derive(ACCESS_PURPOSE)

    async def scenario() -> None:
        async with running() as worker:
            await worker.until(SERVING)
            assert (await worker.stub.Describe(worker_pb2.DescribeRequest())).model
            async with grpc.aio.insecure_channel(worker.listen) as bare:
                for channel in (bare, proving(bare, other)):
                    stub: Any = worker_pb2_grpc.WorkerStub(channel)
                    for call in (
                        stub.Describe(worker_pb2.DescribeRequest(), timeout=HANG_SECONDS),
                        stub.Report(worker_pb2.ReportRequest(tenant="acme"), timeout=HANG_SECONDS),
                        stub.Session(timeout=HANG_SECONDS).read(),
                    ):
                        with pytest.raises(grpc.aio.AioRpcError) as refusal:
                            await call
                        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(scenario())


def test_tls_files_that_cannot_be_used_are_refused_by_their_setting(tmp_path: Path) -> None:
    pair = Authority(tmp_path).server()
    wrong = settings("127.0.0.1:0", tls_cert=str(pair.certificate), tls_key=str(tmp_path / "none.key"))

    async def scenario() -> None:
        with pytest.raises(SettingsError, match=r"worker\.tls_cert: .*none\.key: No such file"):
            await WorkerServer(wrong, KEY).run()

    asyncio.run(scenario())
