"""Starts the programs of ``triton_kernels``: how large their tiles are, and what they are given.

Importing this imports Triton, so who does not know whether there is one imports it late.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from prefixgate.worker import triton_kernels
from prefixgate.worker.attention import Scoring
from prefixgate.worker.triton_plan import Plan

_LEAST_DIM = 16
"""Of a tile in any direction: what tensor cores multiply."""
_STAGES = 3
"""Turns of its loop that a program has in flight. A block's place is read before the block: with two, one read would
wait for the other, and Triton 3.0 gives up on reading ahead at all."""
_MERGED_AT_ONCE = 16
_STORED_AT_ONCE = 1024


def tile_sizes(group: int, head_dim: int, itemsize: int) -> tuple[int, ...]:
    """Return how many query rows programs may have: for decode, for a few tokens, and for many.

    A tile's sums stand in registers: where numbers or heads are large, fewer rows have room. All query heads of a kv
    head belong to one tile.
    """
    if itemsize > 2:
        sizes: tuple[int, ...] = (16, 32)
    elif _padded(head_dim) > 128:
        sizes = (16, 64)
    else:
        sizes = (16, 64, 128)
    least = _padded(group)
    return tuple(size for size in sizes if size >= least) or (least,)


def attend(
    query: torch.Tensor, layer: torch.Tensor, scoring: Scoring, plan: Plan, tables: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs ``[T, heads, head_dim]`` and the sums, float32 ``[T, heads]``, of a planned step's queries.

    ``tables`` are int32 block tables end to end and ``lengths`` int32 ``[T]``, on the device. Nothing is looked up on
    the host.
    """
    query = _readable(query.to(layer.dtype))
    num_tokens, heads, head_dim = query.shape
    output = torch.empty((num_tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    sums = torch.empty((num_tokens, heads), dtype=torch.float32, device=query.device)
    if plan.num_records:
        partials = torch.empty((plan.num_records, heads, head_dim), dtype=torch.float32, device=query.device)
        partial_sums = torch.empty((plan.num_records, heads), dtype=torch.float32, device=query.device)
    else:
        partials, partial_sums = output, sums
    sinks = sums if scoring.sinks is None else scoring.sinks
    block_stride, part_stride, slot_stride, kv_head_stride, _ = layer.stride()
    kv_heads = layer.shape[3]
    padded = _padded(head_dim)
    with _on(query):
        for launch in plan.launches:
            triton_kernels.attend[(len(launch.items), kv_heads)](
                query,
                layer,
                output if launch.final else partials,
                sums if launch.final else partial_sums,
                sinks,
                launch.items,
                tables,
                plan.tokens,
                plan.records,
                lengths,
                float(scoring.scale),
                float(scoring.softcap or 0.0),
                scoring.window or 0,
                query.stride(0),
                query.stride(1),
                block_stride,
                part_stride,
                slot_stride,
                kv_head_stride,
                HEADS=heads,
                HEAD_DIM=head_dim,
                PADDED_DIM=padded,
                GROUP=heads // kv_heads,
                BLOCK_SIZE=layer.shape[2],
                ROWS=launch.rows,
                SLOTS=slots_at_once(head_dim, layer.element_size()),
                FINAL=launch.final,
                WINDOW=scoring.window is not None,
                SOFTCAP=bool(scoring.softcap),
                SINKS=scoring.sinks is not None,
                num_warps=8 if launch.rows >= 128 or layer.element_size() > 2 else 4,
                num_stages=_STAGES,
            )
        if len(plan.merged):
            triton_kernels.merge[(len(plan.merged), heads)](
                partials,
                partial_sums,
                output,
                sums,
                sinks,
                plan.merged,
                plan.starts,
                HEADS=heads,
                HEAD_DIM=head_dim,
                PADDED_DIM=padded,
                PARTS=_MERGED_AT_ONCE,
                SINKS=scoring.sinks is not None,
                num_warps=4,
            )
    return output, sums


def store(
    key: torch.Tensor, value: torch.Tensor, layer: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Write keys and values, ``[T, kv_heads, head_dim]``, into the slots that ``blocks`` and ``offsets`` name."""
    key, value = _readable(key), _readable(value)
    num_tokens, kv_heads, head_dim = key.shape
    numbers = kv_heads * head_dim
    width = min(_padded(numbers), _STORED_AT_ONCE)
    block_stride, part_stride, slot_stride, kv_head_stride, _ = layer.stride()
    with _on(key):
        triton_kernels.store[(num_tokens, -(-numbers // width))](
            key,
            value,
            layer,
            blocks,
            offsets,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            block_stride,
            part_stride,
            slot_stride,
            kv_head_stride,
            NUMBERS=numbers,
            HEAD_DIM=head_dim,
            WIDTH=width,
            num_warps=4,
        )


def slots_at_once(head_dim: int, itemsize: int) -> int:
    """Return how many slots a program reads at once: keys and values of these fit the smallest shared memory.

    What is multiplied without tensor cores needs registers for it, and so gets half.
    """
    size = 16384 if itemsize == 2 else 8192
    return max(_LEAST_DIM, min(64, size // (_padded(head_dim) * itemsize)))


def _padded(size: int) -> int:
    """Return the next power of two, which is what tiles are made of."""
    return max(_LEAST_DIM, 1 << (size - 1).bit_length())


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def _on(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever device its arguments are on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
