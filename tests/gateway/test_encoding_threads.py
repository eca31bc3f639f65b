"""Threads that encode: replaced in time, without losing what was given to them, so that memory has a bound."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from prefixgate.gateway.encoding_threads import MAX_CHARACTERS, EncodingThreads
from tests.gateway.rig import run

WORDS = 40_000
MEASURE = """
import asyncio, ctypes, sys
from prefixgate.gateway.encoding_threads import EncodingThreads
from prefixgate.gateway.tokenizer import ModelTokenizer
from tests.gateway.sample_tokenizers import byte_level

def resident():
    # What the allocator keeps for itself is not remembered by anybody.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

async def main(words):
    tokenizer, threads = ModelTokenizer(byte_level()), EncodingThreads(4)
    async def encode(number):
        # No two prompts are alike, and each is one word: letters only.
        text = "".join(chr(97 + int(digit)) for digit in f"{number:0100d}"[::-1])
        await threads.run(lambda: tokenizer.encode_prompt(text), characters=len(text))
    await encode(0)
    before = resident()
    for start in range(0, words, 100):
        await asyncio.gather(*map(encode, range(start, start + 100)))
    print(resident() - before)

asyncio.run(main(int(sys.argv[1])))
"""


def test_work_given_to_threads_that_are_replaced_is_done_all_the_same() -> None:
    release = threading.Event()

    async def test() -> None:
        threads = EncodingThreads(1)
        first = asyncio.create_task(threads.run(lambda: release.wait(60), characters=MAX_CHARACTERS))
        behind = asyncio.create_task(threads.run(threading.get_ident, characters=1))
        await asyncio.sleep(0)
        # New threads answer while the old one is busy, and the old one does what it was given.
        new = await threads.run(threading.get_ident, characters=1)
        release.set()
        assert await first
        assert await behind == new, "the second piece of work already belongs to the new thread"
        threads.stop()

    try:
        run(test())
    finally:
        release.set()


def test_what_has_not_begun_is_dropped_at_the_end() -> None:
    begun, release = threading.Event(), threading.Event()

    def hold() -> str:
        begun.set()
        release.wait(60)
        return "done"

    async def test() -> None:
        threads = EncodingThreads(1)
        first = asyncio.create_task(threads.run(hold, characters=1))
        second = asyncio.create_task(threads.run(lambda: "never", characters=1))
        await asyncio.to_thread(begun.wait, 60)
        threads.stop()
        release.set()
        assert await first == "done"
        with pytest.raises((CancelledError, asyncio.CancelledError)):
            await second

    try:
        run(test())
    finally:
        release.set()


def test_what_the_library_remembers_is_bounded() -> None:
    """Left alone it holds 130 megabytes after so many prompts, and with the threads replaced 35 however many come."""
    command = [sys.executable, "-c", MEASURE, str(WORDS)]
    measured = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(measured.stdout) < 80 << 20
