"""An engine over a loaded model, as benchmarks drive it: step by step, or through the worker's service."""

import asyncio
import contextlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Sequence

import grpc.aio
from grpc import StatusCode

from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.proto import generation_pb2, worker_pb2, worker_pb2_grpc
from prefixgate.proto.transport import CHANNEL_OPTIONS, PROTOCOL_VERSION, SERVER_OPTIONS
from prefixgate.worker.engine import Engine
from prefixgate.worker.engine_thread import EngineThread
from prefixgate.worker.limits import Limits
from prefixgate.worker.model_runner import ModelRunner
from prefixgate.worker.observations import Observations
from prefixgate.worker.outbox import News
from prefixgate.worker.request import End, Request, SamplingParams
from prefixgate.worker.service import ServedModel, WorkerService
from prefixgate.worker.wire import describe

TENANT = "benchmark"
LIMITS = Limits(max_batch_tokens=512, max_running=64, max_waiting=1024)
"""Those of a worker without settings."""


class BenchEngine:
    """An engine with an empty cache over a runner's pool, and what its calls heard."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.cache = PrefixCache(runner.storage.num_blocks, BlockHasher(bytes(16)))
        self.observations = Observations([TENANT])
        self.engine = Engine(runner, self.cache, LIMITS, self.observations)
        self._tokens: dict[Request, list[int]] = {}

    def deliver(self, step: int, news: Sequence[News]) -> None:
        """Take the news of a step."""
        for item in news:
            if item.end is not None and item.end.code is not StatusCode.OK:
                raise RuntimeError(f"a call ended with {item.end}")
            for token_ids in item.token_ids.values():
                self._tokens[item.request].extend(token_ids)

    def submit(self, prompt: list[int], max_tokens: int) -> Request:
        """Queue a greedy call that ends at ``max_tokens``."""
        scope = CacheScope(TENANT, self.runner.spec.name)
        request = Request(prompt, scope, SamplingParams(max_tokens, ignore_eos=True), self)
        self._tokens[request] = []
        self.engine.submit(request)
        return request

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Serve calls that arrive together, to their ends."""
        requests = [self.submit(prompt, max_tokens) for prompt in prompts]
        while self.engine.step():
            pass
        return [self._tokens.pop(request) for request in requests]


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
