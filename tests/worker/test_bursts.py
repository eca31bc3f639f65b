"""Equal cold prompts that arrive together cost one prefill, and nobody waits for one that will not come."""

from collections.abc import Iterable

import pytest
from grpc import StatusCode

from prefixgate.cache.admission import CacheMode
from prefixgate.cache.hashing import BlockHash, BlockHasher
from prefixgate.worker.request import RequestState
from tests.worker.driver import Call, Driver, solo, words


def computed(driver: Driver) -> int:
    return sum(driver.runner.tokens_per_step)


def states(calls: list[Call]) -> list[RequestState]:
    return [call.request.state for call in calls]


@pytest.mark.parametrize("budget", [32, 100, 512])
@pytest.mark.parametrize("prompt_tokens", [17, 48, 160, 161])
def test_a_burst_costs_one_prefill(prompt_tokens: int, budget: int) -> None:
    driver = Driver(max_batch_tokens=budget, max_running=8)
    prompt = words(prompt_tokens)
    calls = [driver.submit(prompt, 5) for _ in range(8)]
    driver.run()
    # A follower computes its last block's rest, at least one token.
    rest = prompt_tokens - (prompt_tokens - 1) // 16 * 16
    assert computed(driver) <= prompt_tokens + 7 * rest + 8 * 4
    assert [call.outputs for call in calls] == [solo(prompt, 5)] * 8
    driver.assert_idle()


def test_others_behind_the_followers_do_not_wait() -> None:
    driver = Driver(max_batch_tokens=64, max_running=8)
    burst = [driver.submit(words(300), 3) for _ in range(5)]
    other = driver.submit(words(20, 7), 3)
    driver.step()
    driver.step()
    assert states(burst) == [RequestState.RUNNING, *[RequestState.WAITING] * 4]
    assert driver.engine.report().waiting_calls == 5
    driver.step()
    driver.step()
    driver.step()
    assert other.request.state is not RequestState.WAITING
    driver.run()
    assert [call.code for call in (*burst, other)] == [StatusCode.OK] * 6


def test_a_call_waits_for_what_it_has_in_common_and_no_longer() -> None:
    driver = Driver(max_batch_tokens=48, max_running=8)
    leader = driver.submit(words(130), 3)
    follower = driver.submit([*words(40), *words(30, 5)], 3)
    equal = driver.submit(words(130), 3)
    for _ in range(2):
        driver.step()
        assert states([leader, follower, equal]) == [RequestState.RUNNING, *[RequestState.WAITING] * 2]
    driver.step()
    assert driver.runner.steps[-1] == [(96, 34), (40, 14)], "beside the end of the leader's prompt"
    driver.run()
    assert (follower.usage.cached_tokens, equal.usage.cached_tokens) == (40, 128)
    assert follower.outputs == solo([*words(40), *words(30, 5)], 3)


@pytest.mark.parametrize("steps_before", [1, 2, 3])
def test_nobody_waits_behind_a_cancelled_leader(steps_before: int) -> None:
    driver = Driver(max_batch_tokens=32, max_running=8)
    prompt = words(160)
    calls = [driver.submit(prompt, 3) for _ in range(4)]
    for _ in range(steps_before):
        driver.step()
    driver.engine.cancel(calls[0].request)
    driver.step()
    assert states(calls) == [RequestState.ENDED, RequestState.RUNNING, RequestState.WAITING, RequestState.WAITING]
    driver.run()
    assert [call.outputs for call in calls[1:]] == [solo(prompt, 3)] * 3
    assert computed(driver) <= 160 + 16 + 3 * 16 + 3 * 2
    driver.assert_idle()


def test_followers_of_a_preempted_leader_go_on_without_it() -> None:
    driver = Driver(num_blocks=24, max_batch_tokens=16, max_running=4)
    elder = driver.submit(words(60, 3), 250, tenant="acme")
    burst = [driver.submit(words(200), 3) for _ in range(3)]
    driver.run()
    assert elder.request.preemptions == 0
    assert [call.outputs for call in burst] == [solo(words(200), 3)] * 3
    driver.assert_idle()


def test_a_call_of_higher_priority_does_not_wait_for_one_of_lower() -> None:
    driver = Driver(max_batch_tokens=32)
    driver.submit(words(160), 3)
    driver.step()
    urgent = driver.submit(words(160), 3, priority=1)
    driver.step()
    assert urgent.request.state is RequestState.RUNNING


def test_a_call_that_does_not_read_the_cache_does_not_wait_for_it() -> None:
    driver = Driver(max_batch_tokens=32)
    calls = [driver.submit(words(160), 3, cache_mode=mode) for mode in (CacheMode.DEFAULT, CacheMode.BYPASS)]
    for _ in range(3):
        driver.step()
    driver.run()
    assert computed(driver) == 2 * (160 + 2)
    assert calls[0].outputs == calls[1].outputs == solo(words(160), 3)


def test_what_keeps_nothing_leads_nobody() -> None:
    driver = Driver(max_batch_tokens=32)
    driver.submit(words(160), 3, cache_mode=CacheMode.READ_ONLY)
    follower = driver.submit(words(160), 3)
    driver.run()
    assert follower.usage.cached_tokens == 0


def test_waiting_hashes_a_prompt_once() -> None:
    class Counting(BlockHasher):
        calls = 0

        def hash_blocks(self, parent: BlockHash, scope_digest: bytes, blocks: Iterable[bytes]) -> list[BlockHash]:
            self.calls += 1
            return super().hash_blocks(parent, scope_digest, blocks)

    hasher = Counting(bytes(16))
    driver = Driver(max_batch_tokens=16, max_running=8, hasher=hasher)
    for _ in range(6):
        driver.submit(words(200), 3)
    driver.run()
    assert hasher.calls == 6
