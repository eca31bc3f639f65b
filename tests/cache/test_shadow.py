"""The count of what LRU would hold, against an LRU that holds it."""

from hypothesis import given
from hypothesis import strategies as st

from prefixgate.cache.shadow import ShadowLRU


class PlainLRU:
    """Keys in the order of their last use; the deepest of a path first to go."""

    def __init__(self) -> None:
        self.keys: dict[tuple[int, ...], int] = {}  # node to tick, oldest first

    def use(self, now: int, path: list[tuple[int, ...]], room: int) -> tuple[list[tuple[int, int]], int]:
        runs: list[tuple[int, int]] = []
        for node in path:
            tick = self.keys.get(node, 0)
            if runs and runs[-1][0] == tick:
                runs[-1] = (tick, runs[-1][1] + 1)
            else:
                runs.append((tick, 1))
        hits = sum(node in self.keys for node in path)
        for node in reversed(path):
            self.keys.pop(node, None)
            self.keys[node] = now
        while len(self.keys) > room:
            del self.keys[next(iter(self.keys))]
        return runs, hits


paths = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=60)


@given(paths, st.integers(6, 12))
def test_hits_are_those_of_lru(used: list[list[int]], room: int) -> None:
    plain, shadow = PlainLRU(), ShadowLRU()
    for now, labels in enumerate(used, start=1):
        path = [tuple(labels[: depth + 1]) for depth in range(len(labels))]
        runs, hits = plain.use(now, path, room)
        assert shadow.use(now, runs, room) == hits


def test_what_was_dropped_leaves_room() -> None:
    shadow = ShadowLRU()
    shadow.use(1, [(0, 2)], 4)
    shadow.use(2, [(0, 2)], 4)
    shadow.drop(1)
    shadow.use(3, [(0, 1)], 4)
    assert shadow.use(4, [(1, 1)], 4) == 1


def test_less_room_takes_the_oldest() -> None:
    shadow = ShadowLRU()
    shadow.use(1, [(0, 3)], 8)
    shadow.use(2, [(0, 3)], 4)
    assert shadow.use(3, [(1, 3)], 8) == 1
