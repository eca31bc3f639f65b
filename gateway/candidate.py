"""Who could take a call, and who was chosen: what the fleet and its router tell each other."""

from typing import NamedTuple


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
