"""A benchmark's engine behind the worker's service, and a client of it."""

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Sequence

import grpc.aio
from grpc import StatusCode

from benchmarks.bench_engine import LIMITS, TENANT, BenchEngine
from prefixgate.proto import generation_pb2, worker_pb2, worker_pb2_grpc
from prefixgate.proto.transport import CHANNEL_OPTIONS, PROTOCOL_VERSION, SERVER_OPTIONS
from prefixgate.worker.engine_thread import EngineThread
from prefixgate.worker.request import End
from prefixgate.worker.service import ServedModel, WorkerService
from prefixgate.worker.wire import describe


class Client:
    """A gateway's side of the worker's stream, one call at a time."""

    def __init__(self, stub: "worker_pb2_grpc.WorkerAsyncStub", description: worker_pb2.ModelDescription) -> None:
        self._stream = stub.Session()
        self._description = description
        self._calls = 0

    async def greet(self) -> None:
        """Open the stream."""
        hello = worker_pb2.Hello(
            gateway="benchmark",
            protocol_version=PROTOCOL_VERSION,
            incarnation=self._description.incarnation,
            hash_key_fingerprint=self._description.hash_key_fingerprint,
        )
        await self._stream.write(worker_pb2.SessionRequest(hello=hello))

    async def first_token_ms(self, prompt: Sequence[int]) -> float:
        """Submit a call for one token; returns how long it took to come."""
        self._calls += 1
        submit = worker_pb2.Submit(
            call_id=self._calls,
            tenant=TENANT,
            token_ids=prompt,
            sampling=generation_pb2.SamplingParams(max_tokens=1, ignore_eos=True),
            n=1,
        )
        begin = time.perf_counter()
        await self._stream.write(worker_pb2.SessionRequest(submit=submit))
        first, ended = 0.0, False
        while not ended:
            message = await self._stream.read()
            if not isinstance(message, worker_pb2.StepMessage):
                raise RuntimeError("the worker ended the stream")
            for event in message.events:
                if event.call_id == self._calls:
                    if event.outputs and not first:
                        first = (time.perf_counter() - begin) * 1e3
                    ended = ended or event.HasField("end")
        if not first:
            raise RuntimeError("a call ended without a token")
        return first


@contextlib.asynccontextmanager
async def serve(bench: BenchEngine) -> AsyncIterator[Client]:
    """Serve an engine on a Unix socket, as a worker does."""
    spec = bench.runner.spec
    service = WorkerService()
    description = describe(
        spec,
        block_size=bench.cache.block_size,
        max_call_blocks=bench.cache.num_blocks,
        hash_key_fingerprint=bench.cache.hasher.fingerprint,
        incarnation=secrets.token_hex(16),
    )
    thread = EngineThread(bench.engine, lambda: None)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        address = f"unix:{folder}/worker.sock"
        server.add_insecure_port(address)
        await server.start()
        service.serve(ServedModel(spec, description, bench.engine, bench.observations, LIMITS.max_running, pin_limit=0))
        thread.start()
        try:
            async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                client = Client(worker_pb2_grpc.WorkerStub(channel), description)
                await client.greet()
                yield client
        finally:
            thread.stop(End(StatusCode.UNAVAILABLE))
            await asyncio.to_thread(thread.join, 30.0)
            await server.stop(None)
