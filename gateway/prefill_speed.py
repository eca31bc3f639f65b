"""How fast a worker computes prompts, as far as its calls have shown."""

_HALF_LIFE_SECONDS = 60.0
_PRIOR_SECONDS = 1.0
"""What the assumed speed weighs beside what was seen, in seconds of prefill."""
_LEAST_TOKENS = 256
"""Calls that computed less of their prompts tell of overheads, not of speed."""


class PrefillSpeed:
    """Prompt tokens per second of one worker, from the calls that it ended.

    What was seen loses half of its weight each minute, in favour of the assumed speed: a worker that was slow once
    would else get no calls by which to show that it no longer is.
    """

    def __init__(self, tokens_per_second: float, now: float) -> None:
        self._assumed = tokens_per_second
        self._tokens = 0.0
        self._seconds = 0.0
        self._at = now

    def observe(self, tokens: int, seconds: float, now: float) -> None:
        """Note how much of its prompt a call computed, and the time from its admission to its first token."""
        if tokens >= _LEAST_TOKENS and seconds > 0:
            weight = self._weight(now)
            self._tokens = self._tokens * weight + tokens
            self._seconds = self._seconds * weight + seconds
            self._at = now

    def tokens_per_second(self, now: float) -> float:
        weight = self._weight(now)
        tokens = self._assumed * _PRIOR_SECONDS + self._tokens * weight
        return tokens / (_PRIOR_SECONDS + self._seconds * weight)

    def _weight(self, now: float) -> float:
        return float(0.5 ** (max(0.0, now - self._at) / _HALF_LIFE_SECONDS))
