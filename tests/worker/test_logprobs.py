"""Log-probabilities are those of the model's own logits, for each line by itself."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.worker.logprobs import TokenLogprob, logprobs_of

VOCABULARY = 9

logit_lines = st.lists(
    st.floats(-60, 60, width=32) | st.sampled_from([0.0, 1.5, 3.0e38, -3.0e38, 1e-40]),
    min_size=VOCABULARY,
    max_size=VOCABULARY,
)
asked = st.tuples(logit_lines, st.integers(0, VOCABULARY - 1), st.sampled_from([0, 1, 3, 8, 9, 20]))


def slow(line: list[float], token_id: int, count: int) -> TokenLogprob:
    logits = torch.tensor(line).tolist()
    highest = max(logits)
    total = math.log(sum(math.exp(logit - highest) for logit in logits))
    own = [logit - highest - total for logit in logits]
    order = sorted(range(VOCABULARY), key=lambda i: (-logits[i], i))[:count]
    rank = 1 + sum(1 for logit in logits if logit > logits[token_id])
    return TokenLogprob(token_id, own[token_id], rank, tuple((i, own[i]) for i in order))


@given(st.lists(asked, min_size=1, max_size=40))
@settings(max_examples=60)
def test_each_line_is_told_as_the_slow_reference_tells_it_and_as_it_is_alone(
    rows: list[tuple[list[float], int, int]],
) -> None:
    logits = torch.tensor([line for line, _, _ in rows])
    together = logprobs_of(logits, [token_id for _, token_id, _ in rows], [count for _, _, count in rows])
    for found, (line, token_id, count) in zip(together, rows, strict=True):
        assert [found] == logprobs_of(torch.tensor([line]), [token_id], [count])
        expected = slow(line, token_id, count)
        assert (found.token_id, found.rank) == (expected.token_id, expected.rank)
        assert [token for token, _ in found.top] == [token for token, _ in expected.top]
        values = [found.logprob, *(value for _, value in found.top)]
        lowest = torch.finfo(torch.float32).min
        slow_values = [max(lowest, value) for value in (expected.logprob, *(value for _, value in expected.top))]
        assert values == pytest.approx(slow_values, rel=1e-9, abs=1e-9)
        assert all(lowest <= value <= 0 for value in values)


def test_none_are_told_of_no_lines() -> None:
    assert logprobs_of(torch.empty((0, VOCABULARY)), [], []) == []


def test_a_vocabulary_of_which_little_is_asked_is_told_alike_alone_and_in_company() -> None:
    torch.manual_seed(0)
    logits = torch.randn(18, 50_000)
    chosen = logits.argmax(dim=1).tolist()
    together = logprobs_of(logits, chosen, [line % 21 for line in range(18)])
    assert together == [logprobs_of(logits[[line]], [chosen[line]], [line % 21])[0] for line in range(18)]
    assert [found.rank for found in together] == [1] * 18
    assert all(found.top[0] == (found.token_id, found.logprob) for found in together if found.top)
