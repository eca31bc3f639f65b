"""Sampling of a batch: every row against a slow reference of its own, alone and in company."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.worker.logit_edits import edited, leaves_choice
from prefixgate.worker.request import SamplingParams
from prefixgate.worker.sampler import Choice, Sampler
from prefixgate.worker.sampling import uniform
from prefixgate.worker.sequence import Sequence as Output
from prefixgate.worker.token_set import TokenSet

VOCABULARY = 12
EOS = frozenset({0, 5})

Row = tuple[list[float], SamplingParams, Output]

ids = st.integers(0, VOCABULARY - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.0, -0.0, 1e-310, 0.5, 1.0, 100.0]),
    top_k=st.sampled_from([None, None, 1, 3, VOCABULARY, 2**63 - 1]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 1e-310]),
    min_p=st.sampled_from([0.0, -0.0, 1e-310, 0.05, 1.0]),
    seed=st.integers(-2, 2),
    stop_ids=st.frozensets(ids, max_size=2),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 2, 4]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.01, 1.3, 10.0]),
    presence_penalty=st.sampled_from([0.0, -0.0, -2.0, 1e-310, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.3]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -0.0, 1e-310, 3.5, 100.0]), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    allowed_ids=st.just(TokenSet()) | st.frozensets(ids, min_size=5).map(TokenSet.of),
    banned_ids=st.frozensets(ids, max_size=2).map(TokenSet.of),
    logprobs=st.sampled_from([None, None, 0, 1, 5, 20]),
)
logit_lines = st.lists(
    st.floats(-30, 30, width=32) | st.sampled_from([0.0, -0.0, 3.0e38, -3.0e38, 1e-40]),
    min_size=VOCABULARY,
    max_size=VOCABULARY,
)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    prompt, output = draw(st.lists(ids, min_size=1, max_size=6)), draw(st.lists(ids, max_size=6))
    sequence = Output(draw(st.integers(0, 3)), token_ids=[*prompt, *output], num_output=len(output))
    return draw(logit_lines), draw(params), sequence


def choose(batch: Sequence[Row]) -> list[Choice | None]:
    """Choose for a batch; None for a row of which nothing is left, as each is tried alone then."""
    logits = torch.tensor([line for line, _, _ in batch])
    before = logits.clone()
    try:
        return list(Sampler(EOS).choose(logits, [(row_params, output) for _, row_params, output in batch]))
    except ValueError:
        return [None] if len(batch) == 1 else [choice for row in batch for choice in choose([row])]
    finally:
        assert torch.equal(logits, before), "the model's logits are not ours to change"


def slow_edits(line: list[float], row_params: SamplingParams, output: Output) -> list[float]:
    """One logit after the other, by the words of the protocol."""
    sampled = output.token_ids[len(output.token_ids) - output.num_output :]
    result = []
    for token, logit in enumerate(np.array(line, dtype=np.float32).tolist()):
        value = logit
        if token in output.token_ids and row_params.repetition_penalty != 1:
            value = value / row_params.repetition_penalty if value > 0 else value * row_params.repetition_penalty
        value -= row_params.presence_penalty * (token in sampled) + row_params.frequency_penalty * sampled.count(token)
        value += dict(row_params.logit_bias).get(token, 0)
        ends = token in row_params.stop_ids or (token in EOS and not row_params.ignore_eos)
        if (
            (row_params.allowed_ids and token not in row_params.allowed_ids.ids)
            or token in row_params.banned_ids.ids
            or (ends and output.num_output < row_params.min_tokens)
        ):
            value = -math.inf
        result.append(value)
    return result


def slow_choice(line: list[float], row_params: SamplingParams, output: Output) -> int:
    logits = slow_edits(line, row_params, output)
    order = sorted(range(VOCABULARY), key=lambda token: (-logits[token], token))
    if row_params.temperature < 0.01:
        return order[0]
    weights = [math.exp((logits[token] - logits[order[0]]) / row_params.temperature) for token in order]
    weights = weights[: row_params.top_k]
    total, before = sum(weights), 0.0
    kept: list[float] = []
    for weight in weights:
        if kept and row_params.top_p < 1 and before / total >= row_params.top_p:
            break
        kept.append(weight)
        before += weight
    choices = sorted((token, w) for token, w in zip(order, kept, strict=False) if w >= row_params.min_p * kept[0])
    target = uniform(row_params.seed, output.index, output.num_output) * sum(w for _, w in choices)
    for token, weight in choices:
        target -= weight
        if target < 0:
            return token
    raise AssertionError("the draw lies beyond the distribution")


@given(rows())
def test_logits_are_edited_as_the_protocol_says(row: Row) -> None:
    line, row_params, output = row
    expected = slow_edits(line, row_params, output)
    edits = edited(torch.tensor([line]), [(row_params, output)], EOS)
    assert edits[0].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-300)
    assert leaves_choice(edits).tolist() == [max(expected) > -math.inf]
    if max(expected) == -math.inf:
        with pytest.raises(ValueError, match="no token"):
            Sampler(EOS).choose(torch.tensor([line]), [(row_params, output)])


@given(rows())
def test_a_row_is_chosen_as_the_slow_reference_chooses(row: Row) -> None:
    (choice,) = choose([row])
    if choice is not None:
        assert choice.token_id == slow_choice(*row)


@given(st.lists(rows(), min_size=2, max_size=5))
@settings(max_examples=50)
def test_a_row_is_the_same_alone_and_in_any_batch(batch: list[Row]) -> None:
    together = choose(batch)
    assert together == [choice for row in batch for choice in choose([row])]
    assert together[::-1] == choose(batch[::-1])


@given(rows())
def test_what_ends_an_output_is_not_sampled_before_its_least_length(row: Row) -> None:
    _, row_params, output = row
    (choice,) = choose([row])
    if choice is not None and output.num_output < row_params.min_tokens:
        assert choice.token_id not in row_params.ending_ids(EOS)
