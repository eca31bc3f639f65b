"""Whoever stays within its part has its first token within the steps that the docs state, whatever others ask for."""

import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prefixgate.worker.request import RequestState
from tests.counts import scaled
from tests.worker.driver import Call, Driver, words

WEIGHTS = st.sampled_from([0.5, 1.0, 1.0, 3.0])
FLOOD = st.tuples(
    st.integers(0, 3),
    st.sampled_from([10, 40, 100, 300]),
    st.sampled_from([5, 60, 150]),
    st.sampled_from([0, 0, 5, -5]),
)


def submit_flood(driver: Driver, tenants: list[str], kinds: list[tuple[int, int, int, int]]) -> list[Call]:
    """Make many more calls than can run, of all these tenants, and let them run into each other for a while."""
    return [
        driver.submit(
            words(prompt, number % 90), new, tenant=tenants[(number + which) % len(tenants)], priority=priority
        )
        for number, (which, prompt, new, priority) in enumerate(kinds * (240 // len(kinds)))
    ]


@given(
    weights=st.lists(WEIGHTS, min_size=2, max_size=5),
    kinds=st.lists(FLOOD, min_size=1, max_size=6),
    spare_sequences=st.sampled_from([0, 4, 12]),
    spare_tokens=st.sampled_from([1, 8, 40]),
    num_blocks=st.sampled_from([60, 90, 150]),
    steps_before=st.sampled_from([1, 5, 30, 80]),
    prompt=st.sampled_from([5, 16, 60, 150, 300]),
    new=st.sampled_from([1, 20, 60]),
    priority=st.sampled_from([0, -9]),
)
@settings(max_examples=scaled(240), deadline=None)
def test_a_call_within_its_part_starts_within_the_bound_and_goes_on_without_a_break(
    weights: list[float],
    kinds: list[tuple[int, int, int, int]],
    spare_sequences: int,
    spare_tokens: int,
    num_blocks: int,
    steps_before: int,
    prompt: int,
    new: int,
    priority: int,
) -> None:
    tenants = [f"t{number}" for number in range(len(weights))]
    max_running = len(tenants) + spare_sequences
    driver = Driver(
        num_blocks,
        max_running=max_running,
        max_batch_tokens=max_running + spare_tokens,
        max_waiting=3000,
        weights=dict(zip(tenants, weights, strict=True)),
    )
    submit_flood(driver, tenants[1:], kinds)
    for _ in range(steps_before):
        driver.engine.step()
    part = weights[0] / sum(weights)
    # Within the part, and less than a third of the pool, which no call of the others is too large to leave.
    blocks = min(int(num_blocks * part), num_blocks // 3)
    prompt = min(prompt, 16 * (blocks - 1) - new)
    assume(prompt > 0)
    call = driver.submit(words(prompt, 7), new, tenant=tenants[0], priority=priority)
    bound = math.ceil(math.ceil(len(call.request.token_ids) / driver.limits.prompt_tokens) / part) + len(tenants)
    for _ in range(bound):
        driver.engine.step()
    assert call.request.first_token_at is not None
    for _ in range(new):
        driver.engine.step()
    assert call.request.state is RequestState.ENDED
    assert call.request.preemptions == 0
