"""What happened in the last minutes."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prefixgate.gateway.status_history import BUCKET_SECONDS, NUM_BUCKETS, StatusHistory
from prefixgate.proto import worker_pb2


class Clock:
    seconds = 1000.0 * BUCKET_SECONDS

    def __call__(self) -> float:
        return self.seconds


def survey(life: str = "a", misses: int = 0, **totals: int) -> worker_pb2.WorkerSurvey:
    return worker_pb2.WorkerSurvey(incarnation=life, misses={"evicted": misses}, **totals)  # type: ignore[arg-type]


def written(history: StatusHistory) -> dict[str, Any]:
    return history.document(["evicted"])


def test_totals_become_what_was_added_in_each_bucket() -> None:
    clock = Clock()
    history = StatusHistory(clock)
    for queried, hit, misses in ((100, 50, 3), (150, 60, 4), (150, 60, 4)):
        history.note({"w": survey(queried_tokens=queried, hit_tokens=hit, misses=misses)})
        clock.seconds += 1
    clock.seconds += 2 * BUCKET_SECONDS
    history.note({"w": survey(queried_tokens=157, hit_tokens=61, misses=4)})
    found = written(history)
    # What was there when counting began is of another time.
    assert (found["queried_tokens"], found["hit_tokens"]) == ([50, 0, 7], [10, 0, 1])
    assert found["misses"] == {"evicted": [1, 0, 0]}
    assert (found["bucket_seconds"], found["ends_at"]) == (BUCKET_SECONDS, 1003 * BUCKET_SECONDS)


def test_another_life_of_a_worker_begins_anew_and_takes_nothing_away() -> None:
    history = StatusHistory(Clock())
    history.note({"w": survey(queried_tokens=100)})
    history.note({"w": survey(queried_tokens=130)})
    history.note({"w": survey("b", queried_tokens=10)})
    history.note({"w": survey("b", queried_tokens=15)})
    history.note({})
    history.note({"w": survey("b", queried_tokens=99), "x": survey("c", queried_tokens=99)})
    assert written(history)["queried_tokens"] == [35]


def test_calls_are_the_most_at_a_time_and_blocks_those_at_the_end() -> None:
    clock = Clock()
    history = StatusHistory(clock)
    for waiting, active in ((2, 5), (9, 4), (0, 3)):
        pool = worker_pb2.PoolCounts(total=10, active=active, cached=1)
        history.note({one: worker_pb2.WorkerSurvey(waiting_calls=waiting, pool=pool) for one in ("w", "x")})
    found = written(history)
    assert (found["waiting"], found["active"], found["cached"], found["total"]) == ([18], [6], [2], [20])


@given(st.lists(st.tuples(st.integers(0, 3 * NUM_BUCKETS * BUCKET_SECONDS), st.integers(0, 9)), max_size=20))
def test_no_more_is_kept_than_there_is_room_for_and_the_latest_is_right(steps: list[tuple[int, int]]) -> None:
    clock = Clock()
    history, queried, end = StatusHistory(clock), 0, 0
    history.note({"w": survey()})
    for pause, amount in steps:
        clock.seconds += pause
        queried += amount
        history.note({"w": survey(queried_tokens=queried)})
        end = int(clock.seconds) // BUCKET_SECONDS
    found = written(history)
    assert len(found["queried_tokens"]) <= NUM_BUCKETS
    assert sum(found["queried_tokens"]) <= queried
    assert not steps or found["ends_at"] == (end + 1) * BUCKET_SECONDS
    assert not steps or found["queried_tokens"][-1] >= steps[-1][1]
