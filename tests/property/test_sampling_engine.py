"""Whatever calls ask of sampling, each gets what it would get alone, also when it is preempted and starts over."""

import functools

from grpc import StatusCode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixgate.cache.admission import CacheMode
from prefixgate.worker.request import SamplingParams
from prefixgate.worker.token_set import NO_TOKENS, TokenSet
from tests.counts import scaled
from tests.worker.driver import Call, Driver, words

CALLS = 5

samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(18, 40),
    temperature=st.sampled_from([0.0, 1.0, 1.5]),
    top_k=st.sampled_from([None, 20]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.01]),
    seed=st.integers(-2, 2),
    stop_ids=st.frozensets(st.integers(60, 90), max_size=3),
    min_tokens=st.sampled_from([0, 17]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.8]),
    logit_bias=st.sampled_from([(), ((65, 5.0), (66, -5.0))]),
    allowed_ids=st.sampled_from([NO_TOKENS, TokenSet.of(range(60, 110))]),
    banned_ids=st.sampled_from([NO_TOKENS, TokenSet.of([70, 71])]),
    logprobs=st.sampled_from([None, 0, 2]),
    prompt_logprobs=st.sampled_from([None, None, 1]),
)
asked = st.tuples(st.sampled_from([15, 16, 17, 40]), samplings, st.sampled_from([1, 1, 2, 3]))


def submit(driver: Driver, seed: int, length: int, sampling: SamplingParams, n: int) -> Call:
    mode = CacheMode.DEFAULT if sampling.prompt_logprobs is None else CacheMode.BYPASS
    return driver.submit(words(length, seed), sampling=sampling, n=n, cache_mode=mode)


@functools.cache
def alone(seed: int, length: int, sampling: SamplingParams, n: int) -> Call:
    driver = Driver(num_blocks=256)
    call = submit(driver, seed, length, sampling, n)
    driver.run()
    return call


@given(
    st.lists(asked, min_size=CALLS, max_size=CALLS), st.integers(14, 20), st.sampled_from([9, 24, 64]), st.booleans()
)
@settings(max_examples=scaled(240), suppress_health_check=[HealthCheck.too_slow])
def test_preempted_calls_sample_what_they_would_alone(
    calls: list[tuple[int, SamplingParams, int]], num_blocks: int, budget: int, is_ahead: bool
) -> None:
    driver = Driver(num_blocks, max_batch_tokens=budget, max_running=8, is_ahead=is_ahead)
    made = [submit(driver, seed % 2, *call) for seed, call in enumerate(calls)]
    driver.run()
    for seed, (call, wanted) in enumerate(zip(made, calls, strict=True)):
        expected = alone(seed % 2, *wanted)
        assert call.code is StatusCode.OK
        assert (call.outputs, call.finished) == (expected.outputs, expected.finished)
        assert (call.logprobs, call.prompt_logprobs) == (expected.logprobs, expected.prompt_logprobs)
    driver.assert_idle()


def test_a_seed_survives_preemptions() -> None:
    """The one above would say nothing if nobody were preempted."""
    sampling = SamplingParams(
        40, temperature=1.3, seed=5, repetition_penalty=1.2, frequency_penalty=0.5, logprobs=1, prompt_logprobs=0
    )
    driver = Driver(10, max_batch_tokens=64, max_running=8)
    made = [submit(driver, seed, 17, sampling, 1) for seed in range(6)]
    driver.run()
    assert sum(call.request.preemptions for call in made) > 0
    for seed, call in enumerate(made):
        expected = alone(seed, 17, sampling, 1)
        assert (call.outputs, call.logprobs) == (expected.outputs, expected.logprobs)
        assert call.prompt_logprobs == expected.prompt_logprobs
        assert len(call.prompt_logprobs) == 16
    driver.assert_idle()
