"""Threads that encode, replaced before what they remember grows large.

The library that encodes remembers words: for a BPE tokenizer ten thousand in each thread, each of up to 256 bytes, with
some forty times its length in memory. Where a tokenizer takes a whole prompt for a word, or clients send long words,
that comes to 40 megabytes a thread and more. A bound can be set on a model that is built part by part, but not on a
tokenizer that is read from a file; what a thread remembers, however, ends with the thread. (A Unigram tokenizer
remembers as many words once, for all threads.)
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

MAX_CHARACTERS = 1 << 20
"""Of text that the threads encode together before new ones take their place: a few tens of megabytes remembered at
most, and a fraction of a second of encoding, so that remembering anew costs little."""


class EncodingThreads:
    """Runs work in threads, from one event loop: so many pieces at a time, and the tenants that wait in turns.

    In order of arrival was rejected: one tenant's thousand long prompts would make everybody's next one wait for all
    of them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads = self._start()
        self._characters = 0
        """Given to the present threads."""
        self._num_running = 0
        """Pieces of work in threads, those that were replaced included: a bound of each would be none of all."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant, the one whose turn is next first."""

    async def run(self, work: Callable[[], T], *, characters: int, tenant: str) -> T:
        """Run work that encodes so much text for a tenant, and return what it returns.

        When cancelled, the thread ends what it has begun, and the result is dropped.
        """
        await self._turn(tenant)
        try:
            running = self._current(characters).submit(work)
        except BaseException:
            self._pass_on()
            raise
        loop = asyncio.get_running_loop()
        # Of the thread's own future, since a caller who gives up does not end what the thread does.
        running.add_done_callback(lambda done: self._ended(done, loop))
        return await asyncio.wrap_future(running)

    def stop(self) -> None:
        """Drop what has not begun; threads end when they have done what has. Nothing can be run after this."""
        for line in self._waiting.values():
            for turn in line:
                turn.cancel()
        self._waiting.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _current(self, characters: int) -> ThreadPoolExecutor:
        if self._characters >= MAX_CHARACTERS:
            self._characters = 0
            # They end when they have done what they were given.
            self._threads.shutdown(wait=False)
            self._threads = self._start()
        self._characters += characters
        return self._threads

    async def _turn(self, tenant: str) -> None:
        if self._num_running < self._count:
            self._num_running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._pass_on()  # it came in the same moment
            raise

    def _ended(self, _: "Future[T]", loop: asyncio.AbstractEventLoop) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._pass_on)

    def _pass_on(self) -> None:
        """Let the next tenant's first piece of work begin where one has ended."""
        while self._waiting:
            tenant, line = next(iter(self._waiting.items()))
            turn = line.popleft()
            if not line:
                del self._waiting[tenant]
            if turn.done():
                continue  # its caller has given up
            if line:  # behind the others
                self._waiting[tenant] = self._waiting.pop(tenant)
            turn.set_result(None)
            return
        self._num_running -= 1

    def _start(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._count, "encode")
