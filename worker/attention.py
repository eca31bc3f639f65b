"""Attention over the pool by block table: what a step's rows look like to a backend, and what a backend is.

A backend reads *written* slots only, by selecting them. Masking is not enough: an unwritten slot may hold anything, and
``0 * NaN`` is NaN.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from prefixgate.worker.attention_segments import Segment, own_segments, shared_segments
from prefixgate.worker.model_runner import Row

KEYS, VALUES = 0, 1
"""Indexes of keys and values in the pool's ``k|v`` dimension."""


class RowView(NamedTuple):
    """One row as a backend sees it."""

    first: int
    """Index of its first token among the step's tokens."""
    start: int
    """Position of that token."""
    tokens: int

    @property
    def length(self) -> int:
        """Slots that its last token sees, its own included."""
        return self.start + self.tokens


class Scoring(NamedTuple):
    """How one layer turns queries and keys into weights."""

    scale: float
    window: int | None = None
    """Slots that a token sees, its own included; None is all of them."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    sinks: torch.Tensor | None = None
    """``[heads]``: a score for each head that takes its share of the weight and has no value."""


class PackedStep:
    """The rows of one step laid end to end, with everything that all layers need to know of them."""

    def __init__(self, rows: Sequence[Row], block_size: int, device: torch.device, *, share: bool = True) -> None:
        """Lay out the rows. ``share`` false leaves blocks that several rows begin with to each of them."""
        ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        self.rows: list[RowView] = []
        self.block_size = block_size
        wanted: list[int] = []
        for row in rows:
            first, stop = len(ids), row.start + len(row.token_ids)
            ids.extend(row.token_ids)
            positions.extend(range(row.start, stop))
            blocks.extend(row.block_ids[position // block_size] for position in range(row.start, stop))
            self.rows.append(RowView(first, row.start, len(row.token_ids)))
            wanted.extend(range(len(ids) - row.num_logits, len(ids)))
        self.token_ids = torch.tensor(ids, dtype=torch.int64, device=device)
        self.positions = torch.tensor(positions, dtype=torch.int64, device=device)
        self.blocks = torch.tensor(blocks, dtype=torch.int64, device=device)
        """``[T]``: the block of each token's slot."""
        self.offsets = self.positions % block_size
        self.wanted = torch.tensor(wanted, dtype=torch.int64, device=device)
        """``[L]``: indexes of the tokens whose logits are wanted."""
        tables, lengths = [row.block_ids for row in rows], [view.length for view in self.rows]
        own = own_segments(tables, lengths, block_size)
        starts = [view.start for view in self.rows]
        self.segments: list[Segment] = shared_segments(own, starts, block_size) if share and len(rows) > 1 else own
        """Together they hold each row's written slots exactly once."""


class AttentionBackend(Protocol):
    """Attention of a step's queries over one layer of the pool.

    ``layer`` is the layer's view of the pool, ``[block, k|v, token, kv_head, head_dim]``.
    """

    def begin(self, step: PackedStep) -> None:
        """Take the step that the following calls belong to."""

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: torch.Tensor) -> None:
        """Store the step's own keys and values, ``[T, kv_heads, head_dim]`` each."""

    def attend(self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Return the outputs, ``[T, heads, head_dim]``, of queries of that shape. The step's slots are written."""

    def attend_with_lse(
        self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs, and the natural log-sum-exp of the scores, sinks included, float32 ``[T, heads]``.

        With it, attention over two parts of a sequence can be merged into attention over both.
        """
