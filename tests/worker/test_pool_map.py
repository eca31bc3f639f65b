"""The map of a pool, against a count block by block."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.pool_map import MAX_EXAMINED, PoolPicture, draw

BLOCKS = st.lists(
    st.one_of(
        st.just((0, 0, False)),  # free
        st.tuples(st.just(0), st.integers(1, 3), st.just(False)),  # cached
        st.tuples(st.integers(1, 9), st.integers(1, 3), st.booleans()),  # active
    ),
    min_size=1,
    max_size=70,
)


def picture(blocks: list[tuple[int, int, bool]], stride: int = 1) -> PoolPicture:
    return PoolPicture(
        stride,
        [count for count, _, _ in blocks][::stride],
        [owner for _, owner, _ in blocks][::stride],
        [block for block, (_, _, is_pinned) in enumerate(blocks) if is_pinned],
    )


@given(BLOCKS, st.integers(1, 80), st.integers(1, 4))
def test_each_cell_tells_of_its_own_blocks(blocks: list[tuple[int, int, bool]], max_cells: int, stride: int) -> None:
    drawn = draw(picture(blocks, stride), max_cells)
    examined = blocks[::stride]
    width = drawn.blocks_per_cell // stride
    cells = [examined[at : at + width] for at in range(0, len(examined), width)]
    assert len(drawn.free) == len(cells) <= max_cells
    assert drawn.free == [sum(owner == 0 for _, owner, _ in cell) for cell in cells]
    assert drawn.active == [sum(count > 0 for count, _, _ in cell) for cell in cells]
    assert drawn.cached == [sum(count == 0 < owner for count, owner, _ in cell) for cell in cells]
    assert drawn.pinned == [sum(is_pinned for _, _, is_pinned in cell) for cell in cells]
    assert drawn.holders == [max(count for count, _, _ in cell) for cell in cells]
    for owner, cell in zip(drawn.owners, cells, strict=True):
        owners = Counter(one for _, one, _ in cell if one)
        assert owner == min((one for one in owners if owners[one] == max(owners.values())), default=0)


@given(BLOCKS)
def test_blocks_are_counted_by_how_many_hold_them(blocks: list[tuple[int, int, bool]]) -> None:
    expected = [0] * 5
    for count, _, _ in blocks:
        if count:
            expected[(count - 1).bit_length()] += 1
    sharing = draw(picture(blocks), 10).sharing
    assert sharing + [0] * (5 - len(sharing)) == expected


def test_the_picture_of_a_cache_is_what_the_cache_holds() -> None:
    cache = PrefixCache(32, BlockHasher(b"k" * 16), pin_limit=8)
    scope = CacheScope("acme", "model")
    table_tokens = list(range(70))
    admission = cache.admit(scope, table_tokens, max_new_tokens=1)
    assert admission is not None
    cache.publish(admission.table, 70)
    cache.pin(scope, table_tokens[:32], expires_at=1.0)
    other = cache.admit(CacheScope("bolt", "model"), list(range(20)), max_new_tokens=1)
    assert other is not None
    cache.release(other.table, 20)
    drawn = draw(PoolPicture.of(cache), 32)
    stats = cache.stats()
    assert (sum(drawn.free), sum(drawn.active), sum(drawn.cached), sum(drawn.pinned)) == (
        stats.free_blocks,
        stats.active_blocks,
        stats.cached_blocks,
        stats.pinned_blocks,
    )
    assert (sum(drawn.active), sum(drawn.cached), sum(drawn.pinned)) == (5, 2, 2)
    # The call and the pin hold two, the call alone three.
    assert (drawn.holders[:5], drawn.sharing) == ([2, 2, 1, 1, 1], [3, 2])
    assert drawn.owners[:7] == [1] * 5 + [2] * 2


def test_of_a_huge_pool_a_bounded_number_of_blocks_is_looked_at() -> None:
    cache = PrefixCache(3 * MAX_EXAMINED + 5, BlockHasher(b"k" * 16))
    taken = PoolPicture.of(cache)
    examined = 3 * MAX_EXAMINED // 4 + 2
    assert (taken.stride, len(taken.ref_counts), len(taken.owners)) == (4, examined, examined)
    drawn = draw(taken, 1024)
    assert (drawn.stride, drawn.blocks_per_cell % 4, sum(drawn.free)) == (4, 0, examined)
    assert 1000 < len(drawn.free) <= 1024
