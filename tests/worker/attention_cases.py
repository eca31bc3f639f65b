"""Attention written out token by token, and random steps to compare backends with it."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from prefixgate.cache.hashing import CacheScope
from prefixgate.worker.attention import KEYS, VALUES, PackedStep, Scoring
from prefixgate.worker.model_runner import Row

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
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float32, most_rows: int = 4, most_tokens: int = 40) -> Case:
    """Draw rows whose tables follow a common trunk for a while, each for as long as it likes."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    block_size, head_dim, group = draw(st.sampled_from([(4, 8, 3), (16, 64, 3), (4, 80, 1), (16, 16, 4)]))
    free = torch.randperm(NUM_BLOCKS, generator=random).tolist()
    trunk = [free.pop() for _ in range(12)]
    layer = torch.full((NUM_BLOCKS, 2, block_size, KV_HEADS, head_dim), float("nan"), dtype=dtype)
    rows = []
    for _ in range(draw(st.integers(1, most_rows))):
        shared = draw(st.integers(0, len(trunk)))
        start = shared * block_size + draw(st.integers(0, 2 * block_size + 1))
        tokens = draw(st.sampled_from([1, 1, 2, 7, most_tokens]))
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
