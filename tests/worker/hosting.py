"""A worker's service on a real Unix socket, and a gateway's side of it."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from grpc import StatusCode

from prefixgate.proto import generation_pb2, worker_pb2, worker_pb2_grpc
from prefixgate.proto.transport import CHANNEL_OPTIONS, PROTOCOL_VERSION, SERVER_OPTIONS
from prefixgate.worker.engine_thread import EngineThread
from prefixgate.worker.readable import ReadableRequests
from prefixgate.worker.request import End
from prefixgate.worker.service import ServedModel, WorkerService
from prefixgate.worker.wire import describe
from tests.worker.driver import Driver

HANG_SECONDS = 60.0
INCARNATION = "f00d"


@dataclass(eq=False)
class Heard:
    """What a gateway heard of one call."""

    outputs: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, "generation_pb2.FinishReason"] = field(default_factory=dict)
    ends: list[worker_pb2.CallEnd] = field(default_factory=list)

    @property
    def codes(self) -> list[int]:
        return [end.code for end in self.ends]


class GatewaySide:
    """One stream to a worker, read as it comes."""

    def __init__(self, stub: "worker_pb2_grpc.WorkerAsyncStub", description: worker_pb2.ModelDescription) -> None:
        self.description = description
        self.stream = stub.Session()
        self.messages: list[worker_pb2.StepMessage] = []
        self.calls: dict[int, Heard] = {}
        self._news = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def open(self, **changed: Any) -> "GatewaySide":
        """Say hello, with some fields changed, and begin to read."""
        hello: dict[str, Any] = {
            "gateway": "test",
            "protocol_version": PROTOCOL_VERSION,
            "incarnation": self.description.incarnation,
            "hash_key_fingerprint": self.description.hash_key_fingerprint,
        }
        # A stream that the worker has refused already cannot be written to; its status tells the test.
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self.stream.write(worker_pb2.SessionRequest(hello=worker_pb2.Hello(**(hello | changed))))
        self._reader = asyncio.create_task(self._read())
        return self

    async def submit(
        self, call_id: int, token_ids: Sequence[int], max_tokens: int = 4, *, n: int = 1, **fields: Any
    ) -> Heard:
        sampling = generation_pb2.SamplingParams(max_tokens=max_tokens, **fields.pop("sampling", {}))
        submit = worker_pb2.Submit(
            call_id=call_id,
            tenant=fields.pop("tenant", "acme"),
            token_ids=token_ids,
            sampling=sampling,
            n=n,
            **fields,
        )
        await self.stream.write(worker_pb2.SessionRequest(submit=submit))
        return self.calls.setdefault(call_id, Heard())

    async def cancel(self, call_id: int, output: int | None = None) -> None:
        await self.stream.write(worker_pb2.SessionRequest(cancel=worker_pb2.Cancel(call_id=call_id, output=output)))

    async def until(self, heard: Heard, *, tokens: int = 0, ends: int = 0) -> None:
        """Wait until so many tokens of output 0, or so many ends of a call were heard."""
        async with asyncio.timeout(HANG_SECONDS):
            while len(heard.outputs.get(0, ())) < tokens or len(heard.ends) < ends:
                self._news.clear()
                await self._news.wait()

    async def status(self) -> tuple[StatusCode, str]:
        """Wait for the end of the stream."""
        async with asyncio.timeout(HANG_SECONDS):
            return await self.stream.code(), await self.stream.details() or ""

    async def _read(self) -> None:
        try:
            async for message in self.stream:
                self.messages.append(message)
                for event in message.events:
                    self._hear(self.calls.setdefault(event.call_id, Heard()), event)
                self._news.set()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return

    def _hear(self, heard: Heard, event: worker_pb2.CallEvent) -> None:
        for output in event.outputs:
            heard.outputs.setdefault(output.index, []).extend(output.token_ids)
            if output.finish_reason:
                heard.finished[output.index] = output.finish_reason
        if event.HasField("end"):
            heard.ends.append(event.end)


@dataclass(eq=False)
class Host:
    """A served engine, reached through a socket."""

    driver: Driver
    service: WorkerService
    stub: "worker_pb2_grpc.WorkerAsyncStub"
    address: str
    model: ServedModel

    async def gateway(self, **changed: Any) -> GatewaySide:
        return await GatewaySide(self.stub, self.model.description).open(**changed)

    async def until_idle(self) -> None:
        """Wait until the engine holds nothing for anyone."""
        assert await asyncio.to_thread(self.driver.engine.wait_until_idle, HANG_SECONDS)


@contextlib.asynccontextmanager
async def hosted(driver: Driver | None = None, *, serve: bool = True, threaded: bool = True) -> AsyncIterator[Host]:
    """Serve a driver's engine; without ``threaded`` the test takes the steps itself."""
    driver = driver or Driver()
    service = WorkerService()
    description = describe(
        driver.runner.spec,
        block_size=driver.cache.block_size,
        max_call_blocks=driver.cache.num_blocks,
        hash_key_fingerprint=driver.cache.hasher.fingerprint,
        incarnation=INCARNATION,
    )
    model = ServedModel(
        driver.runner.spec,
        description,
        driver.engine,
        driver.observations,
        driver.limits.max_running,
        driver.cache.pins.limit,
    )
    thread = EngineThread(driver.engine, lambda: None)
    server = grpc.aio.server(interceptors=[ReadableRequests()], options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    with tempfile.TemporaryDirectory(prefix="pg-") as directory:
        address = f"unix:{directory}/worker.sock"
        server.add_insecure_port(address)
        await server.start()
        if serve:
            service.serve(model)
        if threaded:
            thread.start()
        try:
            async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                yield Host(driver, service, stub, address, model)
        finally:
            if threaded:
                thread.stop(End(StatusCode.UNAVAILABLE))
                assert thread.join(HANG_SECONDS)
            await server.stop(None)


def on_host(scenario: Callable[[Host], Awaitable[None]], driver: Driver | None = None, **options: bool) -> None:
    """Run a scenario on an event loop of its own, with a host."""

    async def main() -> None:
        async with hosted(driver, **options) as host:
            await scenario(host)

    asyncio.run(main())
