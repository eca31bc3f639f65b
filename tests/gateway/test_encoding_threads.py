"""Threads that encode: replaced in time, without losing what was given to them, so that memory has a bound."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

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
        await threads.run(lambda: tokenizer.encode_prompt(text), characters=len(text), tenant="acme")
    await encode(0)
    before = resident()
    for start in range(0, words, 100):
        await asyncio.gather(*map(encode, range(start, start + 100)))
    print(resident() - before)

asyncio.run(main(int(sys.argv[1])))
"""


def test_threads_that_are_replaced_count_until_they_have_done_what_they_were_given() -> None:
    """Long prompts have the threads replaced all the time: each must not bring threads of its own."""
    release = threading.Event()
    busy, lock, most = 0, threading.Lock(), 0

    def hold() -> int:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        release.wait(60)
        with lock:
            busy -= 1
        return threading.get_ident()

    async def test() -> None:
        threads = EncodingThreads(2)
        work = [asyncio.create_task(threads.run(hold, characters=2 * MAX_CHARACTERS, tenant="acme")) for _ in range(20)]
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*work)
        assert most <= 2
        threads.stop()

    try:
        run(test())
    finally:
        release.set()


def test_tenants_that_wait_take_turns() -> None:
    """Whoever comes behind another tenant's many prompts waits for those in the threads, and for one more."""
    release = threading.Event()
    done: list[str] = []

    async def test() -> None:
        threads = EncodingThreads(1)

        async def encode(tenant: str, name: str) -> None:
            await threads.run(release.wait, characters=1, tenant=tenant)
            done.append(name)

        work = [asyncio.create_task(encode("acme", f"acme {number}")) for number in range(5)]
        work += [asyncio.create_task(encode("globex", f"globex {number}")) for number in range(2)]
        await asyncio.sleep(0)
        # One that gives up takes nobody's turn.
        work[1].cancel()
        await asyncio.wait([work[1]])
        release.set()
        await asyncio.gather(*work, return_exceptions=True)
        assert done == ["acme 0", "acme 2", "globex 0", "acme 3", "globex 1", "acme 4"]
        threads.stop()

    try:
        run(test())
    finally:
        release.set()


def test_a_caller_who_gives_up_frees_no_thread_that_is_at_work() -> None:
    begun, release = threading.Event(), threading.Event()
    done: list[str] = []

    def hold() -> None:
        begun.set()
        release.wait(60)
        done.append("first")

    async def test() -> None:
        threads = EncodingThreads(1)
        first = asyncio.create_task(threads.run(hold, characters=MAX_CHARACTERS, tenant="acme"))
        await asyncio.to_thread(begun.wait, 60)
        second = asyncio.create_task(threads.run(lambda: done.append("second"), characters=1, tenant="acme"))
        first.cancel()
        await asyncio.wait([first])
        release.set()
        await second
        assert done == ["first", "second"]
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
        first = asyncio.create_task(threads.run(hold, characters=1, tenant="acme"))
        second = asyncio.create_task(threads.run(lambda: "never", characters=1, tenant="acme"))
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
    measured = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert int(measured.stdout) < 80 << 20
