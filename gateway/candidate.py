"""Who could take a call, and who was chosen: what the fleet and its router tell each other."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from prefixgate.cache.hashing import CacheScope


class Load(NamedTuple):
    """What a worker has to do."""

    calls: int
    """This gateway's calls in its hands."""
    pending_tokens: int
    """Tokens of their prompts that are to be computed before their first tokens, as the router expected them."""
    running: int = 0
    """Outputs that it generates, of all gateways' calls, as it last said."""
    waiting: int = 0
    """Outputs that wait for admission there, likewise."""


class Candidate(NamedTuple):
    """A worker that a call can be sent to now."""

    worker: str
    """Its address, by which all else here knows it."""
    load: Load


class Choice(NamedTuple):
    """Where a call goes."""

    worker: str
    cached_tokens: int = 0
    """Tokens of the prompt that are expected in its cache."""
    reusable_tokens: int = 0
    """The most that are expected in any worker's cache, of those that cannot be chosen too. Never fewer."""


class Router(Protocol):
    """Chooses a worker for each call. Lives on the event loop; a decision takes microseconds, as none may wait."""

    def choose(self, scope: CacheScope, token_ids: Sequence[int], candidates: Sequence[Candidate]) -> Choice:
        """Choose one of at least one candidates for a prompt."""


class LeastLoaded:
    """Chooses whoever has least to do; of equals, the one that was chosen longest ago."""

    def __init__(self) -> None:
        self._turns = 0
        self._chosen: dict[str, int] = {}

    def choose(self, scope: CacheScope, token_ids: Sequence[int], candidates: Sequence[Candidate]) -> Choice:
        self._turns += 1
        known = {candidate.worker: self._chosen.get(candidate.worker, 0) for candidate in candidates}
        choice = min(candidates, key=lambda candidate: (*_effort(candidate.load), known[candidate.worker]))
        # Of those who are gone nothing is kept.
        self._chosen = {**known, choice.worker: self._turns}
        return Choice(choice.worker)


def _effort(load: Load) -> tuple[int, int]:
    return load.pending_tokens, max(load.calls, load.running + load.waiting)
