"""The one stream between this gateway and a worker, and the calls that travel on it."""

import asyncio
import itertools
import logging
from collections.abc import Iterable

import grpc
import grpc.aio

from prefixgate.gateway.errors import NoWorkerError, is_being_cancelled
from prefixgate.gateway.worker_call import WorkerCall
from prefixgate.proto import worker_pb2

logger = logging.getLogger(__name__)

Stream = grpc.aio.StreamStreamCall[worker_pb2.SessionRequest, worker_pb2.StepMessage]


class WorkerSession:
    """Sends submits and cancels up, and hands what each step brings to the calls it is for.

    Every call that was submitted gets exactly one end: the worker's, or UNAVAILABLE when the stream ends without it,
    however well the stream itself ended.
    """

    def __init__(self, stream: Stream, hello: worker_pb2.Hello) -> None:
        self._stream = stream
        self.is_open = True
        """Whether calls can be submitted. False for good once the stream has ended."""
        # Never used twice on a stream; names that clients give to their calls play no part.
        self._ids = itertools.count(1)
        self._calls: dict[int, WorkerCall] = {}
        # Bounded by the live calls: each puts one submit, a cancel for each output, and one for itself.
        self._outgoing: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        self._outgoing.put_nowait(worker_pb2.SessionRequest(hello=hello))

    @property
    def num_calls(self) -> int:
        """Calls that have not ended."""
        return len(self._calls)

    def submit(self, submit: worker_pb2.Submit) -> WorkerCall:
        """Start a call; its ``call_id`` is chosen here. Raises NoWorkerError once the stream has ended."""
        if not self.is_open:
            raise NoWorkerError
        submit.call_id = next(self._ids)
        call = self._calls[submit.call_id] = WorkerCall(submit.call_id, self._send_cancel)
        self._outgoing.put_nowait(worker_pb2.SessionRequest(submit=submit))
        return call

    async def run(self) -> str:
        """Carry messages until the stream ends, and return why it did, for the log."""
        writer = asyncio.create_task(self._write())
        try:
            async for message in self._stream:
                for event in message.events:
                    self._deliver(event)
            return f"its stream ended with {(await self._stream.code()).name}: {await self._stream.details()}"
        except grpc.aio.AioRpcError as error:
            return f"its stream ended with {error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            # Raised by the stream too, when `_write` has closed it.
            if is_being_cancelled():
                raise
            return "its stream was closed by this gateway"
        finally:
            self.is_open = False
            writer.cancel()
            self._stream.cancel()
            self._end_calls()
            await asyncio.wait([writer])

    async def _write(self) -> None:
        try:
            while True:
                await self._stream.write(await self._outgoing.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream has ended; the reader learns the same, and why.
            return
        except Exception:
            logger.exception("Writing to the worker failed; its stream is closed")
            self._stream.cancel()

    def _deliver(self, event: worker_pb2.CallEvent) -> None:
        call = self._calls.get(event.call_id)
        if call is None:
            # Cancelled a moment ago: these were on their way.
            return
        call.deliver(event)
        if event.HasField("end"):
            del self._calls[event.call_id]

    def give_up_unanswered(self) -> None:
        """End the calls that nothing has come of with UNAVAILABLE, so that they can be sent to another worker.

        Those that have begun to answer stay: their answers can still come, and nobody else could go on with them.
        """
        unanswered = [call for call in self._calls.values() if not call.is_answered]
        for call in unanswered:
            self._send_cancel(worker_pb2.Cancel(call_id=call.call_id))
        self._end(unanswered, "the worker does not answer")

    def _send_cancel(self, cancel: worker_pb2.Cancel) -> None:
        if not cancel.HasField("output"):
            self._calls.pop(cancel.call_id, None)
        if self.is_open:
            self._outgoing.put_nowait(worker_pb2.SessionRequest(cancel=cancel))

    def _end_calls(self) -> None:
        self._end(self._calls.values(), "the worker went away")
        self._calls.clear()

    def _end(self, calls: Iterable[WorkerCall], message: str) -> None:
        end = worker_pb2.CallEnd(code=grpc.StatusCode.UNAVAILABLE.value[0], message=message)
        for call in calls:
            call.deliver(worker_pb2.CallEvent(call_id=call.call_id, end=end))
