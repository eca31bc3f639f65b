"""The client against real processes: every method, and nothing left running after calls that were left."""

import asyncio
import itertools

import pytest

from prefixgate.gateway.client import AsyncClient, Client, Conversation, GenerateOptions, NotFoundError
from prefixgate.proto import gateway_pb2
from tests.integration.sidecar import KEYS, Sidecar, Started
from tests.integration.waiting import HANG_SECONDS

NUMBERS = itertools.count()
LONG = GenerateOptions(max_tokens=800, ignore_eos=True)
"""Of a call that ends only when it is ended."""


def fresh(words: int) -> str:
    """Make a text that nobody has sent before."""
    return f"{next(NUMBERS)} " + "word " * words


def test_every_method(sidecar: Sidecar) -> None:
    with Client(sidecar.address, api_key=KEYS["acme"], timeout=HANG_SECONDS) as client:
        prompt = fresh(20)
        assert client.tokenize(prompt) == list(prompt.encode())
        assert client.explain(prompt).cached_tokens == 0

        warming = client.warm(prompt)
        steps = list(warming)
        assert steps[-1].cached_tokens + steps[-1].computed_tokens == steps[-1].prompt_tokens == len(prompt)
        assert warming.result().usage.prompt_tokens == len(prompt)
        found = client.explain(prompt)
        assert (found.prompt_tokens, found.cached_tokens) == (len(prompt), len(prompt) - 1)
        assert found.miss_reason == gateway_pb2.MISS_REASON_NONE

        pin = client.pin(prompt, 60.0).pin
        assert pin.pinned_tokens == len(prompt) // 16 * 16
        assert [held.pin_id for held in client.list_pins()] == [pin.pin_id]
        client.unpin(pin.pin_id)
        with pytest.raises(NotFoundError):
            client.unpin(pin.pin_id)
        assert list(client.list_pins()) == []

        before = client.stats()
        streamed = client.generate(prompt, max_tokens=8)
        assert "".join(delta.text for delta in streamed) == streamed.text
        assert streamed.usage.cached_tokens == len(prompt) - 1
        assert client.complete(prompt, max_tokens=8).text == streamed.text
        after = client.stats()
        assert after.tenant.hit_tokens - before.tenant.hit_tokens == 2 * (len(prompt) - 1)

        assert client.flush().freed_blocks > 0
        assert client.explain(prompt).cached_tokens == 0


def test_a_conversation_finds_its_own_beginning(sidecar: Sidecar) -> None:
    with Client(sidecar.address, api_key=KEYS["bolt"], timeout=HANG_SECONDS) as client:
        conversation = Conversation(fresh(20))
        lengths: list[int] = []
        for question in ("one?", "two?", "three?"):
            usage = client.chat(conversation, question, max_tokens=8).result().usage
            # All but the last question and the marks around it.
            assert usage.cached_tokens > (lengths[-1] if lengths else -1)
            lengths.append(usage.prompt_tokens)
        assert lengths == sorted(lengths)
        assert len(conversation.messages) == 1 + 2 * 3


def cancelled(pair: Started) -> tuple[float, ...]:
    """Wait until nothing runs, and count the calls that were cancelled: Generate, Complete, Warm."""
    gateway, _ = pair.until_idle()
    counter = "prefixgate_gateway_calls_ended_total"
    return tuple(gateway.total(counter, method=name, code="CANCELLED") for name in ("Generate", "Complete", "Warm"))


def test_what_is_left_is_cancelled(slow: Started) -> None:
    generate, complete, warm = cancelled(slow)
    with Client(slow.address, api_key=KEYS["acme"], timeout=HANG_SECONDS) as client:
        for delta in client.generate(fresh(0), **LONG):
            assert delta.token_ids
            break
        with client.generate(fresh(0), **LONG) as stream:
            next(stream)
        closed = client.generate(fresh(0), **LONG)
        next(closed)
        closed.close()
        warming = client.warm(fresh(100))
        # Calls travel in order, so that the gateway has that one too when this one is answered.
        client.tokenize("hi")
        warming.close()
    assert cancelled(slow) == (generate + 3, complete, warm + 1)


def test_what_asyncio_leaves_is_cancelled(slow: Started) -> None:
    generate, complete, warm = cancelled(slow)

    async def leave() -> None:
        async with AsyncClient(slow.address, api_key=KEYS["acme"], timeout=HANG_SECONDS) as client:
            async for delta in client.generate(fresh(0), **LONG):
                assert delta.token_ids
                break
            async with client.generate(fresh(0), **LONG) as stream:
                await anext(stream)
            reading = asyncio.create_task(client.complete(fresh(0), **LONG))
            # Calls travel in order, so that the gateway has that one too when this one is answered.
            await anext(client.generate(fresh(0), **LONG))
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            kept = client.generate(fresh(0), **LONG)
            await anext(kept)
        # The client's end was the end of what still ran on it.

    asyncio.run(leave())
    assert cancelled(slow) == (generate + 4, complete + 1, warm)
