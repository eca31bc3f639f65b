"""One call in the hands of a worker: what has come of it and was not taken yet."""

import asyncio
from collections.abc import Callable

from prefixgate.proto import generation_pb2, worker_pb2


class WorkerCall:
    """The receiving end of a call, for one reader.

    News that nobody took yet are kept as *one* event, to which later ones are added. So a client that reads slowly
    costs at most its own call's tokens in memory and delays nobody: neither the stream, which is shared, nor the
    engine. Stopping the stream was rejected, as it would stop everyone's calls; so was ending the call, which is paid
    for.
    """

    def __init__(self, call_id: int, cancel: Callable[[worker_pb2.Cancel], None]) -> None:
        """``cancel`` tells the worker; it is not called once the call has ended."""
        self.call_id = call_id
        self._cancel = cancel
        self.is_answered = False
        """Whether the worker has sent anything of its answer."""
        self._ended = False
        self._news = asyncio.Event()
        self._outputs: dict[int, worker_pb2.OutputTokens] = {}
        self._prompt_logprobs: list[generation_pb2.TokenLogprob] = []
        self._prefill: worker_pb2.Prefill | None = None
        self._end: worker_pb2.CallEnd | None = None

    def deliver(self, event: worker_pb2.CallEvent) -> None:
        """Add an event. Whatever comes after the end is dropped."""
        if self._ended:
            return
        self.is_answered |= bool(event.outputs or event.prompt_logprobs)
        for output in event.outputs:
            if output.index in self._outputs:
                # Token ids and log-probabilities are appended, and a finish reason is taken over.
                self._outputs[output.index].MergeFrom(output)
            else:
                self._outputs[output.index] = output
        self._prompt_logprobs += event.prompt_logprobs
        if event.HasField("prefill"):
            self._prefill = event.prefill
        if event.HasField("end"):
            self._ended, self._end = True, event.end
        self._news.set()

    async def receive(self) -> worker_pb2.CallEvent:
        """Wait for news and take all there are. The event with ``end`` is the last: not to be called after it."""
        await self._news.wait()
        self._news.clear()
        event = worker_pb2.CallEvent(
            call_id=self.call_id,
            outputs=self._outputs.values(),
            end=self._end,
            prompt_logprobs=self._prompt_logprobs,
            prefill=self._prefill,
        )
        self._outputs, self._prompt_logprobs, self._prefill = {}, [], None
        return event

    def cancel_output(self, index: int) -> None:
        """Tell the worker that an output is no longer wanted; the others go on."""
        if not self._ended:
            self._cancel(worker_pb2.Cancel(call_id=self.call_id, output=index))

    @property
    def num_untaken(self) -> int:
        """Tokens that have come and that nobody took."""
        return sum(len(output.token_ids) for output in self._outputs.values())

    def close(self) -> None:
        """Stop listening; a call that has not ended is cancelled. Idempotent, and due on every path."""
        if not self._ended:
            self._ended = True
            self._cancel(worker_pb2.Cancel(call_id=self.call_id))
