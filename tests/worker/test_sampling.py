"""Sampling: what a row draws depends on its own logits and its own draw, and the draws follow the distribution."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.worker.sampling import Draw, finite_rows, sample, uniform

VOCABULARY = 12

draws = st.builds(
    Draw,
    temperature=st.sampled_from([0.0, 1e-38, 1e-5, 0.0099, 0.01, 0.5, 1.0, 7.0, 100.0]),
    top_k=st.sampled_from([None, 1, 2, 5, VOCABULARY, VOCABULARY + 1, 2**31, 2**63 - 1]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True).map(lambda u: int(u * 2**48) / 2**48),
)
logit_lines = st.lists(
    st.floats(-60, 60, width=32) | st.sampled_from([0.0, 3.0e38, -3.0e38]), min_size=VOCABULARY, max_size=VOCABULARY
)


def counted(draw: Draw, line: list[float], count: int = 4000) -> Counter[int]:
    logits = torch.tensor([line] * count)
    return Counter(sample(logits, [draw._replace(uniform=uniform(7, 0, i)) for i in range(count)]))


@given(st.lists(st.tuples(logit_lines, draws), min_size=1, max_size=8))
def test_a_row_draws_the_same_token_alone_and_in_any_batch(rows: list[tuple[list[float], Draw]]) -> None:
    logits = torch.tensor([line for line, _ in rows])
    together = sample(logits, [draw for _, draw in rows])
    assert together == [sample(torch.tensor([line]), [draw])[0] for line, draw in rows]
    backwards = sample(logits.flip(0), [draw for _, draw in reversed(rows)])
    assert together == backwards[::-1]


@given(logit_lines, draws)
def test_every_draw_gives_a_token_that_its_limits_leave(line: list[float], draw: Draw) -> None:
    (token_id,) = sample(torch.tensor([line]), [draw])
    rank = sorted(range(VOCABULARY), key=lambda i: (-line[i], i)).index(token_id)
    if draw.greedy:
        assert rank == 0
    elif draw.top_k is not None:
        assert rank < draw.top_k


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-8, 1e-5, 1e-3, 0.00999])
def test_a_tiny_temperature_is_greedy_and_the_lowest_id_wins_among_equals(temperature: float) -> None:
    line = [1.0, 9.0, 9.0, -3.0]
    assert sample(torch.tensor([line]), [Draw(temperature, top_k=3, top_p=0.2, uniform=0.99)]) == [1]


def test_draws_follow_the_softmax() -> None:
    line = [0.0, 1.0, 2.0, float(torch.finfo(torch.float32).min)]
    counts = counted(Draw(temperature=2.0), line)
    expected = torch.tensor(line).double().div(2.0).softmax(0) * 4000
    assert counts[3] == 0
    squares = sum((counts[i] - float(expected[i])) ** 2 / float(expected[i]) for i in range(3))
    assert squares < 13.8  # chi-square of 2 degrees of freedom, one in a thousand


def test_top_k_keeps_exactly_k_and_takes_lower_ids_among_equals() -> None:
    assert set(counted(Draw(temperature=1.0, top_k=2), [5.0, 7.0, 5.0, 5.0])) == {0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    line = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(counted(Draw(temperature=1.0, top_p=0.79), line)) == {0, 1}
    assert set(counted(Draw(temperature=1.0, top_p=0.81), line)) == {0, 1, 2}
    assert set(counted(Draw(temperature=1.0, top_p=1e-12), line)) == {0}
    assert set(counted(Draw(temperature=1.0, top_p=1.0), line)) == {0, 1, 2, 3}


def test_top_p_counts_the_probabilities_that_top_k_left() -> None:
    line = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    # Of the two that top_k leaves the first has 4/7: enough for 0.5, and not for 0.6.
    assert set(counted(Draw(temperature=1.0, top_k=2, top_p=0.5), line)) == {0}
    assert set(counted(Draw(temperature=1.0, top_k=2, top_p=0.6), line)) == {0, 1}


def test_a_limit_at_or_above_the_vocabulary_draws_as_no_limit_does() -> None:
    line = [0.3, -1.0, 2.0, 0.1]
    without = counted(Draw(temperature=1.5), line)
    for top_k in (4, 5, 2**31, 2**63 - 1):
        assert counted(Draw(temperature=1.5, top_k=top_k), line) == without


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127), st.integers(0, 10**6))
def test_a_uniform_is_below_one_and_the_same_each_time(seed: int, output: int, position: int) -> None:
    value = uniform(seed, output, position)
    assert 0 <= value < 1
    assert uniform(seed, output, position) == value


def test_seeds_outputs_and_positions_each_change_the_uniform() -> None:
    seeds = (-(2**63), -1, 0, 1, 2**31, 2**32, 2**63 - 1)
    values = {uniform(seed, output, position) for seed in seeds for output in range(8) for position in range(64)}
    assert len(values) == len(seeds) * 8 * 64
    # Neighbours in any of the three are not near each other: the mean of many is that of independent draws.
    assert abs(sum(values) / len(values) - 0.5) < 0.02


def test_the_rows_that_are_not_finite_are_told_apart() -> None:
    bad = [[0.0, float(value)] for value in ("nan", "inf", "-inf")]
    assert finite_rows(torch.tensor([[0.0, 1.0], *bad, [3e38, -3e38]])) == [True, False, False, False, True]
