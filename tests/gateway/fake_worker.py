"""A worker on a real socket that does what a test tells it: no model, no pool, only the protocol."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from prefixgate.cache.hashing import BlockHasher
from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2, worker_pb2_grpc
from prefixgate.proto.transport import PROTOCOL_VERSION, SERVER_OPTIONS, text_digest
from tests.gateway import sample_tokenizers

HASH_KEY = b"0123456789abcdef"
FINGERPRINT = BlockHasher(HASH_KEY).fingerprint
STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH

Context = grpc.aio.ServicerContext[Any, Any]


def describe(**changes: Any) -> worker_pb2.ModelDescription:
    """A sound description of a byte-level model, with some fields changed after the digest was taken."""
    tokenizer = sample_tokenizers.byte_level()
    description = worker_pb2.ModelDescription(
        model="fake",
        fingerprint="f00d",
        vocabulary_size=1000,
        eos_ids=[0],
        context_length=2048,
        block_size=16,
        max_call_tokens=4096,
        hash_key_fingerprint=FINGERPRINT,
        incarnation="life-1",
        tokenizer=tokenizer,
        chat_template=sample_tokenizers.CHATML,
        text_digest=text_digest(tokenizer, sample_tokenizers.CHATML),
        protocol_version=PROTOCOL_VERSION,
    )
    for name, value in changes.items():
        setattr(description, name, value)
    return description


class FakeCall:
    """A call as the worker sees it; the test answers it."""

    def __init__(self, session: "FakeSession", submit: worker_pb2.Submit) -> None:
        self.submit = submit
        self.cancels: asyncio.Queue[worker_pb2.Cancel] = asyncio.Queue()
        self._session = session

    def event(
        self,
        *outputs: tuple[int, Sequence[int]] | tuple[int, Sequence[int], generation_pb2.FinishReason],
        end: worker_pb2.CallEnd | None = None,
    ) -> worker_pb2.CallEvent:
        """Make an event: (index, ids) or (index, ids, finish reason) for each output."""
        event = worker_pb2.CallEvent(call_id=self.submit.call_id, end=end)
        for index, ids, *reason in outputs:
            event.outputs.add(index=index, token_ids=ids, finish_reason=reason[0] if reason else None)
        return event

    async def send(self, *outputs: Any) -> None:
        """Send a step with news of this call alone."""
        await self._session.step(self.event(*outputs))

    async def end(self, code: grpc.StatusCode = grpc.StatusCode.OK, message: str = "", **usage: Any) -> None:
        """End the call."""
        end = worker_pb2.CallEnd(code=code.value[0], message=message, usage=generation_pb2.Usage(**usage))
        await self._session.step(self.event(end=end))

    async def progress(self, computed: int, cached: int = 0) -> None:
        """Tell how far the prompt of a warm is."""
        event = self.event()
        event.prefill.CopyFrom(worker_pb2.Prefill(cached_tokens=cached, computed_tokens=computed))
        await self._session.step(event)

    async def refuse(self, message: str, retry_seconds: float) -> None:
        """End the call as a full worker does."""
        code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        end = worker_pb2.CallEnd(code=code, message=message, retry_seconds=retry_seconds)
        await self._session.step(self.event(end=end))

    async def finish(self, ids: Sequence[int], reason: generation_pb2.FinishReason = LENGTH, **usage: Any) -> None:
        """Give output 0 its tokens and end the call."""
        await self.send((0, ids, reason))
        await self.end(prompt_tokens=len(self.submit.token_ids), completion_tokens=len(ids), **usage)


class FakeSession:
    """One gateway's stream."""

    def __init__(self, hello: worker_pb2.Hello, context: Context) -> None:
        self.hello = hello
        self.calls: asyncio.Queue[FakeCall] = asyncio.Queue()
        self.closed = asyncio.Event()
        self._by_id: dict[int, FakeCall] = {}
        self._context = context
        self._step = 0
        self._writing = asyncio.Lock()
        self._ending: asyncio.Future[tuple[grpc.StatusCode, str]] = asyncio.get_running_loop().create_future()

    async def step(self, *events: worker_pb2.CallEvent) -> None:
        # gRPC takes one write at a time.
        async with self._writing:
            self._step += 1
            await self._context.write(worker_pb2.StepMessage(step=self._step, events=events))

    def close(self, code: grpc.StatusCode = grpc.StatusCode.OK, message: str = "") -> None:
        """End the stream with a status."""
        self._ending.set_result((code, message))

    async def run(self) -> None:
        reader = asyncio.ensure_future(self._read())
        try:
            waiting: set[asyncio.Future[Any]] = {reader, self._ending}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if self._ending.done() and self._ending.result()[0] is not grpc.StatusCode.OK:
                await self._context.abort(*self._ending.result())
        finally:
            reader.cancel()
            self.closed.set()

    async def _read(self) -> None:
        while (request := await self._context.read()) is not grpc.aio.EOF:
            if request.HasField("submit"):
                call = self._by_id[request.submit.call_id] = FakeCall(self, request.submit)
                self.calls.put_nowait(call)
            elif request.HasField("cancel"):
                call = self._by_id[request.cancel.call_id]
                call.cancels.put_nowait(request.cancel)
                if not request.cancel.HasField("output"):
                    del self._by_id[request.cancel.call_id]


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Answers what the test sets, and offers the sessions that gateways open."""

    def __init__(self, description: worker_pb2.ModelDescription | None = None) -> None:
        self.description: worker_pb2.ModelDescription | None = description or describe()
        """None makes Describe fail, as while a model loads."""
        self.described = asyncio.Queue[None]()
        self.sessions: asyncio.Queue[FakeSession] = asyncio.Queue()
        self.batches: asyncio.Queue[worker_pb2.EventBatch | grpc.StatusCode] = asyncio.Queue()
        """What it says of its cache; a status ends the stream."""
        self.followed: asyncio.Queue[str] = asyncio.Queue()
        """The incarnations that gateways asked for."""
        self.answers = asyncio.Event()
        """Cleared, it hangs."""
        self.answers.set()
        self.report = gateway_pb2.WorkerStats(incarnation="life-1")
        self.survey = worker_pb2.WorkerSurvey(incarnation="life-1")
        self.drawn_map = worker_pb2.PoolMap()
        """What it adds to its survey where a map is asked for."""
        self.map_sizes: asyncio.Queue[int] = asyncio.Queue()
        """Most cells of each map that was asked for."""
        self.reported_tenants: list[str] = []
        self.asked: list[Any] = []
        """What was asked of the cache."""

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.ModelDescription:
        self.described.put_nowait(None)
        if self.description is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is loading")
        return self.description

    async def Session(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]
        first = await context.read()
        session = FakeSession(first.hello, context)
        self.sessions.put_nowait(session)
        await session.run()

    async def Events(self, request: worker_pb2.EventsRequest, context: Context) -> None:  # type: ignore[override]
        self.followed.put_nowait(request.incarnation)
        while isinstance(batch := await self.batches.get(), worker_pb2.EventBatch):
            await context.write(batch)
        await context.abort(batch, "the events end")

    async def Report(self, request: worker_pb2.ReportRequest, context: Context) -> gateway_pb2.WorkerStats:
        await self.answers.wait()
        if request.tenant:  # else a probe
            self.reported_tenants.append(request.tenant)
        return self.report

    async def Survey(self, request: worker_pb2.SurveyRequest, context: Context) -> worker_pb2.WorkerSurvey:
        if not request.max_cells:
            return self.survey
        self.map_sizes.put_nowait(request.max_cells)
        await self.answers.wait()
        survey = worker_pb2.WorkerSurvey(map=self.drawn_map)
        survey.MergeFrom(self.survey)
        return survey

    # Cache control: all is well and nothing is there.

    async def Explain(self, request: worker_pb2.CachedPrompt, context: Context) -> gateway_pb2.ExplainResponse:
        self.asked.append(request)
        return gateway_pb2.ExplainResponse(prompt_tokens=len(request.token_ids))

    async def Pin(self, request: worker_pb2.PinCommand, context: Context) -> gateway_pb2.PinResponse:
        self.asked.append(request)
        return gateway_pb2.PinResponse()

    async def Unpin(self, request: worker_pb2.UnpinCommand, context: Context) -> gateway_pb2.UnpinResponse:
        self.asked.append(request)
        return gateway_pb2.UnpinResponse()

    async def ListPins(self, request: worker_pb2.ListPinsCommand, context: Context) -> gateway_pb2.ListPinsResponse:
        self.asked.append(request)
        return gateway_pb2.ListPinsResponse()

    async def Flush(self, request: worker_pb2.FlushCommand, context: Context) -> gateway_pb2.FlushResponse:
        self.asked.append(request)
        return gateway_pb2.FlushResponse()


@asynccontextmanager
async def serving(worker: FakeWorker, path: Path) -> AsyncIterator[str]:
    """Serve a worker on a Unix socket, and give its address. Leaving kills it: streams break off."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    address = f"unix:{path}"
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def answer_all(worker: FakeWorker, script: Callable[[FakeCall], Coroutine[Any, Any, None]]) -> None:
    """Answer every call of every session by a script, each in a task of its own. Runs until cancelled."""
    async with asyncio.TaskGroup() as tasks:

        async def serve(session: FakeSession) -> None:
            while True:
                tasks.create_task(script(await session.calls.get()))

        while True:
            tasks.create_task(serve(await worker.sessions.get()))
