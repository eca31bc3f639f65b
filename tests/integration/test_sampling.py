"""Sampling through a real gateway and a real worker's service, on one event loop: what clients are told of it."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from prefixgate.config.settings import GatewaySettings, Settings
from prefixgate.gateway.readiness import until_serving
from prefixgate.gateway.server import GatewayServer
from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, generation_pb2
from prefixgate.proto.transport import CHANNEL_OPTIONS
from prefixgate.worker.witness_options import WitnessOptions
from tests.worker.driver import Driver, WatchedEngine
from tests.worker.hosting import HANG_SECONDS, Host, hosted

PROMPT = "The quick brown fox jumps over the lazy dog, twice."
TIME_LIMIT = generation_pb2.FINISH_REASON_TIME_LIMIT
LENGTH = generation_pb2.FINISH_REASON_LENGTH
STOP = generation_pb2.FINISH_REASON_STOP


@dataclass
class Stack:
    """A gateway over a worker, and a client of it."""

    host: Host
    stub: "gateway_pb2_grpc.GatewayAsyncStub"

    async def stream(self, request: gateway_pb2.GenerateRequest) -> list[gateway_pb2.GenerateResponse]:
        return [response async for response in self.stub.Generate(request)]


@asynccontextmanager
async def stack(driver: Driver | None) -> AsyncIterator[Stack]:
    async with hosted(driver) as host:
        settings = Settings(gateway=GatewaySettings(listen="127.0.0.1:0", http="127.0.0.1:0", workers=(host.address,)))
        server = GatewayServer(settings, host.driver.cache.hasher)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(str(server.address), options=CHANNEL_OPTIONS) as channel:
                async with asyncio.timeout(HANG_SECONDS):
                    await until_serving(str(server.address))
                yield Stack(host, gateway_pb2_grpc.GatewayStub(channel))
        finally:
            await server.stop(0)


def on_stack(scenario: Callable[[Stack], Awaitable[None]], driver: Driver | None = None) -> None:
    async def main() -> None:
        async with stack(driver) as made:
            await scenario(made)

    asyncio.run(main())


def until_a_call_waits(engine: WatchedEngine) -> None:
    with engine.stepped:
        assert engine.stepped.wait_for(lambda: engine.report().waiting_calls, HANG_SECONDS)


def generate(prompt: str = PROMPT, *, n: int = 1, stop: tuple[str, ...] = (), **sampling: Any) -> Any:
    params = generation_pb2.SamplingParams(**({"max_tokens": 12} | sampling))
    return gateway_pb2.GenerateRequest(prompt=prompt, n=n, stop=stop, sampling=params)


def test_log_probabilities_stand_beside_their_tokens_streamed_and_whole() -> None:
    async def scenario(made: Stack) -> None:
        request = generate(n=3, temperature=1.2, seed=5, logprobs=4, prompt_logprobs=1)
        responses, answer = await made.stream(request), await made.stub.Complete(request)
        told = [found for response in responses for found in response.prompt_logprobs]
        assert told == list(answer.prompt_logprobs)
        assert [found.token_id for found in told] == list(PROMPT.encode()[1:])
        assert all(len(found.top) == 1 and found.rank >= 1 and found.logprob <= 0 for found in told)
        for output in answer.outputs:
            deltas = [delta for response in responses for delta in response.deltas if delta.index == output.index]
            assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
            assert [found for delta in deltas for found in delta.logprobs] == list(output.logprobs)
            assert [found.token_id for found in output.logprobs] == list(output.token_ids)
            assert all(sum(math.exp(top.logprob) for top in found.top) <= 1.0001 for found in output.logprobs)
        usage = answer.completion.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (len(PROMPT), 0, 36)

    on_stack(scenario)


def test_prompt_log_probabilities_are_the_same_cold_and_warm_and_no_query_to_the_cache() -> None:
    async def scenario(made: Stack) -> None:
        request = generate(prompt_logprobs=3)
        cold = await made.stub.Complete(request)
        await made.stub.Complete(generate())
        warm = await made.stub.Complete(generate())
        assert warm.completion.usage.cached_tokens == len(PROMPT) - 1
        before = await made.stub.Stats(gateway_pb2.StatsRequest())
        again = await made.stub.Complete(request)
        after = await made.stub.Stats(gateway_pb2.StatsRequest())
        assert (list(again.prompt_logprobs), again.outputs[0]) == (list(cold.prompt_logprobs), cold.outputs[0])
        assert again.completion.usage.cached_tokens == 0
        assert after.tenant == before.tenant
        assert again.outputs[0] == warm.outputs[0]

    on_stack(scenario)


def test_a_stop_string_cuts_ids_and_log_probabilities_alike() -> None:
    async def scenario(made: Stack) -> None:
        whole = (await made.stub.Complete(generate(logprobs=0))).outputs[0]
        stop = whole.text[4:6]
        cut = (await made.stub.Complete(generate(logprobs=0, stop=(stop,)))).outputs[0]
        assert (cut.finish_reason, cut.matched_stop, cut.text) == (STOP, stop, whole.text[: whole.text.index(stop)])
        assert list(cut.token_ids) == list(whole.token_ids[: len(cut.token_ids)])
        assert list(cut.logprobs) == list(whole.logprobs[: len(cut.token_ids)])

    on_stack(scenario)


def test_what_may_be_sampled_is_what_the_call_says() -> None:
    async def text(made: Stack, **sampling: Any) -> str:
        output = (await made.stub.Complete(generate(**({"max_tokens": 40} | sampling)))).outputs[0]
        assert output.finish_reason == LENGTH
        return output.text

    async def scenario(made: Stack) -> None:
        free = await text(made)
        allowed = await text(made, temperature=100.0, allowed_ids=list(b"abc"))
        assert set(allowed) == set("abc")
        assert set(await text(made, temperature=100.0, allowed_ids=list(b"abc"), banned_ids=list(b"a"))) == set("bc")
        assert free[0] not in await text(made, banned_ids=[ord(free[0])])
        # No printable character's logit is 8 above another's.
        assert await text(made, logit_bias={ord("z"): 8.0}) == "z" * 40
        assert set(await text(made, logit_bias={ord("z"): 8.0}, repetition_penalty=10.0)) != {"z"}
        counts = Counter(await text(made, max_tokens=30, allowed_ids=list(b"abc"), frequency_penalty=2.0))
        assert max(counts.values()) - min(counts.values()) <= 4
        seeded = [await text(made, temperature=1.0, min_p=0.02, seed=7) for _ in range(2)]
        assert seeded[0] == seeded[1] != free

    on_stack(scenario)


def test_a_stop_id_waits_for_the_least_length() -> None:
    async def scenario(made: Stack) -> None:
        free = (await made.stub.Complete(generate())).outputs[0]
        stops = list(set(free.token_ids))
        early = (await made.stub.Complete(generate(stop_ids=stops))).outputs[0]
        assert (list(early.token_ids), early.finish_reason) == ([free.token_ids[0]], STOP)
        late = (await made.stub.Complete(generate(stop_ids=stops, min_tokens=6))).outputs[0]
        assert not set(late.token_ids[:6]) & set(stops)
        assert len(late.token_ids) >= 6

    on_stack(scenario)


def test_a_time_limit_answers_with_what_is_there_and_with_nothing_while_it_waits() -> None:
    async def scenario(made: Stack) -> None:
        driver = made.host.driver
        long = generate(max_tokens=1500)
        stream = made.stub.Generate(long)
        assert await stream.read() is not None
        limited = generate(max_tokens=9)
        limited.time_limit_ms = 60_000
        pending = asyncio.ensure_future(made.stub.Complete(limited))
        await asyncio.to_thread(until_a_call_waits, driver.engine)
        driver.now += 60.0
        answer = await pending
        assert [(output.text, output.finish_reason) for output in answer.outputs] == [("", TIME_LIMIT)]
        assert answer.completion.usage.completion_tokens == 0
        stream.cancel()

        long.time_limit_ms = 60_000
        stream = made.stub.Generate(long)
        responses: list[gateway_pb2.GenerateResponse] = []
        while isinstance(response := await stream.read(), gateway_pb2.GenerateResponse):
            if not responses:
                driver.now += 60.0
            responses.append(response)
        deltas = [delta for response in responses for delta in response.deltas]
        assert deltas[-1].finish_reason == TIME_LIMIT
        tokens = sum(len(delta.token_ids) for delta in deltas)
        assert 0 < tokens == responses[-1].completion.usage.completion_tokens
        assert "".join(delta.text for delta in deltas)

    on_stack(scenario, Driver(num_blocks=256, max_running=1, options=WitnessOptions(step_ms=2)))
