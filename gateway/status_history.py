"""What happened in the last minutes, in buckets of a few seconds: kept, so that a page shows it as it opens."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prefixgate.proto import worker_pb2

BUCKET_SECONDS = 5
NUM_BUCKETS = 120

_TOTALS = ("queried_tokens", "hit_tokens", "generated_tokens", "evicted_blocks", "preemptions")
"""Of a survey: what only grows while a worker lives."""


@dataclass(slots=True)
class Bucket:
    """What all workers together did in a few seconds, and how they stood."""

    added: Counter[str] = field(default_factory=Counter)
    """To the totals, by name; misses by their reason."""
    waiting: int = 0
    running: int = 0
    """Calls, the most at a time."""
    active: int = 0
    cached: int = 0
    total: int = 0
    """Blocks, at the end."""


class StatusHistory:
    """The last ten minutes, whoever was there."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock`` tells the time of day in seconds, as buckets begin at round ones."""
        self._clock = clock
        self._buckets: deque[Bucket] = deque(maxlen=NUM_BUCKETS)
        self._last = 0
        """Number of the last bucket, in buckets since 1970."""
        self._before: dict[str, worker_pb2.WorkerSurvey] = {}

    def note(self, surveys: Mapping[str, worker_pb2.WorkerSurvey]) -> None:
        """Take what each worker has told last, by its address.

        A worker's first survey, and the first of another life of it, tells only where counting begins.
        """
        bucket = self._bucket()
        for address, survey in surveys.items():
            before = self._before.get(address)
            if before is not None and before.incarnation == survey.incarnation:
                bucket.added.update(_growth(before, survey))
        self._before = dict(surveys)
        now = surveys.values()
        bucket.waiting = max(bucket.waiting, sum(one.waiting_calls for one in now))
        bucket.running = max(bucket.running, sum(one.running_calls for one in now))
        bucket.active = sum(one.pool.active for one in now)
        bucket.cached = sum(one.pool.cached for one in now)
        bucket.total = sum(one.pool.total for one in now)

    def document(self, reasons: Iterable[str]) -> dict[str, object]:
        """Write all of it, the oldest bucket first; ``reasons`` are those of misses."""
        self._bucket()
        buckets = tuple(self._buckets)

        def added(name: str) -> list[int]:
            return [bucket.added[name] for bucket in buckets]

        return {
            "bucket_seconds": BUCKET_SECONDS,
            "ends_at": (self._last + 1) * BUCKET_SECONDS,
            **{name: added(name) for name in _TOTALS},
            "misses": {reason: added(_miss(reason)) for reason in reasons},
            **{
                name: [getattr(bucket, name) for bucket in buckets]
                for name in ("waiting", "running", "active", "cached", "total")
            },
        }

    def _bucket(self) -> Bucket:
        """Find the bucket of this moment; those that nothing was noted in stay empty."""
        number = int(self._clock()) // BUCKET_SECONDS
        if not self._buckets or number - self._last >= NUM_BUCKETS:
            self._buckets.clear()
            self._buckets.append(Bucket())
            self._last = number
        while self._last < number:
            self._buckets.append(Bucket())
            self._last += 1
        return self._buckets[-1]


def _growth(before: worker_pb2.WorkerSurvey, after: worker_pb2.WorkerSurvey) -> dict[str, int]:
    # Never less than nothing: a survey that was asked for earlier can come later.
    grown = {name: max(0, getattr(after, name) - getattr(before, name)) for name in _TOTALS}
    misses = {_miss(reason): max(0, count - before.misses[reason]) for reason, count in after.misses.items()}
    return grown | misses


def _miss(reason: str) -> str:
    return f"misses of {reason}"
