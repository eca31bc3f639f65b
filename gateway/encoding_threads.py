"""Threads that encode, replaced before what they remember grows large.

The library that encodes remembers words: for a BPE tokenizer ten thousand in each thread, each of up to 256 bytes, with
some forty times its length in memory. Where a tokenizer takes a whole prompt for a word, or clients send long words,
that comes to 40 megabytes a thread and more. A bound can be set on a model that is built part by part, but not on a
tokenizer that is read from a file; what a thread remembers, however, ends with the thread. (A Unigram tokenizer
remembers as many words once, for all threads.)
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

MAX_CHARACTERS = 1 << 20
"""Of text that the threads encode together before new ones take their place: a few tens of megabytes remembered at
most, and a fraction of a second of encoding, so that remembering anew costs little."""


class EncodingThreads:
    """Runs work in threads, from one event loop."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads = self._start()
        self._characters = 0
        """Given to the present threads."""

    async def run(self, work: Callable[[], T], *, characters: int) -> T:
        """Run work that encodes so much text, and return what it returns.

        When cancelled, the thread ends what it has begun, and the result is dropped.
        """
        if self._characters >= MAX_CHARACTERS:
            self._characters = 0
            # They end when they have done what they were given.
            self._threads.shutdown(wait=False)
            self._threads = self._start()
        self._characters += characters
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def stop(self) -> None:
        """Drop what has not begun; threads end when they have done what has. Nothing can be run after this."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._count, "encode")
