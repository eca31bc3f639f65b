"""One stream to a worker: names of its own for calls, and nothing kept of those that have ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from prefixgate.gateway.errors import NoWorkerError
from prefixgate.gateway.worker_session import WorkerSession
from prefixgate.proto import worker_pb2, worker_pb2_grpc
from tests.gateway.fake_worker import FakeSession, FakeWorker, serving
from tests.gateway.rig import run


@asynccontextmanager
async def open_session(path: Path) -> AsyncIterator[tuple[WorkerSession, FakeSession, "asyncio.Task[str]"]]:
    """A session, the worker's end of it, and the task that runs it."""
    worker = FakeWorker()
    async with serving(worker, path) as address, grpc.aio.insecure_channel(address) as channel:
        session = WorkerSession(worker_pb2_grpc.WorkerStub(channel).Session(), worker_pb2.Hello(gateway="me"))
        running = asyncio.create_task(session.run())
        yield session, await worker.sessions.get(), running
        running.cancel()


def test_calls_have_names_of_their_own_and_leave_nothing_behind(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_session(tmp_path / "s") as (session, remote, _):
            assert remote.hello.gateway == "me"
            calls = [session.submit(worker_pb2.Submit(call_id=7, request_id="same")) for _ in range(4)]
            received = [await remote.calls.get() for _ in calls]
            assert len({call.call_id for call in calls}) == 4
            assert [call.submit.call_id for call in received] == [call.call_id for call in calls]
            assert session.num_calls == 4
            await received[0].end()
            assert (await calls[0].receive()).HasField("end")
            assert session.num_calls == 3
            calls[1].close()
            calls[2].cancel_output(0)
            assert session.num_calls == 2
            assert not (await received[1].cancels.get()).HasField("output")
            assert (await received[2].cancels.get()).HasField("output")

    run(test())


def test_the_streams_end_ends_what_is_left_and_closes_the_door(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_session(tmp_path / "s") as (session, remote, running):
            calls = [session.submit(worker_pb2.Submit()) for _ in range(3)]
            for _ in calls:
                await remote.calls.get()
            remote.close(grpc.StatusCode.INTERNAL, "the engine died")
            assert await running == "its stream ended with INTERNAL: the engine died"
            ends = [(await call.receive()).end.code for call in calls]
            assert ends == [grpc.StatusCode.UNAVAILABLE.value[0]] * 3
            assert session.num_calls == 0
            with pytest.raises(NoWorkerError):
                session.submit(worker_pb2.Submit())

    run(test())


def test_a_session_that_is_stopped_ends_its_calls(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_session(tmp_path / "s") as (session, remote, running):
            call = session.submit(worker_pb2.Submit())
            running.cancel()
            assert (await call.receive()).end.code == grpc.StatusCode.UNAVAILABLE.value[0]
            await remote.closed.wait()
            assert running.cancelled()

    run(test())
