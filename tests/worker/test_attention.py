"""Each attention backend against attention written out token by token, with and without shared beginnings."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.cache.hashing import CacheScope
from prefixgate.worker.attention import KEYS, VALUES, AttentionBackend, PackedStep, Scoring
from prefixgate.worker.model_runner import Row
from tests.worker.backends import NAMES, make_backend

NUM_BLOCKS, KV_HEADS = 64, 2
CPU = torch.device("cpu")
SCOPE = CacheScope("t", "m")


@dataclass
class Case:
    """Rows over a pool in which every slot that no row has written is NaN."""

    rows: list[Row]
    layer: torch.Tensor
    query: torch.Tensor
    block_size: int
    scoring: Scoring

    def step(self, *, share: bool) -> PackedStep:
        return PackedStep(self.rows, self.block_size, CPU, share=share)

    def lengths(self) -> list[tuple[Row, int]]:
        """Each token's row, and how many slots it may see."""
        return [(row, row.start + i + 1) for row in self.rows for i in range(len(row.token_ids))]


def attend_by_hand(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with nothing but the definition, in float64."""
    outputs, sums = torch.empty_like(case.query), torch.empty(case.query.shape[:2])
    heads = case.query.shape[1]
    scale, window, softcap, sinks = case.scoring
    for token, (row, length) in enumerate(case.lengths()):
        seen = range(max(0, length - (window or length)), length)
        places = [(row.block_ids[p // case.block_size], p % case.block_size) for p in seen]
        slots = torch.stack([case.layer[block, :, offset] for block, offset in places]).double()
        for head in range(heads):
            kv_head = head * KV_HEADS // heads
            scores = slots[:, KEYS, kv_head] @ case.query[token, head].double() * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            weights = scores.softmax(0)[: len(slots)]
            outputs[token, head] = (weights @ slots[:, VALUES, kv_head]).float()
            sums[token, head] = scores.logsumexp(0).float()
    return outputs, sums


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Case:
    """Draw rows whose tables follow a common trunk for a while, each for as long as it likes."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    block_size, head_dim, group = draw(st.sampled_from([(4, 8, 3), (16, 64, 3), (4, 80, 1), (16, 16, 4)]))
    free = torch.randperm(NUM_BLOCKS, generator=random).tolist()
    trunk = [free.pop() for _ in range(12)]
    layer = torch.full((NUM_BLOCKS, 2, block_size, KV_HEADS, head_dim), float("nan"), dtype=dtype)
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        shared = draw(st.integers(0, len(trunk)))
        start = shared * block_size + draw(st.integers(0, 2 * block_size + 1))
        tokens = draw(st.sampled_from([1, 1, 2, 7, 40]))
        own = -(-(start + tokens) // block_size) - shared
        table = trunk[:shared] + [free.pop() for _ in range(own)]
        for position in range(start + tokens):
            slot = layer[table[position // block_size], :, position % block_size]
            if slot.isnan().all():
                slot.normal_(generator=random)
        rows.append(Row([0] * tokens, start, table, SCOPE, True))
    count = sum(len(row.token_ids) for row in rows)
    query = torch.randn(count, KV_HEADS * group, head_dim, generator=random).to(dtype)
    sinks = torch.randn(KV_HEADS * group, generator=random) if draw(st.booleans()) else None
    window, softcap = draw(st.sampled_from([None, None, 1, 5, 70])), draw(st.sampled_from([None, 2.0]))
    return Case(rows, layer, query, block_size, Scoring(0.3, window, softcap, sinks))


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
