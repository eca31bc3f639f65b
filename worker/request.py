"""One Generate as the worker knows it."""

import enum
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from grpc import StatusCode

from prefixgate.cache.admission import CacheMode
from prefixgate.cache.hashing import CacheScope
from prefixgate.cache.matching import MissReason
from prefixgate.cache.prompt import Prompt
from prefixgate.worker.sequence import Sequence
from prefixgate.worker.token_set import NO_TOKENS, TokenSet

if TYPE_CHECKING:
    from prefixgate.worker.outbox import Sink


class End(NamedTuple):
    """How a call ended."""

    code: StatusCode
    message: str = ""
    """A sentence for the client; empty when OK."""
    retry_seconds: float = 0.0
    """When trying again may help, where that can be told; else 0."""
    field: str = ""
    """Path of the field that is at fault, where one is."""


class RefusedError(Exception):
    """A call that is not taken, and how it ends."""

    def __init__(self, code: StatusCode, message: str, retry_seconds: float = 0.0, field: str = "") -> None:
        super().__init__(message)
        self.end = End(code, message, retry_seconds, field)


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
    min_p: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Ids, each once, and what is added to their logits."""
    allowed_ids: TokenSet = NO_TOKENS
    """Empty allows all."""
    banned_ids: TokenSet = NO_TOKENS
    logprobs: int | None = None
    """How many of the likeliest tokens are told beside each sampled one; None tells nothing, not even of that."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""

    has_penalties: bool = field(init=False)
    """Whether what an output holds already changes the logits of its next token."""
    edits_logits: bool = field(init=False)
    """Whether anything but ``min_tokens`` changes logits before a token is chosen. Asked for each token."""

    def __post_init__(self) -> None:
        penalties = self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        edits = penalties or self.logit_bias or self.allowed_ids or self.banned_ids
        object.__setattr__(self, "has_penalties", bool(penalties))
        object.__setattr__(self, "edits_logits", bool(edits))

    def ending_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The ids that end an output, of a model with these end-of-sequence ids."""
        return self.stop_ids if self.ignore_eos else self.stop_ids | eos_ids


@dataclass(slots=True)
class Usage:
    """What a call cost so far; see the protocol's Usage."""

    prompt_tokens: int
    block_hit_tokens: int = 0
    partial_copy_tokens: int = 0
    claimed_tail_tokens: int = 0
    copied_blocks: int = 0
    completion_tokens: int = 0
    pinned_tokens: int = 0
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
    request_id: str = ""
    """What its client calls it; for logs and traces."""
    traceparent: str = ""
    """The span that its spans are children of; empty where it is not traced."""
    n: int = 1
    deadline_seconds: float | None = None
    """From receipt. Then the call fails."""
    time_limit_seconds: float | None = None
    """From receipt. Then what its outputs hold is the answer."""
    priority: int = 0
    """Higher goes first among the calls of one tenant."""
    cache_mode: CacheMode = CacheMode.DEFAULT
    retention: int | None = None
    """Retention priority for the blocks that the call leaves; None leaves them as they are."""
    pin_seconds: float | None = None
    """How long its prompt stays pinned once it has ended well; None is not at all."""
    prefill_only: bool = False
    """Whether it ends with its prompt computed, and nothing is sampled."""

    state: RequestState = RequestState.WAITING
    sequences: list[Sequence] = field(init=False)
    usage: Usage = field(init=False)
    miss_reason: MissReason = MissReason.NONE
    """Why the first of the tokens that were not cached was not; set at admission."""
    prefilled_tokens: int = 0
    """Tokens of the prompt that were computed, where that is all it is for; never falls."""
    prompt_logprobs_told: int = 0
    """Tokens of the prompt, from the second on, whose log-probabilities were told."""
    received_at: float = 0.0
    matching_at: float | None = None
    """When its prompt began to be looked up, the time that it was admitted."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float = 0.0
    rank: tuple[int, int] = (0, 0)
    """Its place among all calls, first to last: by priority, then by arrival. The scheduler's to set."""
    num_unfinished: int = field(init=False)
    """Outputs that go on."""
    carrier: Sequence | None = None
    """Computes the prompt for several outputs, while it does. A lone output computes it itself."""
    prompt: Prompt | None = None
    """What is to be admitted, packed and hashed."""
    may_follow: bool = True
    """Whether it may wait for a prefix that another call is computing."""
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.sequences = [Sequence(index) for index in range(self.n)]
        self.num_unfinished = self.n
        self.usage = Usage(prompt_tokens=len(self.token_ids))

    @property
    def unfinished(self) -> list[Sequence]:
        """The outputs that go on. Not to be changed: it can be the list of all."""
        if self.num_unfinished == self.n:
            return self.sequences
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def live(self) -> list[Sequence]:
        """The sequences that compute, of a running call."""
        return self.unfinished if self.carrier is None else [self.carrier]

    def next_carrier(self) -> Sequence:
        """The sequence that is to be admitted for the call.

        A lone output takes all its tokens along. Several share what they have in common, the prompt; what they
        sampled before a preemption, each computes again behind it.
        """
        if self.num_unfinished > 1:
            self.carrier = self.carrier or Sequence(0, token_ids=list(self.token_ids))
            return self.carrier
        self.carrier = None
        (output,) = self.unfinished
        if not output.token_ids:
            output.token_ids = list(self.token_ids)
        return output
