"""The prompts that a worker has yet to compute for this gateway, oldest first."""

from itertools import count


class PendingPrompts:
    """Tokens to be computed, by prompt. A worker is taken to compute one prompt after the other, in order."""

    def __init__(self) -> None:
        self._numbers = count()
        self._tokens: dict[int, int] = {}
        self._total = 0
        self._news_at = 0.0

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, tokens: int, now: float) -> int:
        """A prompt was sent, of which so many tokens are not cached there. Returns its number."""
        if not self._tokens:
            self._news_at = now
        number = next(self._numbers)
        self._tokens[number] = tokens
        self._total += tokens
        return number

    def remove(self, number: int, now: float) -> None:
        """A prompt is computed, or given up. Idempotent."""
        tokens = self._tokens.pop(number, None)
        if tokens is not None:
            self._total -= tokens
            self._news_at = now

    def left(self, now: float, tokens_per_second: float) -> float:
        """Tell how many tokens are still to be computed at that speed.

        What must have been computed since the last news is taken off, but no more than the oldest prompt: a worker
        that hangs does not look idle.
        """
        if not self._tokens:
            return 0.0
        oldest = next(iter(self._tokens.values()))
        return self._total - min(float(oldest), (now - self._news_at) * tokens_per_second)
