"""The bounded memory of evicted runs."""

from prefixgate.cache.ghosts import Ghosts
from prefixgate.cache.runs import Run


def run(number: int, cached: int, evicted: int) -> Run:
    names: list[bytes | None] = [bytes([number, position]) for position in range(cached + evicted)]
    return Run(number, -1, list(range(cached)), names)


def test_a_run_is_found_by_its_first_evicted_node_only() -> None:
    ghosts, one = Ghosts(10), run(1, 2, 3)
    ghosts.add(one)
    assert ghosts.find(bytes([1, 2])) is one
    assert ghosts.find(bytes([1, 0])) is None
    assert ghosts.find(bytes([1, 3])) is None
    assert ghosts.num_blocks == 3


def test_the_oldest_is_forgotten_when_too_many_blocks_are_remembered() -> None:
    ghosts, runs = Ghosts(6), [run(number, 0, 3) for number in range(3)]
    for each in runs:
        ghosts.add(each)
    assert [ghosts.find(bytes([number, 0])) for number in range(3)] == [None, runs[1], runs[2]]
    assert ghosts.num_blocks == 6
    assert runs[0].hashes == []


def test_forgetting_leaves_the_cached_part() -> None:
    ghosts, one = Ghosts(10), run(1, 2, 3)
    ghosts.add(one)
    ghosts.forget(one)
    assert one.hashes == [bytes([1, 0]), bytes([1, 1])]
    assert one.num_evicted == 0
    assert (len(ghosts), ghosts.num_blocks) == (0, 0)


def test_a_run_larger_than_the_directory_is_not_remembered() -> None:
    ghosts = Ghosts(2)
    ghosts.add(run(1, 0, 3))
    assert (len(ghosts), ghosts.num_blocks) == (0, 0)


def test_of_two_runs_with_one_name_the_later_is_remembered() -> None:
    ghosts, earlier, later = Ghosts(10), run(1, 0, 3), run(1, 0, 2)
    ghosts.add(earlier)
    ghosts.add(later)
    assert ghosts.find(bytes([1, 0])) is later
    assert ghosts.num_blocks == 2
