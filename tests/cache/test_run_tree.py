"""How runs begin, grow, part and return."""

from prefixgate.cache.run_tree import RunTree
from prefixgate.cache.runs import Run

ROOT = 100


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def use(tree: RunTree, block: int, now: int) -> list[Run]:
    path = []
    for run in tree.path_to(block):
        run.used_at, run.growing = now, False
        path.append(run)
    return path


def evict(tree: RunTree, block: int, count: int) -> None:
    for _ in range(count):
        tree.evict(tree.run_of(block))
    tree.remember()


def test_what_is_published_block_by_block_before_a_use_is_one_run() -> None:
    tree = RunTree(ROOT)
    tree.publish(ROOT, [0, 1], names(0, 1))
    tree.publish(1, (2,), tuple(names(2)))
    tree.keep_tail(2, 3)
    assert [run.blocks for run in use(tree, 3, 1)] == [[0, 1, 2, 3]]


def test_what_is_published_after_a_use_is_another() -> None:
    tree = RunTree(ROOT)
    tree.publish(ROOT, [0, 1], names(0, 1))
    use(tree, 1, 1)
    tree.publish(1, [2], names(2))
    assert [run.blocks for run in use(tree, 2, 2)] == [[2], [0, 1]]


def test_a_use_that_ends_inside_a_run_parts_it() -> None:
    tree = RunTree(ROOT)
    tree.publish(ROOT, [0, 1, 2], names(0, 1, 2))
    use(tree, 2, 1)
    assert [run.blocks for run in use(tree, 0, 2)] == [[0]]
    assert [(run.blocks, run.used_at) for run in tree.path_to(2)] == [([1, 2], 1), ([0], 2)]


def test_a_fork_inside_a_run_that_grows_parts_it_and_it_grows_no_more() -> None:
    tree = RunTree(ROOT)
    tree.publish(ROOT, [0, 1], names(0, 1))
    tree.publish(0, [2], names(2))  # another sequence, below the first block
    tree.publish(0, [3], names(3))
    assert [run.blocks for run in tree.path_to(2)] == [[2], [0]]
    assert [run.blocks for run in tree.path_to(3)] == [[3], [0]]
    assert [run.blocks for run in tree.path_to(1)] == [[1], [0]]


def test_what_returns_whole_continues_its_run_with_its_history() -> None:
    tree = RunTree(ROOT)
    tree.publish(ROOT, [0, 1, 2], names(0, 1, 2))
    use(tree, 2, 7)
    evict(tree, 0, 2)
    tree.publish(0, [5, 6], names(1, 2))
    assert [(run.blocks, run.used_at) for run in tree.path_to(6)] == [([0, 5, 6], 7)]


def test_what_returns_block_by_block_does_too() -> None:
    tree = RunTree(ROOT)
    tree.publish(ROOT, [0, 1, 2], names(0, 1, 2))
    use(tree, 2, 7)
    evict(tree, 0, 3)
    tree.publish(ROOT, (4,), tuple(names(0)))
    tree.publish(4, (5,), tuple(names(1)))
    assert [(run.blocks, run.used_at) for run in tree.path_to(5)] == [([5], 7), ([4], 7)]


def test_what_returns_in_part_leaves_the_rest_remembered() -> None:
    tree = RunTree(ROOT)
    tree.publish(ROOT, [0, 1, 2, 3], names(0, 1, 2, 3))
    use(tree, 3, 7)
    evict(tree, 0, 4)
    tree.publish(ROOT, [4, 5, 6], names(0, 1, 9))
    assert [(run.blocks, run.used_at) for run in tree.path_to(6)] == [([6], 0), ([4, 5], 7)]
    tree.publish(5, [7, 8], names(2, 3))
    assert [(run.blocks, run.used_at) for run in tree.path_to(8)] == [([7, 8], 7), ([4, 5], 7)]


def test_what_was_discarded_is_forgotten() -> None:
    tree = RunTree(ROOT)
    tree.publish(ROOT, [0, 1, 2], names(0, 1, 2))
    use(tree, 2, 7)
    evict(tree, 0, 1)
    tree.discard(1)
    tree.publish(0, [4, 5], names(1, 2))
    assert [(run.blocks, run.used_at) for run in tree.path_to(5)] == [([4, 5], 0), ([0], 7)]


def test_a_tail_is_not_remembered() -> None:
    tree = RunTree(ROOT)
    tree.publish(ROOT, [0], names(0))
    tree.keep_tail(0, 1)
    use(tree, 1, 7)
    evict(tree, 0, 1)
    assert tree.run_of(0).hashes == names(0)
    assert tree.run_of(0).remembered_as is None
