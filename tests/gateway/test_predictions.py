"""What is expected of workers: for a while, until they say, and never too much of it."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.cache.hashing import BlockHash
from prefixgate.gateway.predictions import Predictions
from tests.counts import scaled


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def blocks(*numbers: int) -> list[BlockHash]:
    return [BlockHash(bytes([number])) for number in numbers]


def there(predictions: Predictions, worker: str, hashes: Sequence[BlockHash]) -> list[bool]:
    return [predictions.has(worker, "acme", block_hash) for block_hash in hashes]


def test_a_block_is_expected_at_one_worker_and_for_its_time() -> None:
    clock = Clock()
    predictions = Predictions(clock)
    predictions.add("x", "acme", blocks(1, 2), 5.0)
    assert there(predictions, "x", blocks(1, 2, 3)) == [True, True, False]
    assert not predictions.has("y", "acme", blocks(1)[0])
    clock.now = 4.9
    assert predictions.has("x", "acme", blocks(1)[0])
    clock.now = 5.0
    assert not predictions.has("x", "acme", blocks(1)[0])


def test_a_later_expectation_prolongs_an_earlier_one_and_never_shortens_it() -> None:
    clock = Clock()
    predictions = Predictions(clock)
    predictions.add("x", "acme", blocks(1), 10.0)
    predictions.add("x", "acme", blocks(1, 2), 5.0)
    clock.now = 6.0
    assert there(predictions, "x", blocks(1, 2)) == [True, False]
    predictions.add("x", "acme", blocks(1), 10.0)
    clock.now = 15.0
    predictions.add("x", "acme", blocks(3), 1.0)
    assert there(predictions, "x", blocks(1, 2, 3)) == [True, False, True]
    assert predictions.num_blocks == 2


def test_what_the_worker_said_is_no_longer_expected() -> None:
    predictions = Predictions(Clock())
    predictions.add("x", "acme", blocks(1, 2), 5.0)
    predictions.add("y", "acme", blocks(1), 5.0)
    predictions.confirm("x", "acme", blocks(1, 9))
    assert there(predictions, "x", blocks(1, 2)) == [False, True]
    assert predictions.has("y", "acme", blocks(1)[0])
    predictions.forget("x")
    assert there(predictions, "x", blocks(1, 2)) == [False, False]
    assert predictions.num_blocks == 1


def test_what_a_tenant_flushed_is_no_longer_expected_and_what_is_others_is() -> None:
    predictions = Predictions(Clock())
    predictions.add("x", "acme", blocks(1), 5.0)
    predictions.add("x", "globex", blocks(2), 5.0)
    predictions.add("y", "acme", blocks(1), 5.0)
    predictions.forget("x", "acme")
    assert not predictions.has("x", "acme", blocks(1)[0])
    assert predictions.has("x", "globex", blocks(2)[0])
    assert predictions.has("y", "acme", blocks(1)[0])
    assert predictions.num_blocks == 2
    predictions.forget("x")
    assert predictions.num_blocks == 1


def test_there_are_never_more_than_the_bound_and_what_would_end_first_goes() -> None:
    predictions = Predictions(Clock(), max_blocks=4)
    predictions.add("x", "acme", blocks(1, 2), 5.0)
    predictions.add("y", "acme", blocks(3), 9.0)
    predictions.add("y", "acme", blocks(4, 5), 7.0)
    assert there(predictions, "x", blocks(1, 2)) == [False, False]
    assert there(predictions, "y", blocks(3, 4, 5)) == [True, True, True]
    predictions.add("z", "acme", blocks(*range(10, 20)), 1.0)
    assert there(predictions, "z", blocks(*range(10, 20))) == [True] * 4 + [False] * 6
    assert predictions.num_blocks == 4


def test_many_equal_expectations_are_bounded_as_different_ones_are() -> None:
    predictions = Predictions(Clock(), max_blocks=4)
    predictions.add("x", "acme", blocks(9), 1.0)
    for _ in range(4):
        predictions.add("x", "acme", blocks(1), 5.0)
    assert there(predictions, "x", blocks(1, 9)) == [True, False]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "confirm", "forget", "wait"]),
        st.sampled_from("xy"),
        st.lists(st.integers(0, 5), max_size=4),
        st.integers(1, 5),
    ),
    max_size=30,
)


@settings(max_examples=scaled(4000), deadline=None)
@given(actions=ACTIONS)
def test_expectations_equal_a_table_of_times(actions: list[tuple[str, str, list[int], int]]) -> None:
    clock = Clock()
    predictions = Predictions(clock)
    until: dict[tuple[str, BlockHash], float] = {}
    for action, worker, numbers, seconds in actions:
        hashes = blocks(*numbers)
        if action == "add":
            predictions.add(worker, "acme", hashes, float(seconds))
            for block_hash in hashes:
                until[worker, block_hash] = max(until.get((worker, block_hash), 0.0), clock.now + seconds)
        elif action == "confirm":
            predictions.confirm(worker, "acme", hashes)
            for block_hash in hashes:
                until.pop((worker, block_hash), None)
        elif action == "forget":
            predictions.forget(worker)
            until = {key: end for key, end in until.items() if key[0] != worker}
        else:
            clock.now += seconds
        for name in "xy":
            for block_hash in blocks(*range(6)):
                assert predictions.has(name, "acme", block_hash) == (until.get((name, block_hash), 0.0) > clock.now)
        assert predictions.num_blocks >= sum(end > clock.now for end in until.values())
    clock.now += 10
    predictions.add("x", "acme", [], 0.0)
    assert predictions.num_blocks == 0
