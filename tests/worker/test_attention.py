"""The reference attention backend against attention written out token by token."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.cache.hashing import CacheScope
from prefixgate.worker.attention import KEYS, VALUES, PackedStep, SdpaBackend
from prefixgate.worker.model_runner import Row

BLOCK_SIZE, NUM_BLOCKS, KV_HEADS, HEAD_DIM = 4, 12, 2, 8
SCALE = 0.3
SCOPE = CacheScope("t", "m")


@dataclass
class Case:
    """Some rows over disjoint blocks, in a pool where every slot that no row has written is NaN."""

    step: PackedStep
    layer: torch.Tensor
    query: torch.Tensor
    rows: list[Row]


def make_case(spans: list[tuple[int, int]], group: int, seed: int) -> Case:
    """Make rows from (start, tokens) spans; ``group`` query heads share a kv head."""
    random = torch.Generator().manual_seed(seed)
    free = torch.randperm(NUM_BLOCKS, generator=random).tolist()
    layer = torch.full((NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM), float("nan"))
    rows = []
    for start, tokens in spans:
        table = [free.pop() for _ in range(-(-(start + tokens) // BLOCK_SIZE))]
        for position in range(start + tokens):
            slot = (table[position // BLOCK_SIZE], slice(None), position % BLOCK_SIZE)
            layer[slot] = torch.randn(2, KV_HEADS, HEAD_DIM, generator=random)
        rows.append(Row([0] * tokens, start, table, SCOPE, True))
    query = torch.randn(sum(tokens for _, tokens in spans), KV_HEADS * group, HEAD_DIM, generator=random)
    return Case(PackedStep(rows, BLOCK_SIZE, torch.device("cpu")), layer, query, rows)


def attend_by_hand(case: Case, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with nothing but the definition, in float64."""
    outputs, sums = torch.empty_like(case.query), torch.empty(case.query.shape[:2])
    group = case.query.shape[1] // KV_HEADS
    token = 0
    for row in case.rows:
        for position in range(row.start, row.start + len(row.token_ids)):
            seen = range(max(0, position + 1 - (window or position + 1)), position + 1)
            slots = torch.stack([case.layer[row.block_ids[p // BLOCK_SIZE], :, p % BLOCK_SIZE] for p in seen]).double()
            for head in range(case.query.shape[1]):
                keys, values = slots[:, KEYS, head // group], slots[:, VALUES, head // group]
                scores = keys @ case.query[token, head].double() * SCALE
                outputs[token, head] = (scores.softmax(0) @ values).float()
                sums[token, head] = scores.logsumexp(0).float()
            token += 1
    return outputs, sums


spans = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=3)


@given(spans, st.sampled_from([1, 3]), st.sampled_from([None, 1, 5]), st.integers(0, 99))
@settings(max_examples=40)
def test_attention_is_what_its_definition_says(
    spans: list[tuple[int, int]], group: int, window: int | None, seed: int
) -> None:
    case = make_case(spans, group, seed)
    outputs, sums = attend_by_hand(case, window)
    backend = SdpaBackend()
    torch.testing.assert_close(backend.attend(case.query, case.layer, case.step, SCALE, window), outputs)
    with_lse = backend.attend_with_lse(case.query, case.layer, case.step, SCALE, window)
    torch.testing.assert_close(with_lse[0], outputs)
    torch.testing.assert_close(with_lse[1], sums)


def test_two_parts_of_a_sequence_merge_by_their_log_sums() -> None:
    case = make_case([(7, 1)], 3, seed=5)
    parts = []
    for first, stop in ((0, 4), (4, 8)):
        part = Row([0], stop - first - 1, case.rows[0].block_ids[first // BLOCK_SIZE :], SCOPE, True)
        step = PackedStep([part], BLOCK_SIZE, torch.device("cpu"))
        parts.append(SdpaBackend().attend_with_lse(case.query, case.layer, step, SCALE, None))
    (left, left_sums), (right, right_sums) = parts
    share = torch.sigmoid(left_sums - right_sums)[..., None]
    whole = SdpaBackend().attend(case.query, case.layer, case.step, SCALE, None)
    torch.testing.assert_close(share * left + (1 - share) * right, whole)


@pytest.mark.parametrize("spare", [0, 3])
def test_a_step_names_the_slot_of_each_token(spare: int) -> None:
    tables = [[7, 2, 9], [4, *range(20, 20 + spare)]]
    rows = [Row([5, 6, 7], 3, tables[0], SCOPE, False), Row([8], 1, tables[1], SCOPE, True)]
    step = PackedStep(rows, BLOCK_SIZE, torch.device("cpu"))
    assert step.token_ids.tolist() == [5, 6, 7, 8]
    assert step.positions.tolist() == [3, 4, 5, 1]
    assert step.blocks.tolist() == [7, 2, 2, 4]
    assert step.offsets.tolist() == [3, 0, 1, 1]
    assert step.wanted.tolist() == [3]
    assert [row.block_ids.tolist() for row in step.rows] == [[7, 2], [4]]
