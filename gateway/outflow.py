"""Between a generation and its client: what the client has not taken yet becomes one message."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing

from prefixgate.proto import gateway_pb2

MAX_WAITING_TOKENS = 8192
"""Of one call, as deltas. Beyond that the call's further tokens wait as bare ids, where the worker's stream is read."""

_MAX_WAITING_MESSAGES = 64
"""After which they are merged, since a message takes more memory than what is in it."""

Response = gateway_pb2.GenerateResponse


class Outflow:
    """Lets one generation run at its own pace, and its client read at another.

    So a slow reader delays neither the generation nor anyone else, a stop string ends the output when it is generated
    and not when it is read, and times are measured where they arise. What waits is bounded twice: here by
    ``MAX_WAITING_TOKENS``, and beyond by the length that the call asked for. Ending a slow call was rejected, as the
    answer is paid for; so was a queue of messages, which would be as long as the answer.
    """

    def __init__(self, responses: AsyncGenerator[Response, None]) -> None:
        """Take a generation that has not begun. It is closed when ``run`` is over, however that is."""
        self._responses = responses
        self._waiting: list[Response] = []
        self._num_tokens = 0
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    async def run(self, write: Callable[[Response], Awaitable[None]]) -> None:
        """Write everything. Raises what the generation raises, after all that came before, and what ``write`` does."""
        generating = asyncio.create_task(self._generate())
        try:
            while not generating.done() or self._waiting:
                await self._changed.wait()
                self._changed.clear()
                for message in self._take():
                    await write(message)
            await generating
        finally:
            generating.cancel()
            # Until the generation is closed, its call lives on at the worker.
            await asyncio.wait([generating])

    async def _generate(self) -> None:
        try:
            async with aclosing(self._responses) as responses:
                async for response in responses:
                    self._waiting.append(response)
                    self._num_tokens += sum(len(delta.token_ids) for delta in response.deltas)
                    self._changed.set()
                    if len(self._waiting) >= _MAX_WAITING_MESSAGES:
                        self._waiting = list(merged(self._waiting))
                    while self._num_tokens >= MAX_WAITING_TOKENS:
                        self._taken.clear()
                        await self._taken.wait()
        finally:
            self._changed.set()

    def _take(self) -> list[Response]:
        waiting = self._waiting
        self._waiting, self._num_tokens = [], 0
        self._taken.set()
        return waiting if len(waiting) < 2 else list(merged(waiting))


def merged(messages: Iterable[Response]) -> Iterable[Response]:
    """Merge successive messages to one, and the completion, which stands alone, if it is among them."""
    whole = Response()
    deltas: dict[int, gateway_pb2.OutputDelta] = {}
    texts: dict[int, list[str]] = {}
    for message in messages:
        if message.HasField("completion"):
            yield from _finished(whole, deltas, texts)
            yield message
            return
        whole.prompt_logprobs.extend(message.prompt_logprobs)
        for delta in message.deltas:
            texts.setdefault(delta.index, []).append(delta.text)
            if delta.index not in deltas:
                deltas[delta.index] = whole.deltas.add()
            # Ids and log-probabilities are appended; what ended the output is in its last delta alone.
            deltas[delta.index].MergeFrom(delta)
    yield from _finished(whole, deltas, texts)


def _finished(
    whole: Response, deltas: dict[int, gateway_pb2.OutputDelta], texts: dict[int, list[str]]
) -> Iterable[Response]:
    for index, parts in texts.items():
        deltas[index].text = "".join(parts)
    if whole.deltas or whole.prompt_logprobs:
        yield whole
