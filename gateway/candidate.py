"""Who could take a call, and who was chosen: what the fleet and its router tell each other."""

from typing import NamedTuple

from prefixgate.gateway.pending_prompts import PendingPrompts


class Candidate(NamedTuple):
    """A worker that a call can be sent to now."""

    worker: str
    """Its address, by which all else here knows it."""
    calls: int
    """Calls in its hands, other gateways' included as far as it has told of them."""
    pending: PendingPrompts
    """This gateway's that wait for their first tokens. Only to be read."""


class Choice(NamedTuple):
    """Where a call goes."""

    worker: str
    queried_tokens: int
    """Tokens of the prompt; none where the call does not read the cache."""
    reusable_tokens: int
    """Of these, the most that are expected in any worker's cache, of those that cannot be chosen too."""
    cached_tokens: int
    """Of these, tokens that are expected in the chosen worker's cache."""
