"""How long content waits for its next use, as the pool has seen it, and what keeping it is therefore worth.

Time is a clock that ticks with each use of a path. What waits is told apart by its *pace*: the interval between its
last two uses, in classes of one and a half octaves; what was used once has no pace yet. For each pace the waits that
ended in a use are counted by their length.

From these follows the *worth* of a block that has waited for some age: the highest number of uses per tick that can
be had by keeping it on for some more time and then letting it go, ``max over t of P(used within t) / E[ticks kept]``.
Where room is scarce that is what a block's room should earn: keeping the blocks of highest worth is optimal when
blocks return independently (it is the Gittins index of a wait). Ages whose best time is near are worth much, even
where an LRU order would just now give them up; waits that have outlasted what is usual are worth little.
"""

NUM_BINS = 64
"""Four bins to the octave, from 8 uses on; shorter waits have a bin each. All above 2**16 are in the last."""
NUM_PACES = 8
"""No pace yet, and seven classes of intervals: below 2 uses, below 8, 24, 64, 192, 512, and more."""

_BINS_PER_PACE = 6
_HALF_LIFE = 1000
"""Uses after which what was seen counts half: longer than the waits that matter, shorter than a change of traffic."""
_FIRST_REFRESH = 64
_REFRESH_EVERY = 256
"""Uses between two refreshes: few at first, when each use teaches much."""
_PRIOR = 10.0
"""Waits' worth of trust in what holds for all paces, where one pace has few of its own."""
_FIRST_PRIOR = 100.0
_FIRST_CHANCE = 0.2
"""Before anything was seen: the chance of a use is equal for each bin, so worth falls with age and the order is LRU."""

_WIDTHS = [1 if index < 8 else 1 << (index // 4 - 1) for index in range(NUM_BINS)]
_BEGINS = [index if index < 8 else (4 + index % 4) << (index // 4 - 1) for index in range(NUM_BINS)]
_NUM_LISTED = 4096
_LISTED = [
    next(index for index in range(NUM_BINS - 1, -1, -1) if _BEGINS[index] <= wait) for wait in range(_NUM_LISTED)
]
_PACES = [1 + min(NUM_PACES - 2, (index + 4) // _BINS_PER_PACE) for index in range(NUM_BINS)]


def bin_of(wait: int) -> int:
    """The bin of a wait that ends after ``wait`` uses."""
    if wait < _NUM_LISTED:
        return _LISTED[wait]
    octave = wait.bit_length() - 3
    return min(NUM_BINS - 1, 4 * octave + (wait >> octave))


class ReuseIntervals:
    """Counts of waits, and the worth of every pace and age that follows from them."""

    def __init__(self) -> None:
        self._waits = [0.0] * NUM_PACES
        self._ended = [[0.0] * NUM_BINS for _ in range(NUM_PACES)]
        self._ticks = 0
        self._refreshed_at = 0
        self._refresh_at = _FIRST_REFRESH
        self.worth: list[list[float]] = []
        """By pace and bin of age."""
        self._refresh()

    def begin(self) -> None:
        """Something was used for the first time and waits now."""
        self._waits[0] += 1

    def renew(self, pace: int, interval: int) -> int:
        """Something was used after it had waited, and waits again; returns its new pace."""
        length = bin_of(interval)
        self._ended[pace][length] += 1
        pace = _PACES[length]
        self._waits[pace] += 1
        return pace

    def tick(self) -> None:
        """Once for each use of a path. Every so often brings ``worth`` up to date, which takes about 0.5 ms."""
        self._ticks += 1
        if self._ticks == self._refresh_at:
            self._refresh()
            self._refresh_at += min(_REFRESH_EVERY, max(_FIRST_REFRESH, self._ticks // 8))

    def _refresh(self) -> None:
        fade = 0.5 ** ((self._ticks - self._refreshed_at) / _HALF_LIFE)
        self._refreshed_at = self._ticks
        self._waits = [fade * count for count in self._waits]
        self._ended = [[fade * count for count in counts] for counts in self._ended]
        seen = _seen(self._ticks)
        lasting = [_lasting(waits, ended, seen) for waits, ended in zip(self._waits, self._ended, strict=True)]
        common = [
            (sum(used) + _FIRST_PRIOR * _FIRST_CHANCE) / (sum(waiting) + _FIRST_PRIOR)
            for used, waiting in zip(zip(*self._ended, strict=True), zip(*lasting, strict=True), strict=True)
        ]
        self.worth = [
            _worth([
                (min(used, waiting) + _PRIOR * chance) / (waiting + _PRIOR)
                for used, waiting, chance in zip(ended, lasted, common, strict=True)
            ])
            for ended, lasted in zip(self._ended, lasting, strict=True)
        ]  # fmt: skip


def _seen(ticks: int) -> list[float]:
    """Share of the waits, as they count, that began long enough ago to have reached each bin.

    Without it, waits that are still young would count as having outlasted every age that nothing has reached yet.
    """
    all_waits = 1 - 0.5 ** (ticks / _HALF_LIFE)
    return [max(0.0, 1 - 0.5 ** ((ticks - begin) / _HALF_LIFE)) / all_waits if ticks else 0.0 for begin in _BEGINS]


def _lasting(waits: float, ended: list[float], seen: list[float]) -> list[float]:
    """How many of the waits were seen to reach each bin."""
    lasting = []
    for used, share in zip(ended, seen, strict=True):
        lasting.append(waits * share)
        if share:
            waits = max(0.0, waits - used / share)
    return lasting


def _worth(chances: list[float]) -> list[float]:
    """Worth at each bin, from the chance that a wait which reaches a bin ends in it.

    Uses gained against ticks spent is a curve through one point for each bin; the best rate from a point on is the
    slope of the least concave curve above the rest, which a stack finds from right to left.
    """
    alive, points, spent = 1.0, [(0.0, 0.0)], 0.0
    for chance, width in zip(chances, _WIDTHS, strict=True):
        after = alive * (1 - chance)
        spent += (alive + after) / 2 * width
        points.append((spent, 1 - after))
        alive = after
    worth, hull = [0.0] * NUM_BINS, [points[-1]]
    for position in range(NUM_BINS - 1, -1, -1):
        here = points[position]
        while len(hull) > 1 and _slope(here, hull[-1]) <= _slope(hull[-1], hull[-2]):
            hull.pop()
        worth[position] = _slope(here, hull[-1])
        hull.append(here)
    return worth


def _slope(begin: tuple[float, float], end: tuple[float, float]) -> float:
    # Two points can be one where nothing lasts so long any more: then there is nothing to gain either.
    return (end[1] - begin[1]) / (end[0] - begin[0]) if end[0] > begin[0] else 0.0
