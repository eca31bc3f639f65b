"""Attention over the pool by block table: what a step's rows look like to a backend, and what a backend is.

A backend reads *written* slots only, by selecting them. Masking is not enough: an unwritten slot may hold anything, and
``0 * NaN`` is NaN.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from prefixgate.cache.kv_storage import KVLayout
from prefixgate.worker.attention_segments import Segment, own_segments, shared_segments
from prefixgate.worker.model_runner import Row
from prefixgate.worker.transfers import upload

KEYS, VALUES = 0, 1
"""Indexes of keys and values in the pool's ``k|v`` dimension."""


class AttentionUnavailableError(Exception):
    """A backend cannot serve a model on this machine, and why."""


class AttentionShape(NamedTuple):
    """What a model's layers ask of attention, all of them together."""

    layout: KVLayout
    query_heads: int
    windows: bool = False
    """Whether any layer looks back a limited number of slots."""
    softcap: bool = False
    """Whether any layer caps its scores."""
    sinks: bool = False
    """Whether any layer has scores without values."""


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

    def __init__(
        self,
        rows: Sequence[Row],
        block_size: int,
        device: torch.device,
        *,
        share: bool = True,
        token_ids: torch.Tensor | None = None,
    ) -> None:
        """Lay out the rows. ``share`` false leaves blocks that several rows begin with to each of them.

        ``token_ids``, int64 ``[T]`` on the device, stand for those in the rows.
        """
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
        count = len(ids)
        numbers = upload(np.array([*ids, *positions, *blocks, *wanted], dtype=np.int64), device)
        self.token_ids = numbers[:count] if token_ids is None else token_ids
        self.positions = numbers[count : 2 * count]
        self.blocks = numbers[2 * count : 3 * count]
        """``[T]``: the block of each token's slot."""
        self.offsets = self.positions % block_size
        self.wanted = numbers[3 * count :]
        """``[L]``: indexes of the tokens whose logits are wanted."""
        tables, lengths = [row.block_ids for row in rows], [view.length for view in self.rows]
        own = own_segments(tables, lengths, block_size)
        starts = [view.start for view in self.rows]
        self.segments: list[Segment] = shared_segments(own, starts, block_size) if share and len(rows) > 1 else own
        """Together they hold each row's written slots exactly once."""


class DecodeStep(NamedTuple):
    """A step of one token for each row, in tensors that stay where they are while what they hold changes.

    Work that is recorded over them once is run again for other rows. So nothing of it may depend on a value: only on
    shapes. Rows that fill a batch up are sequences of one token in a block that nobody owns.
    """

    positions: torch.Tensor
    """int64 ``[R]``: of each row's token; the slots below it are written."""
    blocks: torch.Tensor
    """int64 ``[R]``: the block of each token's slot."""
    offsets: torch.Tensor
    """int64 ``[R]``: its place in that block."""
    tables: torch.Tensor
    """int32 ``[R, W]``, contiguous: each row's blocks; beyond what ``lengths`` needs they mean nothing."""
    lengths: torch.Tensor
    """int32 ``[R]``: slots that each token sees, its own included: 1 to ``W * block_size``."""
    block_size: int


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


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be recorded in a CUDA graph."""

    def begin_decode(self, step: DecodeStep) -> None:
        """Take the step that the following calls of ``write`` and ``attend`` belong to, instead of ``begin``.

        They read the step's tensors when they run on the device and nothing of them on the host, launch the same
        kernels whatever these hold, and keep no reference to a tensor of their own that a later step would change.
        """
