"""The reference backend: torch alone, on any device."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from prefixgate.worker.attention import KEYS, VALUES, PackedStep, RowView, Scoring
from prefixgate.worker.attention_segments import Segment
from prefixgate.worker.transfers import upload

MOST_SCORES = 1 << 22
"""Scores of a head that are held at once, half a gigabyte with 32 heads; as much again while they become weights."""

_LOWEST = torch.finfo(torch.float32).min


class SdpaBackend:
    """Gathers keys and values by block table, cut at the written slots, then attends.

    Rows alone with their blocks go through ``scaled_dot_product_attention``. Where blocks are shared, or a layer has
    what that function does not know, each segment is attended to in plain float32 matrix products, whose log-sum-exp
    lets the parts be merged.
    """

    def __init__(self, most_scores: int = MOST_SCORES) -> None:
        """``most_scores`` bounds what a head's scores take where parts are merged: more slots are taken in turn."""
        self._most_scores = most_scores
        self._step: PackedStep | None = None
        self._blocks: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor | slice] = []

    def begin(self, step: PackedStep) -> None:
        """Put the segments' block tables and tokens where the step is."""
        device = step.positions.device
        self._step = step
        self._blocks = [upload(np.array(segment.block_ids, dtype=np.int64), device) for segment in step.segments]
        self._tokens = [_tokens_of(segment, step.rows, device) for segment in step.segments]

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: torch.Tensor) -> None:
        """Store keys and values by block and offset."""
        step = self._current()
        layer[step.blocks, KEYS, step.offsets] = key
        layer[step.blocks, VALUES, step.offsets] = value

    def attend(self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Attend, row by row where nothing is to be merged."""
        step = self._current()
        if scoring.softcap or scoring.sinks is not None or any(len(segment.rows) > 1 for segment in step.segments):
            return self.attend_with_lse(query, layer, scoring)[0]
        output = query.new_empty(query.shape)
        for segment, blocks, tokens in zip(step.segments, self._blocks, self._tokens, strict=True):
            queries = _grouped(query[tokens], layer.shape[3])
            keys, values = _gather(layer, blocks, segment.slots)
            mask = _visible(step.positions[tokens], segment, scoring.window)
            if mask is not None:
                mask = mask.repeat(queries.shape[1] // len(mask), 1)
            heads = scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=mask, scale=scoring.scale
            )[0]
            output[tokens] = _ungrouped(heads, len(query[tokens]))
        return output

    def attend_with_lse(
        self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend segment by segment, merging as it goes."""
        step = self._current()
        output = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        if scoring.sinks is None:
            lse = torch.full(query.shape[:2], float("-inf"), device=query.device)
        else:
            lse = scoring.sinks.float().expand(query.shape[:2]).clone()
        for segment, blocks, tokens in self._pieces(step):
            queries = _grouped(query[tokens], layer.shape[3]).float()
            keys, values = (part.float() for part in _gather(layer, blocks, segment.slots))
            scores = queries @ keys.transpose(1, 2) * scoring.scale
            if scoring.softcap:
                scores = (scores / scoring.softcap).tanh() * scoring.softcap
            mask = _visible(step.positions[tokens], segment, scoring.window)
            if mask is not None:
                scores = scores.masked_fill(~mask.repeat(queries.shape[1] // len(mask), 1), float("-inf"))
            sums = scores.logsumexp(dim=-1, keepdim=True)
            # A token may see nothing of a segment: then the sum is -inf, from which nothing can be taken away.
            part = (scores - sums.clamp(min=_LOWEST)).exp() @ values
            count = len(query[tokens])
            part, part_lse = _ungrouped(part, count), _ungrouped(sums, count)[..., 0]
            merged = torch.logaddexp(lse[tokens], part_lse)
            base = merged.clamp(min=_LOWEST)
            kept, added = (lse[tokens] - base).exp()[..., None], (part_lse - base).exp()[..., None]
            output[tokens] = output[tokens] * kept + part * added
            lse[tokens] = merged
        return output.to(query.dtype), lse

    def _pieces(self, step: PackedStep) -> Iterator[tuple[Segment, torch.Tensor, torch.Tensor | slice]]:
        """Cut segments with many tokens and slots along their slots: what comes of a piece is merged like any other."""
        for segment, blocks, tokens in zip(step.segments, self._blocks, self._tokens, strict=True):
            count = sum(step.rows[row].tokens for row in segment.rows)
            num_blocks = max(1, self._most_scores // (count * step.block_size))
            for first in range(0, len(blocks), num_blocks):
                before = first * step.block_size
                slots = min(num_blocks * step.block_size, segment.slots - before)
                piece = segment._replace(position=segment.position + before, slots=slots)
                yield piece, blocks[first : first + num_blocks], tokens

    def _current(self) -> PackedStep:
        if self._step is None:
            raise RuntimeError("attention was called outside a step")
        return self._step


def _tokens_of(segment: Segment, rows: list[RowView], device: torch.device) -> torch.Tensor | slice:
    """Return the indexes of the tokens that attend to a segment."""
    views = [rows[index] for index in segment.rows]
    if len(views) == 1:
        return slice(views[0].first, views[0].first + views[0].tokens)
    indexes = [index for view in views for index in range(view.first, view.first + view.tokens)]
    return upload(np.array(indexes, dtype=np.int64), device)


def _gather(layer: torch.Tensor, blocks: torch.Tensor, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return written keys and values, ``[kv_head, slots, head_dim]`` each."""
    keys, values = (
        layer[:, part].index_select(0, blocks).flatten(0, 1)[:slots].transpose(0, 1) for part in (KEYS, VALUES)
    )
    return keys, values


def _grouped(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Turn ``[T, heads, d]`` into ``[kv_head, group * T, d]``.

    The query heads that share a kv head are laid out as if they were more tokens: that needs no repeated keys and no
    feature of newer torch releases.
    """
    tokens, _, size = query.shape
    return query.reshape(tokens, kv_heads, -1, size).permute(1, 2, 0, 3).flatten(1, 2)


def _ungrouped(heads: torch.Tensor, tokens: int) -> torch.Tensor:
    """Turn ``[kv_head, group * T, d]`` back into ``[T, heads, d]``."""
    kv_heads, _, size = heads.shape
    return heads.view(kv_heads, -1, tokens, size).permute(2, 0, 1, 3).flatten(1, 2)


def _visible(positions: torch.Tensor, segment: Segment, window: int | None) -> torch.Tensor | None:
    """Return which slots of a segment each token sees, bool ``[T, slots]``; None where each sees all of them."""
    if window is None and (len(segment.rows) > 1 or len(positions) == 1):
        return None
    slots = torch.arange(segment.position, segment.position + segment.slots, device=positions.device)
    mask = slots <= positions[:, None]
    if window is not None:
        mask &= slots > positions[:, None] - window
    return mask
