"""Tries a backend on its device before it may serve: what a model's short probe does not reach.

That is blocks shared by several rows, whose parts are merged by their sums, steps that may be recorded in a graph, and
windows and caps where layers have them. A backend is compared with the reference, which is told to share nothing.
"""

from collections.abc import Iterator

import torch

from prefixgate.cache.hashing import CacheScope
from prefixgate.cache.kv_storage import KVLayout, TorchKVStorage
from prefixgate.worker.attention import (
    AttentionBackend,
    AttentionShape,
    AttentionUnavailableError,
    DecodeStep,
    GraphBackend,
    PackedStep,
    Scoring,
)
from prefixgate.worker.attention_segments import MIN_SHARED_BLOCKS
from prefixgate.worker.model_runner import Row
from prefixgate.worker.sdpa_attention import SdpaBackend

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest difference of an output or a sum, whose values are of the order of 1. What is merged wrongly is far above."""

_WINDOW = 23


def check_attention(backend: AttentionBackend, shape: AttentionShape, device: torch.device) -> None:
    """Raise AttentionUnavailableError where a backend's outputs or sums are not the reference's."""
    layout = shape.layout
    rows = _rows(layout.block_size)
    random = torch.Generator().manual_seed(1)
    layer = _layer(layout, rows, random, device)
    packed = PackedStep(rows, layout.block_size, device, share=False)
    tokens = len(packed.positions)
    query = torch.randn(tokens, shape.query_heads, layout.head_dim, generator=random).to(device, layout.dtype)
    sinks = torch.randn(shape.query_heads, generator=random).to(device) if shape.sinks else None
    for scoring in _scorings(shape, sinks):
        reference = SdpaBackend()
        reference.begin(packed)
        expected = reference.attend_with_lse(query, layer, scoring)
        backend.begin(PackedStep(rows, layout.block_size, device))
        outputs, sums = backend.attend_with_lse(query, layer, scoring)
        _compare("outputs", outputs, expected[0], layout.dtype)
        _compare("sums", sums, expected[1], layout.dtype)
        _compare("outputs without sums", backend.attend(query, layer, scoring), expected[0], layout.dtype)
        if isinstance(backend, GraphBackend):
            decode, at = _decode_step(rows, packed)
            backend.begin_decode(decode)
            _compare(
                "outputs of a decode step", backend.attend(query[at], layer, scoring), expected[0][at], layout.dtype
            )


def _rows(block_size: int) -> list[Row]:
    """Two that decode and one that prefills behind a common beginning, and one alone; in no order of anything."""
    trunk = [9, 2, 7, 4, 5][:MIN_SHARED_BLOCKS]
    shared = len(trunk) * block_size
    scope = CacheScope("check", "")
    spans = [
        (shared + 3, 1, [*trunk, 11]),
        (shared, block_size + 5, [*trunk, 0, 13]),
        (block_size + 1, 1, [6, 12]),
        (shared + block_size - 1, 1, [*trunk, 3]),
    ]
    return [Row([0] * count, start, table, scope, True) for start, count, table in spans]


def _layer(layout: KVLayout, rows: list[Row], random: torch.Generator, device: torch.device) -> torch.Tensor:
    """Make one layer of a pool in which the slots that rows have written hold numbers, and all others NaN."""
    num_blocks = 1 + max(max(row.block_ids) for row in rows)
    one = KVLayout(2, layout.num_kv_heads, layout.head_dim, layout.dtype, layout.block_size)
    storage = TorchKVStorage(num_blocks, one, device=device)
    storage.poison(range(num_blocks))
    layer = storage.data[:, 1]
    numbers = torch.randn(layer.shape, generator=random).to(device, layout.dtype)
    for row in rows:
        for position in range(row.start + len(row.token_ids)):
            block, offset = row.block_ids[position // layout.block_size], position % layout.block_size
            layer[block, :, offset] = numbers[block, :, offset]
    return layer


def _scorings(shape: AttentionShape, sinks: torch.Tensor | None) -> Iterator[Scoring]:
    scale = shape.layout.head_dim**-0.5
    softcap = 2.0 if shape.softcap else None
    yield Scoring(scale, None, softcap, sinks)
    if shape.windows:
        yield Scoring(scale, _WINDOW, softcap, sinks)


def _decode_step(rows: list[Row], packed: PackedStep) -> tuple[DecodeStep, torch.Tensor]:
    """Make a decode step of the rows' last tokens, and tell where these are in the packed step."""
    device = packed.positions.device
    at = torch.tensor([view.first + view.tokens - 1 for view in packed.rows], device=device)
    width = max(len(row.block_ids) for row in rows)
    tables = [[*row.block_ids, *[0] * (width - len(row.block_ids))] for row in rows]
    positions = packed.positions[at]
    step = DecodeStep(
        positions,
        packed.blocks[at],
        packed.offsets[at],
        torch.tensor(tables, dtype=torch.int32, device=device),
        (positions + 1).to(torch.int32),
        packed.block_size,
    )
    return step, at


def _compare(what: str, given: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    difference = float((given.float() - expected.float()).abs().max())
    if not difference <= TOLERANCE[dtype]:  # true for NaN too
        raise AttentionUnavailableError(
            f"its {what} differ by {difference:.3g} from the reference's; at most {TOLERANCE[dtype]:g} can be rounding"
        )
