"""Each attention backend against attention written out token by token, with and without shared beginnings."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.worker.attention import KEYS, VALUES, AttentionBackend, PackedStep, Scoring
from prefixgate.worker.model_runner import Row
from tests.worker.attention_cases import CPU, KV_HEADS, SCOPE, Case, attend_by_hand, cases
from tests.worker.backends import NAMES, make_backend


@pytest.fixture(params=NAMES, scope="module")
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return make_backend(request.param)


@given(case=cases(), share=st.booleans())
@settings(max_examples=30)
def test_attention_is_what_its_definition_says(backend: AttentionBackend, case: Case, share: bool) -> None:
    outputs, sums = attend_by_hand(case)
    backend.begin(case.step(share=share))
    torch.testing.assert_close(backend.attend(case.query, case.layer, case.scoring), outputs, rtol=1e-5, atol=1e-5)
    with_lse = backend.attend_with_lse(case.query, case.layer, case.scoring)
    torch.testing.assert_close(with_lse, (outputs, sums), rtol=1e-5, atol=1e-5)


@given(case=cases(torch.bfloat16))
@settings(max_examples=10)
def test_bfloat16_is_rounded_once(case: Case) -> None:
    backend = make_backend("compiled", torch.bfloat16)
    outputs, _ = attend_by_hand(case)
    backend.begin(case.step(share=True))
    torch.testing.assert_close(backend.attend(case.query, case.layer, case.scoring), outputs, rtol=1e-2, atol=1e-2)


@given(case=cases())
@settings(max_examples=10)
def test_tokens_are_written_where_their_rows_say(backend: AttentionBackend, case: Case) -> None:
    key, value = (
        torch.randn(KV_HEADS, len(case.query), case.query.shape[2]).transpose(0, 1) for _ in range(2)
    )  # as layers give them: heads first in memory
    before = case.layer.clone()
    backend.begin(case.step(share=True))
    backend.write(key, value, case.layer)
    for token, (row, length) in enumerate(case.lengths()):
        slot = (row.block_ids[(length - 1) // case.block_size], slice(None), (length - 1) % case.block_size)
        assert torch.equal(case.layer[slot], torch.stack([key[token], value[token]]))
        before[slot] = case.layer[slot]
    assert torch.equal(case.layer.nan_to_num(7), before.nan_to_num(7)), "no other slot has changed"


def test_a_layer_of_a_larger_pool_is_read_in_place(backend: AttentionBackend) -> None:
    pool = torch.full((5, 3, 2, 4, KV_HEADS, 8), float("nan"))
    pool[[4, 1], 1] = torch.randn(2, 2, 4, KV_HEADS, 8)
    case = Case([Row([0], 7, [4, 1], SCOPE, True)], pool[:, 1], torch.randn(1, 4, 8), 4, Scoring(0.3))
    backend.begin(case.step(share=True))
    torch.testing.assert_close(backend.attend(case.query, case.layer, case.scoring), attend_by_hand(case)[0])


def test_two_parts_of_a_sequence_merge_by_their_log_sums(backend: AttentionBackend) -> None:
    case = Case(
        [Row([0], 7, [4, 1], SCOPE, True)], torch.randn(5, 2, 4, KV_HEADS, 8), torch.randn(1, 6, 8), 4, Scoring(1)
    )
    parts = []
    for blocks in ([4], [1]):
        backend.begin(PackedStep([Row([0], 3, blocks, SCOPE, True)], 4, CPU))
        parts.append(backend.attend_with_lse(case.query, case.layer, case.scoring))
    (left, left_sums), (right, right_sums) = parts
    share = torch.sigmoid(left_sums - right_sums)[..., None]
    torch.testing.assert_close(share * left + (1 - share) * right, attend_by_hand(case)[0])


@pytest.mark.parametrize("part", [KEYS, VALUES])
def test_a_slot_that_is_no_number_spoils_those_who_see_it_and_nobody_else(backend: AttentionBackend, part: int) -> None:
    """A fault must show in the logits of the call it belongs to; it must not be taken for a slot out of sight."""
    layer = torch.randn(40, 2, 4, KV_HEADS, 16)
    layer[3, part, 2] = float("nan")
    trunk = list(range(6))
    rows = [
        Row([0], 27, [*trunk, 6], SCOPE, True),
        Row([0] * 9, 25, [*trunk, 7, 8, 9], SCOPE, True),
        Row([0], 5, [10, 11], SCOPE, True),
    ]
    query = torch.randn(11, 4, 16)
    backend.begin(PackedStep(rows, 4, CPU))
    output = backend.attend(query, layer, Scoring(1))
    assert output[:10].isnan().flatten(1).any(dim=1).all()
    assert output[10].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_attention_outside_a_step_is_an_error(name: str) -> None:
    with pytest.raises(RuntimeError, match="outside a step"):
        make_backend(name).attend(torch.zeros(1, 2, 8), torch.zeros(1, 2, 4, 2, 8), Scoring(1))


@pytest.mark.parametrize("spare", [0, 3])
def test_a_step_names_the_slot_of_each_token(spare: int) -> None:
    tables: list[Any] = [[7, 2, 9], [4, *range(20, 20 + spare)]]
    rows = [Row([5, 6, 7], 3, tables[0], SCOPE, False), Row([8], 1, tables[1], SCOPE, True)]
    step = PackedStep(rows, 4, CPU)
    assert step.token_ids.tolist() == [5, 6, 7, 8]
    assert step.positions.tolist() == [3, 4, 5, 1]
    assert step.blocks.tolist() == [7, 2, 2, 4]
    assert step.offsets.tolist() == [3, 0, 1, 1]
    assert step.wanted.tolist() == [3]
    assert sorted(step.segments) == [((0,), 0, 6, [7, 2]), ((1,), 0, 2, [4])]
