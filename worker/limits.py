"""Bounds of a worker's batch and queue."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator allows at once."""

    max_batch_tokens: int
    """Tokens computed in one step."""
    max_running: int
    """Sequences that have been admitted and not finished."""
    max_waiting: int
    """Calls that wait for admission."""

    def __post_init__(self) -> None:
        if self.max_batch_tokens <= self.max_running:
            raise ValueError(
                f"max_batch_tokens: {self.max_batch_tokens} must be more than max_running, {self.max_running}: each "
                "running sequence computes a token in every step, and what is left is for prompts"
            )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a step that are left for a prompt, however many sequences decode beside it."""
        return self.max_batch_tokens - self.max_running + 1
