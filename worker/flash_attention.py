"""The backend for NVIDIA GPUs by the package vllm-flash-attn, reading the pool where it lies.

A layer's keys and values are strided views of the pool, ``[block, token, kv_head, head_dim]`` each, which is what the
library calls a paged cache: it takes any stride but for the last dimension, and pages of a multiple of 16 tokens. It
reads slots below a sequence's length only.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from prefixgate.worker.attention import (
    KEYS,
    VALUES,
    AttentionShape,
    AttentionUnavailableError,
    DecodeStep,
    PackedStep,
    Scoring,
)
from prefixgate.worker.attention_segments import Segment
from prefixgate.worker.flash_functions import FlashFunctions, Sequences, Weighing, find_flash_functions
from prefixgate.worker.transfers import upload

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
_PAGE = 16
"""Pages are a multiple of so many tokens."""
_TABLE_WIDTH = 16
"""Tables are filled up to a multiple of so many blocks: the library looks up a whole tile's blocks, up to 256 slots,
before it leaves out those beyond a sequence's length."""


class _Call(NamedTuple):
    """One call of the library: some sequences, and which of the step's tokens are their queries."""

    over: Sequences
    tokens: torch.Tensor | None
    """int64: indexes of the queries among the step's tokens; None is all of them in their order."""


class _Plan(NamedTuple):
    """A step cut into calls."""

    own: list[_Call]
    """Each token is a query of exactly one of these: over what its row has for itself."""
    shared: list[_Call]
    """Over what several rows begin with; a token is at most once in each."""


class FlashAttention:
    """Attention by vllm-flash-attn, for pools in float16 or bfloat16. Its decode steps can be recorded in a graph."""

    def __init__(self, functions: FlashFunctions) -> None:
        self._functions = functions
        self._step: PackedStep | DecodeStep | None = None
        self._plan: _Plan | None = None
        self._alone: _Plan | None = None
        self._query_ends: dict[int, torch.Tensor] = {}
        """By the number of rows that decode. They stay, since graphs go on reading them."""

    def begin(self, step: PackedStep) -> None:
        """Forget the step before; its first layer settles how this one is cut."""
        self._step, self._plan, self._alone = step, None, None

    def begin_decode(self, step: DecodeStep) -> None:
        """Take a step of one token for each row."""
        rows, width = step.tables.shape
        if rows not in self._query_ends:
            self._query_ends[rows] = torch.arange(rows + 1, dtype=torch.int32, device=step.tables.device)
        ends = self._query_ends[rows]
        over = Sequences(step.tables, step.lengths, ends, None, 1, width * step.block_size, causal=True)
        self._step = step
        self._plan = self._alone = _Plan([_Call(over, None)], [])

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: torch.Tensor) -> None:
        """Store keys and values by block and offset."""
        step = self._current()
        layer[step.blocks, KEYS, step.offsets] = key.to(layer.dtype)
        layer[step.blocks, VALUES, step.offsets] = value.to(layer.dtype)

    def attend(self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Attend; the sums are asked for only where parts are to be merged."""
        plan, query, how = self._settled(scoring), query.to(layer.dtype), _weighing(scoring)
        if plan.shared:
            return self._merged(query, layer, plan, how)[0]
        keys, values = layer[:, KEYS], layer[:, VALUES]
        if plan.own[0].tokens is None:
            return self._functions.attend(query, keys, values, plan.own[0].over, how)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for over, tokens in plan.own:
            output[tokens] = self._functions.attend(query[tokens], keys, values, over, how)
        return output

    def attend_with_lse(
        self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and keep the sums."""
        return self._merged(query.to(layer.dtype), layer, self._settled(scoring), _weighing(scoring))

    def _merged(
        self, query: torch.Tensor, layer: torch.Tensor, plan: _Plan, how: Weighing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = layer[:, KEYS], layer[:, VALUES]
        output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        sums = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        for over, tokens in plan.own:
            at = slice(None) if tokens is None else tokens
            part, sums[at] = self._functions.attend_with_lse(query[at], keys, values, over, how)
            output[at] = part.float()
        for over, tokens in plan.shared:
            at = slice(None) if tokens is None else tokens
            part, part_sums = self._functions.attend_with_lse(query[at], keys, values, over, how)
            merged = torch.logaddexp(sums[at], part_sums)
            kept, added = (sums[at] - merged).exp()[..., None], (part_sums - merged).exp()[..., None]
            output[at] = output[at] * kept + part * added
            sums[at] = merged
        return output.to(query.dtype), sums

    def _settled(self, scoring: Scoring) -> _Plan:
        """Cut the step, once for all of its layers that look at whole rows, and once for those with a window.

        A token whose window has passed the shared slots would see none of them, of which the library's sums say
        nothing that could be merged. So layers with a window attend row by row.
        """
        if scoring.sinks is not None:
            raise RuntimeError("sinks are not known to vllm-flash-attn")
        step = self._current()
        if scoring.window is not None:
            if self._alone is None:
                assert isinstance(step, PackedStep)
                self._alone = _plan(step, share=False)
            return self._alone
        if self._plan is None:
            assert isinstance(step, PackedStep)
            self._plan = _plan(step, share=True)
        return self._plan

    def _current(self) -> PackedStep | DecodeStep:
        if self._step is None:
            raise RuntimeError("attention was called outside a step")
        return self._step


def flash_attention(shape: AttentionShape, device: torch.device) -> FlashAttention:
    """Return the backend for a model's layers. Raises AttentionUnavailableError with the reason where it cannot be."""
    if device.type != "cuda":
        raise AttentionUnavailableError(f"it runs on a CUDA device, and the model on {device}")
    refuse_shape(shape)
    functions = find_flash_functions()
    functions.refuse_device(device, torch.cuda.get_device_capability(device))
    return FlashAttention(functions)


def refuse_shape(shape: AttentionShape) -> None:
    """Raise AttentionUnavailableError where layers ask for what the library does not have, on whatever device."""
    layout = shape.layout
    if layout.dtype not in DTYPES:
        raise AttentionUnavailableError(f"it computes float16 and bfloat16, and the model is in {layout.dtype}")
    if layout.head_dim > MAX_HEAD_DIM or layout.head_dim % 8:
        # Others that 8 does not divide it would pad, a whole pool in each call.
        raise AttentionUnavailableError(
            f"heads are {layout.head_dim} numbers long, and it takes multiples of 8 up to {MAX_HEAD_DIM}"
        )
    if layout.block_size % _PAGE:
        raise AttentionUnavailableError(f"blocks hold {layout.block_size} tokens, and it takes multiples of {_PAGE}")
    if shape.sinks:
        raise AttentionUnavailableError("layers have sinks, which it does not know")


def _weighing(scoring: Scoring) -> Weighing:
    # Its window counts the slots before a query's own, ours that one too. None comes after it.
    window = (-1, -1) if scoring.window is None else (scoring.window - 1, 0)
    return Weighing(scoring.scale, window, scoring.softcap or 0.0)


def _plan(step: PackedStep, *, share: bool) -> _Plan:
    last = _last_segments(step, share=share)
    own = [
        call
        for rows in (
            [i for i, view in enumerate(step.rows) if view.tokens == 1],
            [i for i, view in enumerate(step.rows) if view.tokens > 1],
        )
        if (call := _call(step, [([i], last[i]) for i in rows], causal=True)) is not None
    ]
    levels: list[list[tuple[Sequence[int], Segment]]] = []
    if share:
        depths = [0] * len(step.rows)
        for segment in sorted(step.segments, key=lambda segment: segment.position):
            if len(segment.rows) > 1:
                depth = depths[segment.rows[0]]
                levels += [[]] if depth == len(levels) else []
                levels[depth].append((segment.rows, segment))
                for row in segment.rows:
                    depths[row] += 1
    return _Plan(own, [call for level in levels if (call := _call(step, level, causal=False)) is not None])


def _last_segments(step: PackedStep, *, share: bool) -> list[Segment]:
    """Return for each row what it has for itself, or all of it where nothing is to be shared."""
    parts: list[list[Segment]] = [[] for _ in step.rows]
    for segment in sorted(step.segments, key=lambda segment: segment.position):
        for row in segment.rows:
            parts[row].append(segment)
    if share:
        return [own[-1] for own in parts]
    return [
        Segment((row,), 0, sum(part.slots for part in own), [block for part in own for block in part.block_ids])
        for row, own in enumerate(parts)
    ]


def _call(step: PackedStep, members: list[tuple[Sequence[int], Segment]], *, causal: bool) -> _Call | None:
    """Make one call of some segments, each with the rows whose tokens attend to it."""
    if not members:
        return None
    device = step.positions.device
    width = -(-max(len(segment.block_ids) for _, segment in members) // _TABLE_WIDTH) * _TABLE_WIDTH
    tables = np.zeros((len(members), width), dtype=np.int32)
    for line, (_, segment) in zip(tables, members, strict=True):
        line[: len(segment.block_ids)] = segment.block_ids
    tokens: list[int] = []
    ends = [0]
    for rows, _ in members:
        for view in (step.rows[row] for row in rows):
            tokens.extend(range(view.first, view.first + view.tokens))
        ends.append(len(tokens))
    lengths = [segment.slots for _, segment in members]
    slot_ends = [0, *itertools.accumulate(lengths)]
    # One transfer for all of them.
    parts = [tables.ravel(), *(np.array(part, dtype=np.int32) for part in (lengths, ends, slot_ends))]
    on_device = torch.split(upload(np.concatenate(parts), device), [part.size for part in parts])
    over = Sequences(
        on_device[0].view(tables.shape),
        on_device[1],
        on_device[2],
        on_device[3],
        max(stop - start for start, stop in itertools.pairwise(ends)),
        max(lengths),
        causal,
    )
    if tokens == list(range(len(step.positions))):
        return _Call(over, None)
    return _Call(over, upload(np.array(tokens, dtype=np.int64), device))
