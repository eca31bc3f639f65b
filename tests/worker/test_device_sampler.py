"""Choosing on the device: the same tokens as on the host, in one copy to it, and with nothing read before."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.worker import device_sampler
from prefixgate.worker.device_sampler import DeviceSampler
from prefixgate.worker.request import SamplingParams
from prefixgate.worker.sampler import Choice, Sampler
from prefixgate.worker.sequence import Sequence as Output
from prefixgate.worker.token_set import TokenSet
from tests.worker.test_sampler import EOS, VOCABULARY, Row, rows

KINDS = {
    "greedy": SamplingParams(9),
    "temperature": SamplingParams(9, temperature=1.0),
    "min_p": SamplingParams(9, temperature=1.0, min_p=0.1),
    "top_k": SamplingParams(9, temperature=1.0, top_k=3),
    "top_p": SamplingParams(9, temperature=1.0, top_p=0.5),
    "penalties": SamplingParams(9, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1),
    "bias": SamplingParams(9, logit_bias=((3, 2.0),)),
    "allowed": SamplingParams(9, allowed_ids=TokenSet.of([1, 4])),
    "banned": SamplingParams(9, banned_ids=TokenSet.of([1, 4])),
    "min_tokens": SamplingParams(9, min_tokens=5),
    "logprobs": SamplingParams(9, logprobs=3),
    "own logprob": SamplingParams(9, temperature=1.0, logprobs=0),
}


def on_host(row: Row) -> Choice | None:
    line, params, output = row
    try:
        return Sampler(EOS).choose(torch.tensor([line]), [(params, output)])[0]
    except ValueError:
        return None


def on_device(batch: Sequence[Row], lines: Sequence[int] | None = None) -> tuple[list[bool], list[Choice | None]]:
    logits = torch.tensor([line for line, _, _ in batch])
    wanted = range(len(batch)) if lines is None else lines
    awaited = DeviceSampler(EOS).choose(logits, wanted, [(batch[line][1], batch[line][2]) for line in wanted])
    finite, choices = awaited.wait()
    assert awaited.token_ids.tolist() == [
        ids if choice is None else choice.token_id
        for ids, choice in zip(awaited.token_ids.tolist(), choices, strict=True)
    ]
    return finite, choices


def output_of(index: int = 0) -> Output:
    return Output(index, token_ids=[1, 2, 3, 2], num_output=2)


@given(st.lists(rows(), min_size=1, max_size=6))
@settings(max_examples=150)
def test_the_device_chooses_what_the_host_chooses(batch: list[Row]) -> None:
    finite, choices = on_device(batch)
    assert finite == [True] * len(batch)
    assert choices == [on_host(row) for row in batch]


@given(st.lists(rows(), min_size=2, max_size=5), st.data())
@settings(max_examples=50)
def test_rows_choose_from_the_lines_they_name(batch: list[Row], data: st.DataObject) -> None:
    lines = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=6))
    _, choices = on_device(batch, lines)
    assert choices == [on_host(batch[line]) for line in lines]


@given(st.lists(rows(), min_size=2, max_size=5), st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
@settings(max_examples=50)
def test_a_line_that_is_not_finite_is_told_and_leaves_the_others_alone(
    batch: list[Row], value: float, data: st.DataObject
) -> None:
    spoilt = data.draw(st.integers(0, len(batch) - 1))
    line, params, output = batch[spoilt]
    whole = data.draw(st.booleans())
    batch[spoilt] = ([value] * len(line) if whole else [*line[:-1], value], params, output)
    finite, choices = on_device(batch)
    assert finite == [index != spoilt for index in range(len(batch))]
    assert [choice for index, choice in enumerate(choices) if index != spoilt] == [
        on_host(row) for index, row in enumerate(batch) if index != spoilt
    ]
    made_up = choices[spoilt]
    assert made_up is None or 0 <= made_up.token_id < VOCABULARY, "the next step looks up its embedding"


@given(rows())
def test_a_row_that_runs_ahead_draws_as_it_does_once_its_token_is_known(row: Row) -> None:
    line, params, output = row
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        return
    logits = torch.tensor([line])
    ahead = DeviceSampler(EOS).choose(logits, [0], [(params, output)], ahead=1).wait()
    known = Output(output.index, token_ids=[*output.token_ids, 1], num_output=output.num_output + 1)
    assert ahead == DeviceSampler(EOS).choose(logits, [0], [(params, known)]).wait()


class Counted:
    """Stands for the copy to the host, of tensors that hold nothing."""

    made: list[list[torch.Size]]

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        assert all(part.device.type == "meta" for part in parts)
        self.made.append([part.shape for part in parts])


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [list(KINDS)], ids=lambda kinds: "+".join(kinds)[:20])
def test_nothing_is_read_from_the_device_but_one_copy(kinds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors on "meta" have no values: whatever asks for one, or for a shape that depends on one, raises.
    monkeypatch.setattr(Counted, "made", [], raising=False)
    monkeypatch.setattr(device_sampler, "Readback", Counted)
    logits = torch.empty((len(kinds) + 2, VOCABULARY), device="meta")
    batch = [(KINDS[kind], output_of(index)) for index, kind in enumerate(kinds)]
    awaited = DeviceSampler(EOS).choose(logits, range(1, len(kinds) + 1), batch)
    assert awaited.token_ids.device.type == "meta"
    assert [shapes[:3] for shapes in Counted.made] == [
        [torch.Size([len(kinds) + 2]), torch.Size([len(kinds)]), torch.Size([len(kinds)])]
    ]


def test_values_that_are_not_there_cannot_be_read() -> None:
    # What the test above rests on.
    with pytest.raises((RuntimeError, NotImplementedError)):
        Sampler(EOS).choose(torch.empty((1, VOCABULARY), device="meta"), [(KINDS["top_p"], output_of())])
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.empty(1, device="meta").tolist()
