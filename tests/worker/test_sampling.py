"""Sampling: what a row draws depends on its own logits and its own draw, and the draws follow the distribution."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.worker.sampling import FEW, Draw, finite_rows, sample, uniform

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


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    line = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(counted(Draw(temperature=1.0, min_p=0.25), line)) == {0, 1, 2}
    assert set(counted(Draw(temperature=1.0, min_p=0.65), line)) == {0}
    assert set(counted(Draw(temperature=1.0, min_p=1.0), [2.0, 1.0, 2.0, 1.9])) == {0, 2}
    # At a temperature of 2 the shares move together: the third has 0.55 of the likeliest, and the last 0.32.
    assert set(counted(Draw(temperature=2.0, min_p=0.4), line)) == {0, 1, 2}
    assert set(counted(Draw(temperature=1.0, min_p=0.25, top_k=2), line)) == {0, 1}


class TestLargeVocabularies:
    """More tokens than are looked at first."""

    SIZE = 3 * FEW

    def slow(self, line: torch.Tensor, draw: Draw) -> int:
        """Cut and draw from the whole vocabulary in order."""
        ordered, ids = line.double().sort(descending=True, stable=True)
        weights = (ordered[: draw.top_k] / draw.temperature).softmax(0)
        before = weights.cumsum(0) - weights
        num_left = max(1, int((before < draw.top_p).sum()))
        left = ids[:num_left].sort()
        cumulated = weights[left.indices].cumsum(0)
        return int(left.values[int((cumulated <= draw.uniform * cumulated[-1]).sum())])

    @pytest.mark.parametrize("top_k", [None, 1, 50, FEW - 1, FEW, FEW + 1, 2 * FEW])
    @pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.9999])
    def test_limits_reach_beyond_what_is_looked_at_first(self, top_k: int | None, top_p: float) -> None:
        torch.manual_seed(1)
        logits = torch.randn(12, self.SIZE)
        logits[5:8] = logits[5:8].round()  # so that many are equal
        temperatures = (0.05, 0.3, 1.0, 100.0)
        draws = [Draw(temperatures[i % 4], top_k, top_p, uniform=uniform(3, 0, i)) for i in range(12)]
        together = sample(logits, draws)
        assert together == [self.slow(line, draw) for line, draw in zip(logits, draws, strict=True)]
        assert together == [sample(logits[[i]], [draws[i]])[0] for i in range(12)]

    def test_rows_of_all_kinds_in_one_batch_draw_as_they_do_alone(self) -> None:
        torch.manual_seed(2)
        logits = torch.randn(60, self.SIZE) * 2
        kinds = [
            Draw(),
            Draw(1.0),
            Draw(1.0, min_p=0.1),
            Draw(1.0, top_k=40),
            Draw(1.0, top_p=0.9),
            Draw(100.0, top_p=0.9, min_p=0.2),
        ]
        draws = [kinds[i % 6]._replace(uniform=uniform(3, 0, i)) for i in range(60)]
        together = sample(logits, draws)
        assert together == [sample(logits[[i]], [draws[i]])[0] for i in range(60)]
        assert together[::-1] == sample(logits.flip(0), draws[::-1])


@pytest.mark.parametrize("draw", [Draw(), Draw(1.0), Draw(100.0, top_k=3), Draw(1.0, top_p=0.9), Draw(1.0, min_p=0.1)])
def test_what_has_no_likelihood_is_never_chosen(draw: Draw) -> None:
    line = [-math.inf, -3.0, -math.inf, -3.5]
    assert set(counted(draw, line, 400)) <= {1, 3}
    assert set(counted(draw, [-math.inf, -math.inf, -700.0, -math.inf], 50)) == {2}


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
