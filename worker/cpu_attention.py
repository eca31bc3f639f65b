"""The backend for CPUs: ``cpu_attention.cpp``, compiled on this machine, reading the pool where it lies.

torch has no attention over a block table. To gather each row's keys and values first is to move them twice more, one
small call after another; the operator reads each block once, in a single call for each layer. The rows are cut into
slices of slots that threads take in turn, so that one long sequence keeps all of them busy as well.
"""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from prefixgate.worker.attention import PackedStep, Scoring
from prefixgate.worker.attention_segments import Segment
from prefixgate.worker.native_library import NativeUnavailableError, load_native

SOURCE = Path(__file__).with_name("cpu_attention.cpp")

SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
"""Number formats that the operator knows, and how its functions for them are called."""

_NO_WINDOW = 2**31 - 1
_MAX_QUERIES = 96
"""Queries of a kv head in one slice: as many as fit the second-level cache with their scores and sums."""
_FEW_QUERIES = 16
"""Up to here a slice is bound by reading the pool: it takes all heads, since those of a slot lie side by side."""
_SLICE_SLOTS, _LONG_SLICE_SLOTS = 256, 512
"""Slots of a slice with few queries, and with many."""

_POINTERS = (
    "slices", "blocks", "tokens", "positions", "record_starts", "records", "partials", "pool", "query", "output", "lse",
    "sinks", "key", "value", "slot_blocks", "slot_offsets",
)  # fmt: skip
_STRIDES = (
    "block_stride", "part_stride", "slot_stride", "kv_head_stride", "query_token_stride", "query_head_stride",
    "key_token_stride", "key_head_stride", "value_token_stride", "value_head_stride",
)  # fmt: skip
_NUMBERS = (
    "num_slices", "num_tokens", "heads", "kv_heads", "head_dim", "block_size", "threads", "window",
)  # fmt: skip


class _Call(ctypes.Structure):
    """What the operator is told; the same fields in the same order as there."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _NUMBERS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _Plan(NamedTuple):
    """A step cut into slices. The operator holds pointers into these arrays."""

    slices: np.ndarray
    blocks: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    record_starts: np.ndarray
    records: np.ndarray
    num_records: int


class CpuAttention:
    """Attention by the compiled operator, for pools in float32 or bfloat16."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        if library.call_bytes() != ctypes.sizeof(_Call):
            raise NativeUnavailableError("the operator was compiled from a source of another version")
        self._dtype = dtype
        self._attend = library[f"attend_{SUFFIXES[dtype]}"]
        self._write = library[f"write_{SUFFIXES[dtype]}"]
        self._lanes = library.lanes()
        self._step: PackedStep | None = None
        self._plan: _Plan | None = None
        self._call = _Call()
        self._held: list[torch.Tensor] = []

    def begin(self, step: PackedStep) -> None:
        """Forget the step before; how this one is cut is settled by its first layer, which knows the heads."""
        self._step, self._plan = step, None
        call = self._call = _Call()
        call.num_tokens = len(step.positions)
        call.block_size = step.block_size
        call.threads = torch.get_num_threads()
        call.slot_blocks = step.blocks.data_ptr()
        call.slot_offsets = step.offsets.data_ptr()

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: torch.Tensor) -> None:
        """Store keys and values by block and offset."""
        call = self._over(layer)
        key, value = self._readable(key), self._readable(value)
        call.key, call.key_token_stride, call.key_head_stride = key.data_ptr(), key.stride(0), key.stride(1)
        call.value, call.value_token_stride, call.value_head_stride = (
            value.data_ptr(), value.stride(0), value.stride(1),
        )  # fmt: skip
        self._write(ctypes.byref(call))

    def attend(self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Attend in one call of the operator."""
        return self._run(query, layer, scoring, None)

    def attend_with_lse(
        self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend in one call of the operator, and keep the sums."""
        lse = torch.empty(query.shape[:2], dtype=torch.float32)
        return self._run(query, layer, scoring, lse), lse

    def _run(
        self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring, lse: torch.Tensor | None
    ) -> torch.Tensor:
        call = self._over(layer)
        query = self._readable(query)
        self._settle(query.shape[1], layer.shape[3])
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        output = torch.empty(query.shape, dtype=self._dtype)
        call.query, call.query_token_stride, call.query_head_stride = (
            query.data_ptr(), query.stride(0), query.stride(1),
        )  # fmt: skip
        call.output = output.data_ptr()
        call.lse = None if lse is None else lse.data_ptr()
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.scale, call.softcap = scoring.scale, scoring.softcap or 0.0
        call.window = scoring.window or _NO_WINDOW
        self._attend(ctypes.byref(call))
        return output

    def _over(self, layer: torch.Tensor) -> _Call:
        """Point the call at a layer."""
        if self._step is None:
            raise RuntimeError("attention was called outside a step")
        call = self._call
        call.pool = layer.data_ptr()
        call.block_stride, call.part_stride, call.slot_stride, call.kv_head_stride, _ = layer.stride()
        call.kv_heads, call.head_dim = layer.shape[3:]
        return call

    def _readable(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(self._dtype)
        return tensor if tensor.stride(2) == 1 else tensor.contiguous()

    def _settle(self, heads: int, kv_heads: int) -> None:
        """Cut the step into slices, once for all of its layers."""
        if self._plan is not None:
            return
        assert self._step is not None
        call = self._call
        plan = self._plan = _make_plan(self._step, heads // kv_heads, kv_heads)
        for name in ("slices", "blocks", "tokens", "positions", "record_starts", "records"):
            setattr(call, name, getattr(plan, name).ctypes.data)
        call.num_slices, call.heads = len(plan.slices), heads
        width = -(-call.head_dim // self._lanes) * self._lanes + 2
        partials = torch.empty(plan.num_records * heads * width, dtype=torch.float32)
        self._held = [partials]
        call.partials = partials.data_ptr()


class _Cut(NamedTuple):
    """A part of a segment: some of its slots for some of its tokens."""

    table: int
    """Index of its first block in the flat array of blocks."""
    position: int
    slots: int
    first_token: int
    """Index of its first token in the flat array of tokens."""
    num_tokens: int


def _make_plan(step: PackedStep, group: int, kv_heads: int) -> _Plan:
    blocks: list[int] = []
    tokens: list[int] = []
    slices: list[tuple[int, ...]] = []
    recorded: list[int] = []
    for segment in step.segments:
        for cut in _cuts(segment, step, group, blocks, tokens):
            record = len(recorded)
            recorded.extend(tokens[cut.first_token : cut.first_token + cut.num_tokens])
            together = cut.num_tokens * group <= _FEW_QUERIES
            heads = [(0, kv_heads)] if together else [(head, head + 1) for head in range(kv_heads)]
            slices.extend((*cut, *span, record) for span in heads)
    # The longest first: a long one that is taken last keeps the other threads waiting.
    slices.sort(key=lambda part: -part[2] * part[4] * (part[6] - part[5]))
    of_token = np.array(recorded, dtype=np.int32)
    counts = np.bincount(of_token, minlength=len(step.positions))
    return _Plan(
        slices=np.array(slices, dtype=np.int32),
        blocks=np.array(blocks, dtype=np.int32),
        tokens=np.array(tokens, dtype=np.int32),
        positions=step.positions.numpy().astype(np.int32),
        record_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        records=np.argsort(of_token, kind="stable").astype(np.int32),
        num_records=len(recorded),
    )


def _cuts(segment: Segment, step: PackedStep, group: int, blocks: list[int], tokens: list[int]) -> Iterator[_Cut]:
    """Cut a segment by tokens, then by slots, and append its blocks and tokens to the flat arrays."""
    table, first = len(blocks), len(tokens)
    blocks.extend(segment.block_ids)
    last_slots: list[int] = []
    for view in (step.rows[index] for index in segment.rows):
        tokens.extend(range(view.first, view.first + view.tokens))
        last_slots.extend(range(view.start + 1, view.length + 1))
    at_once = max(1, _MAX_QUERIES // group)
    block_size = step.block_size
    for begin in range(first, len(tokens), at_once):
        count = min(at_once, len(tokens) - begin)
        seen = min(segment.slots, max(last_slots[begin - first : begin - first + count]) - segment.position)
        length = _SLICE_SLOTS if count * group <= _FEW_QUERIES else _LONG_SLICE_SLOTS
        for slot in range(0, seen, length):
            yield _Cut(table + slot // block_size, segment.position + slot, min(length, seen - slot), begin, count)


def cpu_attention(dtype: torch.dtype, cache: Path, progress: Callable[[str], None]) -> CpuAttention:
    """Return the backend, compiling it where need be. Raises NativeUnavailableError with the reason where it cannot."""
    if dtype not in SUFFIXES:
        raise NativeUnavailableError(f"it computes {' and '.join(SUFFIXES.values())}, and the model is in {dtype}")
    return CpuAttention(load_native(SOURCE, cache, progress), dtype)
