"""One of the n outputs of a call."""

import enum
from dataclasses import dataclass, field

from prefixgate.cache.block_table import BlockTable


class FinishReason(enum.Enum):
    """Why an output ended well."""

    STOP = "stop"
    """An end-of-sequence id, a stop id, or a stop string that the gateway saw."""
    LENGTH = "length"
    """Its last allowed token was sampled."""
    TIME_LIMIT = "time_limit"
    """The call's time limit was reached; what is there is the answer."""


@dataclass(eq=False, slots=True)
class Sequence:
    """What one output has computed so far.

    Until the prompt is computed only the first sequence of a call has a table: it carries the prompt for all of them.
    """

    index: int
    """Which output of its call, 0 to n - 1."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt, then output. The table reads this very list."""
    table: BlockTable | None = None
    num_computed: int = 0
    """Slots written by steps that have completed."""
    num_writable: int = 0
    """Slots up to which all are there and those not written yet are this sequence's alone."""
    num_output: int = 0
    """Sampled tokens."""
    finish_reason: FinishReason | None = None
    last_token_at: float | None = None
    """Clock reading when the newest token was sampled."""

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose slots are not written: the rest of the prompt, or the token sampled last."""
        return len(self.token_ids) - self.num_computed
