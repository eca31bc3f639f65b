"""Every backend that this device has, against attention by its definition in float64."""

import random
from typing import TYPE_CHECKING

import pytest
import torch

from prefixgate.cache.hashing import CacheScope
from prefixgate.cache.kv_storage import KVLayout
from prefixgate.worker.attention import (
    KEYS,
    VALUES,
    AttentionBackend,
    AttentionShape,
    DecodeStep,
    GraphBackend,
    PackedStep,
    Scoring,
)
from prefixgate.worker.attention_check import check_attention
from prefixgate.worker.model_runner import Row
from prefixgate.worker.triton_attention import TritonAttention

if TYPE_CHECKING:
    from benchmarks.gpu_rig import Rig

BLOCK, NUM_BLOCKS, LAYERS = 16, 200, 2
SCOPE = CacheScope("t", "m")
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def backend_of(rig: "Rig", name: str, layout: KVLayout, heads: int) -> AttentionBackend:
    found = rig.backends(AttentionShape(layout, heads)).get(name, "it is not for this device")
    if isinstance(found, str):
        pytest.skip(f"{name}: {found}")
    return found


def make_rows(dice: random.Random, most_tokens: int) -> list[Row]:
    """Rows whose tables follow a common trunk for a while; no slot beyond their lengths is written."""
    free = dice.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    trunk = [free.pop() for _ in range(20)]
    rows = []
    for _ in range(dice.randint(1, 6)):
        shared = dice.choice([0, 8, 20])
        start = shared * BLOCK + dice.randint(0, 40)
        tokens = dice.choice([1, 1, most_tokens, dice.randint(1, most_tokens)])
        own = -(-(start + tokens) // BLOCK) - shared
        rows.append(Row([0] * tokens, start, trunk[:shared] + [free.pop() for _ in range(own)], SCOPE, True))
    return rows


def fill(pool: torch.Tensor, rows: list[Row]) -> None:
    """Write the slots that the rows have, and leave all others poisoned."""
    pool.fill_(float("nan"))
    for row in rows:
        stop = row.start + len(row.token_ids)
        for index, block in enumerate(row.block_ids):
            written = min(BLOCK, stop - index * BLOCK)
            if written > 0:
                # Of blocks that are shared all slots are.
                pool[block, :, :, :written] = torch.randn_like(pool[block, :, :, :written])


def by_definition(
    rows: list[Row], layer: torch.Tensor, query: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    group = query.shape[1] // layer.shape[3]
    outputs, sums, first = [], [], 0
    for row in rows:
        stop = row.start + len(row.token_ids)
        keys, values = (
            layer[row.block_ids, part].flatten(0, 1)[:stop].double().repeat_interleave(group, dim=1)
            for part in (KEYS, VALUES)
        )
        queries = query[first : first + len(row.token_ids)].double()
        first += len(row.token_ids)
        scores = torch.einsum("thd,shd->ths", queries, keys) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * (scores / scoring.softcap).tanh()
        positions = torch.arange(row.start, stop, device=query.device)[:, None, None]
        slots = torch.arange(stop, device=query.device)
        seen = (slots <= positions) & (slots > positions - (scoring.window or stop + 1))
        scores = scores.masked_fill(~seen, float("-inf"))
        outputs.append(torch.einsum("ths,shd->thd", scores.softmax(dim=-1), values))
        sums.append(scores.logsumexp(dim=-1))
    return torch.cat(outputs), torch.cat(sums)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["own", "grouped"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sdpa", "triton", "vllm_flash_attn"])
@pytest.mark.parametrize("seed", range(4))
def test_attention_is_what_its_definition_says(
    rig: "Rig", name: str, dtype: str, heads: tuple[int, int], seed: int
) -> None:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    layout = KVLayout(LAYERS, heads[1], dice.choice([64, 128]), DTYPES[dtype])
    backend = backend_of(rig, name, layout, heads[0])
    storage = rig.storage(NUM_BLOCKS, layout)
    rows = make_rows(dice, most_tokens=dice.choice([40, 150]))
    fill(storage.data, rows)
    tokens = sum(len(row.token_ids) for row in rows)
    query = torch.randn(tokens, heads[0], layout.head_dim, device=rig.device).to(layout.dtype)
    scoring = Scoring(layout.head_dim**-0.5, window=dice.choice([None, None, 100]))
    layer = storage.data[:, 1]
    expected, expected_sums = by_definition(rows, layer, query, scoring)
    limit = TOLERANCE[layout.dtype]
    for share in (True, False):
        backend.begin(PackedStep(rows, BLOCK, rig.device, share=share))
        output = backend.attend(query, layer, scoring)
        torch.testing.assert_close(output.double(), expected, rtol=limit, atol=limit)
        output, sums = backend.attend_with_lse(query, layer, scoring)
        torch.testing.assert_close(output.double(), expected, rtol=limit, atol=limit)
        torch.testing.assert_close(sums.double(), expected_sums, rtol=limit, atol=limit)


@pytest.mark.parametrize("name", ["triton", "vllm_flash_attn", "gathering"])
@pytest.mark.parametrize("seed", range(4))
def test_a_step_that_can_be_recorded_is_no_other(rig: "Rig", name: str, seed: int) -> None:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    layout = KVLayout(LAYERS, 4, 64, rig.dtype)
    backend = backend_of(rig, name, layout, 8)
    assert isinstance(backend, GraphBackend)
    storage = rig.storage(NUM_BLOCKS, layout)
    rows = make_rows(dice, most_tokens=1)
    fill(storage.data, rows)
    assert storage.scratch is not None
    storage.data[storage.scratch] = float("nan")
    # Filled up as graphs are: rows of one token in the scratch block.
    size, width = len(rows) + 3, 64
    tables = torch.zeros((size, width), dtype=torch.int32)
    tables[len(rows) :, 0] = storage.scratch
    for index, row in enumerate(rows):
        tables[index, : len(row.block_ids)] = torch.tensor(row.block_ids)
    positions = torch.tensor([row.start for row in rows] + [0] * 3)
    blocks = tables.long().gather(1, positions[:, None] // BLOCK)[:, 0]
    step = DecodeStep(
        positions=positions.to(rig.device),
        blocks=blocks.to(rig.device),
        offsets=(positions % BLOCK).to(rig.device),
        tables=tables.to(rig.device),
        lengths=(positions + 1).int().to(rig.device),
        block_size=BLOCK,
    )
    backend.begin_decode(step)
    layer = storage.data[:, 0]
    key, value = torch.randn(2, size, 4, 64, device=rig.device).to(rig.dtype)
    backend.write(key, value, layer)
    query = torch.randn(size, 8, 64, device=rig.device).to(rig.dtype)
    found = backend.attend(query, layer, Scoring(0.125))
    assert bool(found.isfinite().all())
    expected, _ = by_definition(rows, layer, query[: len(rows)], Scoring(0.125))
    limit = TOLERANCE[rig.dtype]
    torch.testing.assert_close(found[: len(rows)].double(), expected, rtol=limit, atol=limit)


def test_triton_is_prepared_and_serves_windows_caps_and_sinks_together(rig: "Rig") -> None:
    layout = KVLayout(LAYERS, 2, 80, rig.dtype)
    backend = backend_of(rig, "triton", layout, 14)
    assert isinstance(backend, TritonAttention)
    shape = AttentionShape(layout, 14, windows=True, softcap=True, sinks=True)
    backend.prepare(shape, rig.device)
    check_attention(backend, shape, rig.device)
