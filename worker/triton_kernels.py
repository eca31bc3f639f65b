"""Attention over the pool by block table, in Triton: the programs that run on the device.

One program of ``attend`` takes a tile of tokens, the query heads of one kv head, and a part of a run of slots. Decode
and prefill differ only in how many tokens a tile holds, so there is one kernel for both, and for slots that several
rows share. What a tile attends to may be cut into parts for several programs (split KV); then ``merge`` joins them by
their log-sum-exp.

Nothing here depends on values that only the host could look up: the lengths and the tables are read on the device, so
that a launch can be captured in a CUDA graph. Offsets into the pool are 64 bits wide, since a pool has more elements
than 32 bits can count. Scores are kept in base 2, because the device's exponential is; the sums that leave are natural
logarithms.

Only what Triton 3.0 knows is used here, which is the release that came with torch 2.4.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


# A window's number makes no difference to the code: every model's is compiled at once.
@triton.jit(do_not_specialize=["window"])
def attend(
    query,
    pool,
    output,
    sums,
    sinks,
    items,
    tables,
    tokens,
    records,
    lengths,
    scale,
    softcap,
    window,
    query_token_stride,
    query_head_stride,
    block_stride,
    part_stride,
    slot_stride,
    kv_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    FINAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attend with one tile to one part of its slots.

    ``items`` holds seven numbers for each tile: where its block table begins, the position of the table's first slot,
    how many slots there are, where its tokens begin in ``tokens``, how many they are, and which of how many parts this
    is. ``lengths`` has for each token how many slots it sees, its own included. FINAL writes outputs by token, sinks
    included; else parts are written by record, for ``merge``.
    """
    item = items + tl.program_id(0) * 7
    table = tl.load(item)
    position = tl.load(item + 1)
    slots = tl.load(item + 2)
    first = tl.load(item + 3)
    count = tl.load(item + 4)
    part = tl.load(item + 5)
    parts = tl.load(item + 6)
    kv_head = tl.program_id(1)

    # Query heads that share a kv head lie in the tile as if they were more tokens.
    row = tl.arange(0, ROWS)
    entry = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    alive = row // GROUP < count
    token = tl.load(tokens + entry, mask=alive, other=0)
    length = tl.load(lengths + token, mask=alive, other=0).to(tl.int32)
    dim = tl.arange(0, PADDED_DIM)
    real = dim < HEAD_DIM
    place = token.to(tl.int64) * query_token_stride + head.to(tl.int64) * query_head_stride
    queries = tl.load(query + place[:, None] + dim[None, :], mask=alive[:, None] & real[None, :], other=0.0)

    # From here on slots are counted from the table's first. Those before `low` and from `seen` on nobody here sees.
    length = length - position
    seen = tl.minimum(tl.max(length, 0), slots)
    low = 0
    if WINDOW:
        low = tl.maximum(tl.min(tl.where(alive, length, 2147483647), 0) - window, 0)
    span = (tl.maximum(seen - low, 0) + parts * SLOTS - 1) // (parts * SLOTS) * SLOTS
    begin = low + part * span
    end = tl.minimum(begin + span, seen)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    if FINAL and SINKS:
        # A sink is a score without a value.
        top = tl.load(sinks + head, mask=alive, other=0.0).to(tl.float32) * LOG2E
        total = tl.full([ROWS], 1.0, tl.float32)
    mixed = tl.full([ROWS, PADDED_DIM], 0.0, tl.float32)
    layer = pool + kv_head * kv_head_stride
    for at in range(begin, end, SLOTS):
        slot = at + tl.arange(0, SLOTS)
        # Slots past the end are not read at all: one that nobody wrote may hold NaN, and 0 * NaN is NaN.
        written = slot < end
        block = tl.load(tables + table + slot // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        spot = block * block_stride + (slot % BLOCK_SIZE) * slot_stride
        keys = tl.load(layer + spot[None, :] + dim[:, None], mask=written[None, :] & real[:, None], other=0.0)
        scores = tl.dot(queries, keys, input_precision="ieee") * (scale * LOG2E)
        if SOFTCAP:
            # tanh, by the one function that all releases and the interpreter have
            scores = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / softcap)) + 1.0))
        visible = written[None, :] & (slot[None, :] < length[:, None])
        if WINDOW:
            visible = visible & (slot[None, :] >= length[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A token that sees nothing yet has -inf, from which nothing can be taken away.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weights, 1)
        values = tl.load(
            layer + part_stride + spot[:, None] + dim[None, :], mask=written[:, None] & real[None, :], other=0.0
        )
        mixed = mixed * kept[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = higher

    divisor = tl.where(total == 0.0, 1.0, total)
    result = tl.where(total[:, None] == 0.0, 0.0, mixed / divisor[:, None])
    result_sum = tl.where(total == 0.0, float("-inf"), (top + tl.log2(divisor)) * LN2)
    line = token.to(tl.int64) if FINAL else tl.load(records + entry, mask=alive, other=0).to(tl.int64) + part
    place = line * HEADS + head
    tl.store(
        output + (place * HEAD_DIM)[:, None] + dim[None, :],
        result.to(output.dtype.element_ty),
        mask=alive[:, None] & real[None, :],
    )
    tl.store(sums + place, result_sum, mask=alive)


@triton.jit
def merge(
    partials,
    partial_sums,
    output,
    sums,
    sinks,
    merged,
    starts,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join what came of one token's parts for one head, PARTS at a time. Parts that hold nothing are not read."""
    token = tl.load(merged + tl.program_id(0))
    head = tl.program_id(1)
    begin = tl.load(starts + token)
    end = tl.load(starts + token + 1)
    dim = tl.arange(0, PADDED_DIM)
    real = dim < HEAD_DIM
    top = float("-inf")
    total = 0.0
    if SINKS:
        top = tl.load(sinks + head).to(tl.float32)
        total = 1.0
    mixed = tl.full([PADDED_DIM], 0.0, tl.float32)
    for at in range(begin, end, PARTS):
        record = at + tl.arange(0, PARTS)
        place = record.to(tl.int64) * HEADS + head
        part_sums = tl.load(partial_sums + place, mask=record < end, other=float("-inf"))
        held = part_sums != float("-inf")
        higher = tl.maximum(top, tl.max(part_sums, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2((part_sums - base) * LOG2E)
        kept = tl.exp2((top - base) * LOG2E)
        outputs = tl.load(
            partials + (place * HEAD_DIM)[:, None] + dim[None, :], mask=held[:, None] & real[None, :], other=0.0
        )
        total = total * kept + tl.sum(weights, 0)
        mixed = mixed * kept + tl.sum(outputs * weights[:, None], 0)
        top = higher
    divisor = tl.where(total == 0.0, 1.0, total)
    result = tl.where(total == 0.0, 0.0, mixed / divisor)
    result_sum = tl.where(total == 0.0, float("-inf"), top + tl.log2(divisor) * LN2)
    place = token.to(tl.int64) * HEADS + head
    tl.store(output + place * HEAD_DIM + dim, result.to(output.dtype.element_ty), mask=real)
    tl.store(sums + place, result_sum)


@triton.jit
def store(
    key,
    value,
    pool,
    blocks,
    offsets,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    part_stride,
    slot_stride,
    kv_head_stride,
    NUMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write some of one token's keys and values into its slot."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + token).to(tl.int64)
    offset = tl.load(offsets + token).to(tl.int64)
    number = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    wanted = number < NUMBERS
    head = number // HEAD_DIM
    dim = number % HEAD_DIM
    slot = pool + block * block_stride + offset * slot_stride + head * kv_head_stride + dim
    keys = tl.load(key + token * key_token_stride + head * key_head_stride + dim, mask=wanted)
    values = tl.load(value + token * value_token_stride + head * value_head_stride + dim, mask=wanted)
    tl.store(slot, keys.to(pool.dtype.element_ty), mask=wanted)
    tl.store(slot + part_stride, values.to(pool.dtype.element_ty), mask=wanted)
