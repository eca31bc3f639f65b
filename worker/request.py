"""One Generate as the worker knows it."""

import enum
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from grpc import StatusCode

from prefixgate.cache.admission import CacheMode
from prefixgate.cache.hashing import CacheScope
from prefixgate.cache.matching import MissReason
from prefixgate.worker.sequence import Sequence

if TYPE_CHECKING:
    from prefixgate.worker.outbox import Sink


class End(NamedTuple):
    """How a call ended."""

    code: StatusCode
    message: str = ""
    """A sentence for the client; empty when OK."""


class RefusedError(Exception):
    """A call that is not taken, and how it ends."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.end = End(code, message)


class RequestState(enum.Enum):
    """Where a call stands. Only RUNNING ones own blocks."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a call's tokens are chosen and when its outputs end, checked and with every default filled in."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(slots=True)
class Usage:
    """What a call cost so far; see the protocol's Usage."""

    prompt_tokens: int
    block_hit_tokens: int = 0
    partial_copy_tokens: int = 0
    claimed_tail_tokens: int = 0
    copied_blocks: int = 0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.block_hit_tokens + self.partial_copy_tokens + self.claimed_tail_tokens


@dataclass(eq=False, slots=True)
class Request:
    """One call: its prompt, its outputs, and its life in the engine.

    The object itself is its identity. The ids that a client or a gateway chose only travel along, so that two calls
    with one id are still two calls.
    """

    token_ids: Items[int]
    """The prompt."""
    scope: CacheScope
    sampling: SamplingParams
    sink: "Sink"
    """Where its news go."""
    call_id: int = 0
    n: int = 1
    deadline_seconds: float | None = None
    """From receipt."""

    state: RequestState = RequestState.WAITING
    sequences: list[Sequence] = field(init=False)
    usage: Usage = field(init=False)
    received_at: float = 0.0
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.sequences = [Sequence(index) for index in range(self.n)]
        self.sequences[0].token_ids = list(self.token_ids)
        self.usage = Usage(prompt_tokens=len(self.token_ids))

    @property
    def carrier(self) -> Sequence:
        """The sequence that computes the prompt. It does so even if its own output is no longer wanted."""
        return self.sequences[0]

    @property
    def unfinished(self) -> list[Sequence]:
        """The outputs that go on."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def prompt_computed(self) -> bool:
        """Whether all of the prompt's slots are written."""
        return self.first_token_at is not None
    cache_mode: CacheMode = CacheMode.DEFAULT
    retention: int | None = None
    """Retention priority for the blocks that the call leaves; None leaves them as they are."""
    miss_reason: MissReason = MissReason.NONE
    """Why the first of the tokens that were not cached was not; set at admission."""
