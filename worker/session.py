"""One gateway's stream: its submits and cancels up, what each step has for its calls down."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from grpc import StatusCode

from prefixgate.proto import worker_pb2
from prefixgate.proto.checks import check_submit
from prefixgate.proto.fields import FieldError
from prefixgate.worker.backlog import Backlog
from prefixgate.worker.engine import Engine
from prefixgate.worker.executor import FAULT
from prefixgate.worker.model_runner import ModelSpec
from prefixgate.worker.outbox import News
from prefixgate.worker.request import End, RefusedError, Request
from prefixgate.worker.wire import read_submit

logger = logging.getLogger(__name__)

MAX_BACKLOG_EVENTS = 4096
"""Events that wait to be sent before no more is read from the gateway: one that submits and never reads would else
make its ended calls pile up here."""

CODES = {code.value[0]: code for code in StatusCode}


class SessionEndedError(Exception):
    """The stream cannot go on, and the status it ends with."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Session:
    """The calls that came through one stream. Lives on the event loop, but for ``deliver``."""

    def __init__(
        self,
        engine: Engine,
        spec: ModelSpec,
        *,
        max_outputs: int,
        refusal: Callable[[], End | None],
        progress: asyncio.Event,
        call_ended: Callable[[Request, End], None] = lambda request, end: None,
    ) -> None:
        """``refusal`` tells with what end calls are refused at present, if they are; ``progress`` is set whenever
        something was sent. ``call_ended`` is told of each call that the engine has ended, and does not raise.
        """
        self._engine = engine
        self._spec = spec
        self._max_outputs = max_outputs
        self._refusal = refusal
        self._progress = progress
        self._call_ended = call_ended
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, Request] = {}
        self._backlog = Backlog()
        self._changed = asyncio.Event()
        self._sent = asyncio.Event()
        self._closing = False

    @property
    def is_idle(self) -> bool:
        """Whether no call is live and everything was sent."""
        return not self._calls and not len(self._backlog)

    def close(self) -> None:
        """Send what there is, then end the stream."""
        self._closing = True
        self._changed.set()

    def deliver(self, step: int, news: Sequence[News]) -> None:
        """Take the news of one step, on the engine's thread."""
        self._loop.call_soon_threadsafe(self._hear, step, news)

    async def run(
        self,
        requests: AsyncIterator[worker_pb2.SessionRequest],
        send: Callable[[worker_pb2.StepMessage], Awaitable[None]],
    ) -> None:
        """Follow the gateway's requests and send what it is to be told, until either side ends the stream.

        Whatever ends it, the calls that are left are cancelled. Raises SessionEndedError where the gateway broke the
        protocol or the worker closes.
        """
        reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(self._reader_ended)
        try:
            while not reader.done():
                await self._changed.wait()
                self._changed.clear()
                if len(self._backlog):
                    await send(self._backlog.take())
                    self._sent.set()
                    self._progress.set()
                    if len(self._backlog):
                        self._changed.set()
                elif self._closing:
                    raise SessionEndedError(StatusCode.UNAVAILABLE, "the worker is shutting down")
            reader.result()
        finally:
            reader.cancel()
            for request in self._calls.values():
                self._engine.cancel(request)
            self._calls.clear()
            self._progress.set()

    def _reader_ended(self, reader: "asyncio.Task[None]") -> None:
        if not reader.cancelled():
            reader.exception()  # retrieved here too: the stream may end by another cause, and nobody else would
        self._changed.set()

    async def _read(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for request in requests:
            if request.HasField("submit"):
                self._submit(request.submit)
            elif request.HasField("cancel"):
                self._cancel(request.cancel)
            else:
                kind = request.WhichOneof("message") or "an empty message"
                raise SessionEndedError(StatusCode.FAILED_PRECONDITION, f"{kind}: out of place after the first hello")
            while len(self._backlog) > MAX_BACKLOG_EVENTS:
                self._sent.clear()
                await self._sent.wait()

    def _submit(self, submit: worker_pb2.Submit) -> None:
        call_id = submit.call_id
        if call_id in self._calls or call_id in self._backlog:
            end = End(StatusCode.ALREADY_EXISTS, f"call_id: {call_id} is in use on this stream")
            self._engine.call_refused(end)
            self._backlog.refuse_duplicate(call_id, end)
            self._changed.set()
            return
        try:
            self._start(submit)
        except RefusedError as error:
            end = error.end
        except FieldError as error:
            end = End(CODES[error.code], error.message, field=error.field)
        except Exception:
            logger.exception("Request %r of tenant %r could not be started", submit.request_id, submit.tenant)
            end = FAULT
        else:
            return
        self._engine.call_refused(end)
        self._backlog.refuse(call_id, end)
        self._changed.set()

    def _start(self, submit: worker_pb2.Submit) -> None:
        refused = self._refusal()
        if refused is not None:
            raise RefusedError(*refused)
        check_submit(
            submit,
            vocabulary_size=self._spec.vocabulary_size,
            eos_ids=self._spec.eos_ids,
            context_length=self._spec.context_length,
            max_outputs=self._max_outputs,
        )
        request = read_submit(submit, self._spec, self)
        self._engine.submit(request)
        self._calls[submit.call_id] = request

    def _cancel(self, cancel: worker_pb2.Cancel) -> None:
        request = self._calls.get(cancel.call_id)
        if request is not None:
            self._engine.cancel(request, cancel.output if cancel.HasField("output") else None)

    def _hear(self, step: int, news: Sequence[News]) -> None:
        for item in news:
            if item.end is not None:
                self._calls.pop(item.request.call_id, None)
                self._call_ended(item.request, item.end)
        self._backlog.add(step, news)
        self._changed.set()
