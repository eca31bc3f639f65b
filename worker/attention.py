"""Attention over the pool by block table: what a step's rows look like to a backend, and the reference backend.

A backend reads *written* slots only, by selecting them. Masking is not enough: an unwritten slot may hold anything, and
``0 * NaN`` is NaN. So keys and values are gathered by block table and cut at the row's length before any arithmetic.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

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
    block_ids: torch.Tensor
    """``[blocks]``, those that hold the ``length`` written slots."""

    @property
    def length(self) -> int:
        """Slots that its last token sees, its own included."""
        return self.start + self.tokens


class PackedStep:
    """The rows of one step laid end to end, with everything that all layers need to know of them."""

    def __init__(self, rows: Sequence[Row], block_size: int, device: torch.device) -> None:
        ids: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        self.rows: list[RowView] = []
        wanted: list[int] = []
        for row in rows:
            first, stop = len(ids), row.start + len(row.token_ids)
            covering = row.block_ids[: -(-stop // block_size)]
            ids.extend(row.token_ids)
            positions.extend(range(row.start, stop))
            blocks.extend(covering[position // block_size] for position in range(row.start, stop))
            table = torch.tensor(covering, dtype=torch.int64, device=device)
            self.rows.append(RowView(first, row.start, len(row.token_ids), table))
            wanted.extend(range(len(ids) - row.num_logits, len(ids)))
        self.token_ids = torch.tensor(ids, dtype=torch.int64, device=device)
        self.positions = torch.tensor(positions, dtype=torch.int64, device=device)
        self.blocks = torch.tensor(blocks, dtype=torch.int64, device=device)
        """``[T]``: the block of each token's slot."""
        self.offsets = self.positions % block_size
        self.wanted = torch.tensor(wanted, dtype=torch.int64, device=device)
        """``[L]``: indexes of the tokens whose logits are wanted."""


class AttentionBackend(Protocol):
    """Attention of a step's queries over one layer of the pool.

    ``query`` is ``[T, heads, head_dim]``; ``layer`` is the layer's view of the pool, ``[block, k|v, token, kv_head,
    head_dim]``, in which the step's own slots are written already. ``window`` is the number of slots that a token sees,
    its own included; None is all of them.
    """

    def attend(
        self, query: torch.Tensor, layer: torch.Tensor, step: PackedStep, scale: float, window: int | None
    ) -> torch.Tensor:
        """Return the outputs, ``[T, heads, head_dim]``."""

    def attend_with_lse(
        self, query: torch.Tensor, layer: torch.Tensor, step: PackedStep, scale: float, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs, and the natural log-sum-exp of the scaled scores, float32 ``[T, heads]``.

        With it, attention over two parts of a sequence can be merged into attention over both.
        """


class SdpaBackend:
    """The reference: one ``scaled_dot_product_attention`` for each row, on any device."""

    def attend(
        self, query: torch.Tensor, layer: torch.Tensor, step: PackedStep, scale: float, window: int | None
    ) -> torch.Tensor:
        """Attend row by row."""
        output = torch.empty_like(query)
        for row, queries, keys, values in _gathered(query, layer, step):
            mask = _visible(row, window, query.device)
            if mask is not None:
                mask = mask.repeat(queries.shape[1] // row.tokens, 1)
            heads = scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=mask, scale=scale)[
                0
            ]
            output[row.first : row.first + row.tokens] = _ungroup(heads, row.tokens)
        return output

    def attend_with_lse(
        self, query: torch.Tensor, layer: torch.Tensor, step: PackedStep, scale: float, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend row by row in plain float32 matrix products, since torch's function keeps the sums to itself."""
        output = torch.empty_like(query)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        for row, queries, keys, values in _gathered(query, layer, step):
            scores = queries.float() @ keys.float().transpose(1, 2) * scale
            mask = _visible(row, window, query.device)
            if mask is not None:
                scores = scores.masked_fill(~mask.repeat(queries.shape[1] // row.tokens, 1), float("-inf"))
            sums = scores.logsumexp(dim=-1, keepdim=True)
            heads = (scores - sums).exp() @ values.float()
            output[row.first : row.first + row.tokens] = _ungroup(heads, row.tokens).to(query.dtype)
            lse[row.first : row.first + row.tokens] = _ungroup(sums, row.tokens)[..., 0]
        return output, lse


def _gathered(
    query: torch.Tensor, layer: torch.Tensor, step: PackedStep
) -> Iterator[tuple[RowView, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield each row with its queries ``[kv_head, group * T, d]`` and written keys and values ``[kv_head, length, d]``.

    The query heads that share a kv head are laid out as if they were more tokens: that needs no repeated keys and no
    feature of newer torch releases.
    """
    kv_heads, head_dim = layer.shape[3:]
    for row in step.rows:
        queries = query[row.first : row.first + row.tokens].view(row.tokens, kv_heads, -1, head_dim)
        keys, values = (
            layer[:, part].index_select(0, row.block_ids).flatten(0, 1)[: row.length].transpose(0, 1)
            for part in (KEYS, VALUES)
        )
        yield row, queries.permute(1, 2, 0, 3).flatten(1, 2), keys, values


def _ungroup(heads: torch.Tensor, tokens: int) -> torch.Tensor:
    """Turn ``[kv_head, group * T, d]`` back into ``[T, heads, d]``."""
    kv_heads, _, size = heads.shape
    return heads.view(kv_heads, -1, tokens, size).permute(2, 0, 1, 3).flatten(1, 2)


def _visible(row: RowView, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return which slots each token sees, bool ``[T, length]``; None where each sees all of them."""
    window = window or row.length
    if row.tokens == 1 and window >= row.length:
        return None
    slots = torch.arange(row.length, device=device)
    positions = slots[row.start :, None]
    return (slots <= positions) & (slots > positions - window)
