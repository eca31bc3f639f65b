"""Segments hold each row's slots exactly once, and what rows begin with in common only once for all of them."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from prefixgate.worker.attention_segments import MIN_SHARED_BLOCKS, Segment, own_segments, shared_segments

BLOCK_SIZE = 4


def split(tables: Sequence[Sequence[int]], starts: Sequence[int], lengths: Sequence[int]) -> list[Segment]:
    return sorted(shared_segments(own_segments(tables, lengths, BLOCK_SIZE), starts, BLOCK_SIZE))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    """Draw tables as paths through a random tree, and how far each row has come."""
    tables: list[list[int]] = []
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from(tables)) if tables else []
        kept = draw(st.integers(0, len(parent)))
        grown = draw(st.integers(1, 12))
        tables.append(parent[:kept] + [100 * (index + 1) + i for i in range(grown)])
    lengths = [draw(st.integers(1, len(table) * BLOCK_SIZE)) for table in tables]
    starts = [draw(st.integers(0, length - 1)) for length in lengths]
    return tables, starts, lengths


@given(steps())
def test_each_slot_of_each_row_is_in_exactly_one_segment(step: tuple[list[list[int]], list[int], list[int]]) -> None:
    tables, starts, lengths = step
    seen: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(tables))}
    for segment in split(tables, starts, lengths):
        assert -(-segment.slots // BLOCK_SIZE) == len(segment.block_ids)
        for index in segment.rows:
            seen[index].extend(
                (segment.position + slot, segment.block_ids[slot // BLOCK_SIZE]) for slot in range(segment.slots)
            )
            if len(segment.rows) > 1:
                assert segment.position + segment.slots <= starts[index], "each of its tokens sees all of it"
    for index, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        assert sorted(seen[index]) == [(position, table[position // BLOCK_SIZE]) for position in range(length)]


@given(steps())
def test_no_two_segments_that_begin_together_could_have_shared_more(
    step: tuple[list[list[int]], list[int], list[int]],
) -> None:
    tables, starts, lengths = step
    segments = split(tables, starts, lengths)
    reach = [start // BLOCK_SIZE * BLOCK_SIZE for start in starts]
    for i, one in enumerate(segments):
        for other in segments[i + 1 :]:
            if one.position != other.position:
                continue
            common = 0
            limit = min(*(reach[index] for index in one.rows + other.rows)) - one.position
            pairs = zip(one.block_ids, other.block_ids, strict=False)
            for a, b in pairs:
                if a != b or (common + 1) * BLOCK_SIZE > limit:
                    break
                common += 1
            assert common < MIN_SHARED_BLOCKS


def test_prefixes_of_prefixes_nest() -> None:
    system, document = list(range(10)), list(range(10, 15))
    tables = [[*system, *document, 20], [*system, *document, 21], [*system, 22], [23]]
    assert split(tables, [62, 61, 41, 2], [63, 62, 42, 3]) == [
        Segment((0,), 60, 3, [20]),
        Segment((0, 1), 40, 20, document),
        Segment((0, 1, 2), 0, 40, system),
        Segment((1,), 60, 2, [21]),
        Segment((2,), 40, 2, [22]),
        Segment((3,), 0, 3, [23]),
    ]


def test_a_block_that_a_row_is_still_writing_is_not_shared() -> None:
    shared = list(range(5))
    assert split([shared, shared], [20, 19], [20, 20]) == [
        Segment((0,), 16, 4, [4]),
        Segment((0, 1), 0, 16, [0, 1, 2, 3]),
        Segment((1,), 16, 4, [4]),
    ]
