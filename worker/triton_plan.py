"""How a step's attention is cut into programs of ``triton_kernels.attend``, and what is to be merged afterwards.

Few tokens over many slots (decode, a short chunk behind a long prefix) would leave most of a device idle, so that their
slots are cut into parts. Where there are tiles enough, nothing is cut and nothing has to be merged.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from prefixgate.worker.attention import PackedStep
from prefixgate.worker.attention_segments import Segment
from prefixgate.worker.transfers import upload

MIN_PART_SLOTS = 256
"""Parts are no shorter: starting a program and merging its result would cost more than its work."""
MAX_PARTS = 128
"""Parts of one tile; more would make the merge the longer half."""
_LITTLE_EACH = 4
"""Programs of the smallest tiles that a multiprocessor should have: one computes while another waits for memory, and
none ends last alone. A larger tile keeps it busy by itself, and its parts cost more to merge."""
_ALIGNMENT = 4
"""In numbers of 4 bytes. Compiled programs differ by whether a pointer is a multiple of 16 bytes."""

Numbers = npt.NDArray[np.int64]


class Tile(NamedTuple):
    """Tokens that read the same slots in one program."""

    table: int
    """Where its block table begins among all."""
    position: int
    """Of the table's first slot."""
    slots: int
    first: int
    """Where its tokens begin among all."""
    num_tokens: int
    seen: int
    """How many of the slots any of its tokens sees, as far as the host knows."""


class Launch(NamedTuple):
    """Programs of one size."""

    rows: int
    """Query heads times tokens of a program."""
    items: torch.Tensor
    """int32 ``[programs, 7]``, as the kernel reads them."""
    final: bool
    """Whether it writes outputs itself, since nobody else attends for its tokens."""


class Plan(NamedTuple):
    """All of a step's programs. The tensors are int32 on the device; a graph may be captured over them."""

    launches: list[Launch]
    tables: torch.Tensor
    """The block tables, end to end."""
    tokens: torch.Tensor
    """The tiles' tokens, end to end: indexes among the step's tokens."""
    records: torch.Tensor
    """For each of them, where the first part of its tile leaves its result."""
    starts: torch.Tensor
    """``[T + 1]``: where each token's records begin."""
    merged: torch.Tensor
    """Tokens whose outputs are made from their records."""
    num_records: int


def plan_step(step: PackedStep, group: int, kv_heads: int, sizes: Sequence[int], processors: int) -> Plan:
    """Cut a step into tiles of one of ``sizes`` query rows, and those into parts that keep ``processors`` busy."""
    tables: list[int] = []
    tokens: list[int] = []
    tiles: dict[int, list[Tile]] = {}
    for segment in step.segments:
        _tile(segment, step, group, sizes, tables, tokens, tiles)
    parts = {
        rows: _parts(of_size, kv_heads, processors * (_LITTLE_EACH if rows == sizes[0] else 1))
        for rows, of_size in tiles.items()
    }
    return _laid_out(tiles, parts, tables, tokens, len(step.positions), step.positions.device)


def plan_decode(
    rows: int, table_width: int, block_size: int, kv_heads: int, size: int, processors: int, device: torch.device
) -> Plan:
    """Plan one token for each of ``rows`` tables of ``table_width`` blocks, whatever their lengths will be.

    ``tables`` is left out: it is the block tables, given when they are attended to.
    """
    slots = table_width * block_size
    tiles = {size: [Tile(row * table_width, 0, slots, row, 1, slots) for row in range(rows)]}
    parts = min(-(-_LITTLE_EACH * processors // (rows * kv_heads)), -(-slots // MIN_PART_SLOTS), MAX_PARTS)
    return _laid_out(tiles, {size: np.full(rows, parts)}, [], list(range(rows)), rows, device)


def _tile(
    segment: Segment,
    step: PackedStep,
    group: int,
    sizes: Sequence[int],
    tables: list[int],
    tokens: list[int],
    tiles: dict[int, list[Tile]],
) -> None:
    """Cut a segment by tokens, and append its blocks, its tokens and its tiles."""
    table, first = len(tables), len(tokens)
    tables.extend(segment.block_ids)
    for view in (step.rows[index] for index in segment.rows):
        tokens.extend(range(view.first, view.first + view.tokens))
    count = len(tokens) - first
    size = next((size for size in sizes if size >= count * group), sizes[-1])
    of_size = tiles.setdefault(size, [])
    at_once = size // group
    view = step.rows[segment.rows[0]]
    alone = len(segment.rows) == 1
    for begin in range(0, count, at_once):
        number = min(at_once, count - begin)
        # Where several rows attend, each of their tokens sees all of the segment.
        seen = min(segment.slots, view.start + begin + number - segment.position) if alone else segment.slots
        of_size.append(Tile(table, segment.position, segment.slots, first + begin, number, seen))


def _parts(tiles: Sequence[Tile], kv_heads: int, programs: int) -> Numbers:
    """Return into how many parts each tile is cut, such that all parts are about equally long."""
    seen = np.array([tile.seen for tile in tiles])
    length = max(MIN_PART_SLOTS, -(-int(seen.sum()) * kv_heads // programs))
    parts: Numbers = np.clip(-(-seen // length), 1, MAX_PARTS)
    return parts


def _laid_out(
    tiles: dict[int, list[Tile]],
    parts: dict[int, Numbers],
    tables: list[int],
    tokens: list[int],
    num_tokens: int,
    device: torch.device,
) -> Plan:
    """Give each part a record where several serve a token, and put everything on the device in one copy."""
    token = np.array(tokens, dtype=np.int64)
    table_of_tiles = {rows: np.array(of_size, dtype=np.int64) for rows, of_size in tiles.items()}
    parts_of_entry = np.zeros(len(token), dtype=np.int64)
    size_of_entry = np.zeros(len(token), dtype=np.int64)
    for rows, table in table_of_tiles.items():
        entries = _entries(table)
        parts_of_entry[entries] = np.repeat(parts[rows], table[:, 4])
        size_of_entry[entries] = rows
    count = np.bincount(token, weights=parts_of_entry, minlength=num_tokens).astype(np.int64)
    joint = np.unique(size_of_entry[count[token] > 1])
    is_merged = np.isin(size_of_entry, joint)
    held = np.where(is_merged, parts_of_entry, 0)
    starts = np.concatenate([[0], np.bincount(token, weights=held, minlength=num_tokens).cumsum()])
    order = np.argsort(token, kind="stable")
    records = np.empty(len(token), dtype=np.int64)
    records[order] = held[order].cumsum() - held[order]
    items = [_items(table, parts[rows]) for rows, table in table_of_tiles.items()]
    merged = np.unique(token[is_merged])
    on_device = _send([np.array(tables), token, records, starts, merged, *items], device)
    launches = [
        Launch(rows, part.view(-1, 7), rows not in joint)
        for rows, part in zip(table_of_tiles, on_device[5:], strict=True)
    ]
    return Plan(
        launches,
        tables=on_device[0],
        tokens=on_device[1],
        records=on_device[2],
        starts=on_device[3],
        merged=on_device[4],
        num_records=int(starts[-1]),
    )


def _entries(tiles: Numbers) -> Numbers:
    """Return the indexes of the tiles' tokens among all, tile after tile."""
    first, count = tiles[:, 3], tiles[:, 4]
    before = count.cumsum() - count
    return np.arange(count.sum()) + np.repeat(first - before, count)


def _items(tiles: Numbers, parts: Numbers) -> Numbers:
    """Return the programs, the longest first: a long one that starts last keeps the whole device waiting."""
    order = np.argsort(-tiles[:, 5] // parts, kind="stable")
    tiles, parts = tiles[order], parts[order]
    part = np.arange(parts.sum()) - np.repeat(parts.cumsum() - parts, parts)
    return np.column_stack([tiles[:, :5].repeat(parts, axis=0), part, parts.repeat(parts)])


def _send(arrays: Sequence[Numbers], device: torch.device) -> list[torch.Tensor]:
    """Put arrays on the device as int32, each at a multiple of 16 bytes."""
    begins = np.cumsum([0, *(-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays)])
    whole = np.zeros(begins[-1], dtype=np.int32)
    for begin, array in zip(begins[:-1], arrays, strict=True):
        whole[begin : begin + array.size] = array.ravel()
    placed = upload(whole, device)
    return [placed[begin : begin + array.size] for begin, array in zip(begins[:-1], arrays, strict=True)]
