"""Log-probabilities of prompts and outputs through the engine: complete, in order, and the same however computed."""

from typing import Any

import pytest
import torch
from grpc import StatusCode

from prefixgate.cache.admission import CacheMode
from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.kv_storage import TorchKVStorage
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.engine import Engine
from prefixgate.worker.limits import Limits
from prefixgate.worker.logprobs import TokenLogprob, logprobs_of
from prefixgate.worker.model_runner import Row
from prefixgate.worker.observations import Observations
from prefixgate.worker.request import Request, SamplingParams
from prefixgate.worker.step_plan import MAX_LOGIT_LINES
from prefixgate.worker.witness import WitnessModel, witness_layout
from prefixgate.worker.witness_options import WitnessOptions
from tests.worker.driver import MODEL, Call, Driver, words
from tests.worker.tiny_models import SCOPE, VOCABULARY, llama_config, make_model, make_runner

PROMPT = words(50)


def ask(driver: Driver, prompt: list[int], **params: Any) -> Call:
    sampling = SamplingParams(**({"max_tokens": 3, "prompt_logprobs": 2, "logprobs": 1} | params))
    return driver.ask(prompt, sampling=sampling, cache_mode=CacheMode.BYPASS)


def expected(prompt: list[int], count: int) -> list[TokenLogprob]:
    """Read them off one forward pass over the whole prompt, on a model of its own."""
    storage = TorchKVStorage(16, witness_layout())
    model = WitnessModel("witness", storage, WitnessOptions(context=256))
    scope = CacheScope("acme", MODEL)
    logits = model.forward([Row(prompt, 0, range(16), scope, True, needs_all_logits=True)])
    return logprobs_of(logits[:-1], prompt[1:], [count] * (len(prompt) - 1))


def test_no_step_computes_more_lines_of_logits_than_its_bound_however_many_ask() -> None:
    driver = Driver(num_blocks=256, max_batch_tokens=2048, max_running=8)
    prompts = [words(MAX_LOGIT_LINES - 56, seed) for seed in range(3)]
    calls = [
        driver.submit(prompt, sampling=SamplingParams(1, prompt_logprobs=2), cache_mode=CacheMode.BYPASS)
        for prompt in prompts
    ]
    driver.submit(words(700, 5), 1)
    driver.run()
    counts = [[count for _, count in rows] for rows in driver.runner.steps]
    assert counts[0] == [MAX_LOGIT_LINES - 56, 56, 700], "what needs no lines of logits is not held up"
    assert counts[1] == [MAX_LOGIT_LINES - 112, 112]
    assert [call.prompt_logprobs for call in calls] == [expected(prompt, 2) for prompt in prompts]
    driver.assert_idle()


@pytest.mark.parametrize("budget", [3, 16, 17, 49, 50, 512])
def test_chunks_of_any_size_tell_every_token_of_the_prompt_but_the_first(budget: int) -> None:
    driver = Driver(max_batch_tokens=budget, max_running=1)
    call = ask(driver, PROMPT)
    assert call.prompt_logprobs == expected(PROMPT, 2)
    assert [found.token_id for found in call.prompt_logprobs] == PROMPT[1:]
    driver.assert_idle()


def test_cold_warm_and_after_another_call_they_are_the_same_and_come_from_no_cache() -> None:
    driver = Driver(max_batch_tokens=24)
    cold = ask(driver, PROMPT)
    warm = driver.ask(PROMPT, 3)
    assert warm.usage.cached_tokens == 0, "a call for them leaves nothing behind"
    assert driver.ask(PROMPT, 3).usage.cached_tokens == 49
    queried = driver.observations.queried_tokens("acme")
    again = ask(driver, PROMPT)
    driver.ask([*PROMPT[:30], 200], 5)
    third = ask(driver, PROMPT)
    assert cold.prompt_logprobs == again.prompt_logprobs == third.prompt_logprobs
    assert cold.outputs == again.outputs == third.outputs == warm.outputs
    assert (again.usage.cached_tokens, third.usage.cached_tokens) == (0, 0)
    assert driver.observations.queried_tokens("acme") - queried == 31


def test_one_token_of_a_prompt_has_none_and_company_changes_none() -> None:
    driver = Driver(max_batch_tokens=20, max_running=4)
    sampling = SamplingParams(4, prompt_logprobs=0)
    calls = [driver.submit(words(n), sampling=sampling, n=2, cache_mode=CacheMode.BYPASS) for n in (1, 2, 37)]
    driver.submit(words(40, 5), 9)
    driver.run()
    for call, length in zip(calls, (1, 2, 37), strict=True):
        assert call.prompt_logprobs == (expected(words(length), 0) if length > 1 else [])


def test_each_sampled_token_comes_with_its_own() -> None:
    driver = Driver()
    sampling = SamplingParams(6, temperature=1.5, seed=4, logprobs=3)
    call = driver.submit(PROMPT, n=3, sampling=sampling)
    plain = driver.submit(PROMPT, n=3, sampling=SamplingParams(6, temperature=1.5, seed=4))
    driver.run()
    assert call.outputs == plain.outputs
    assert plain.logprobs == {}
    for index, token_ids in call.outputs.items():
        found = call.logprobs[index]
        assert [entry.token_id for entry in found] == token_ids
        # What a prompt of the same tokens is told, the outputs were told.
        whole = ask(driver, [*PROMPT, *token_ids], prompt_logprobs=3)
        assert whole.prompt_logprobs[len(PROMPT) - 1 :] == found


def test_a_fault_amid_the_prompt_ends_the_call_alone() -> None:
    driver = Driver(max_batch_tokens=32)
    driver.runner.spoils = lambda row: row.needs_all_logits and row.start > 0
    bad = driver.submit(PROMPT, sampling=SamplingParams(3, prompt_logprobs=1), cache_mode=CacheMode.BYPASS)
    good = driver.submit(words(20, 7), 6)
    driver.run()
    assert bad.code is StatusCode.INTERNAL
    assert (good.code, len(good.outputs[0])) == (StatusCode.OK, 6)
    driver.assert_idle()


class TestOnATransformer:
    def engine(self, budget: int) -> tuple[Engine, "Listener"]:
        runner = make_runner(make_model(llama_config()))
        cache = PrefixCache(runner.storage.num_blocks, BlockHasher(bytes(16)))
        return Engine(runner, cache, Limits(budget, 4, 16), Observations([])), Listener()

    def ask(self, engine: Engine, listener: "Listener", prompt: list[int], **params: Any) -> Call:
        mode = CacheMode.BYPASS if "prompt_logprobs" in params else CacheMode.DEFAULT
        call = Call(Request(prompt, SCOPE, SamplingParams(4, **params), listener, cache_mode=mode))
        listener.calls[call.request] = call
        engine.submit(call.request)
        while engine.step():
            pass
        assert call.code is StatusCode.OK
        return call

    def test_cold_warm_and_after_another_call_they_are_the_stock_models(self) -> None:
        prompt = [(7 * i + 3) % VOCABULARY for i in range(40)]
        engine, listener = self.engine(budget=18)
        cold = self.ask(engine, listener, prompt, prompt_logprobs=4)
        self.ask(engine, listener, prompt)
        assert self.ask(engine, listener, prompt).usage.cached_tokens == 39
        warm = self.ask(engine, listener, prompt, prompt_logprobs=4)
        self.ask(engine, listener, [*prompt[:20], 5])
        third = self.ask(engine, listener, prompt, prompt_logprobs=4)
        assert cold.prompt_logprobs == warm.prompt_logprobs == third.prompt_logprobs
        with torch.inference_mode():
            logits = make_model(llama_config())(torch.tensor([prompt])).logits[0, :-1]
        stock = logprobs_of(logits, prompt[1:], [4] * 39)
        assert [found.token_id for found in cold.prompt_logprobs] == prompt[1:]
        assert [found.logprob for found in cold.prompt_logprobs] == pytest.approx(
            [found.logprob for found in stock], abs=1e-4
        )


class Listener:
    """A sink that tells calls what they heard."""

    def __init__(self) -> None:
        self.calls: dict[Request, Call] = {}

    def deliver(self, step: int, news: Any) -> None:
        for item in news:
            self.calls[item.request].hear(item)
