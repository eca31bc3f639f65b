"""What is known of a call so far: for the line in the log and for its trace, both written at its end."""

from dataclasses import dataclass, field

from prefixgate.proto import generation_pb2


@dataclass(eq=False, slots=True)
class CallRecord:
    """Filled in as things become true; nothing of it is text that a client or a model wrote."""

    model: str = ""
    operation: str = ""
    """What is done with the prompt, in the words of OpenTelemetry's conventions; empty where nothing is generated."""
    sampling: generation_pb2.SamplingParams | None = None
    """How tokens were chosen, every default filled in."""
    outputs: int = 0
    """Outputs that were asked for."""
    prompt_tokens: int | None = None
    """None where the call has no prompt, or failed before that was encoded."""
    worker: str = ""
    """Where it was sent last."""
    attempts: int = 0
    """Workers that it was sent to."""
    first_token_seconds: float | None = None
    """From the beginning of the call to its first token here."""
    received_tokens: int = 0
    """Tokens that came from workers."""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    """Of outputs that have ended, by index."""
    usage: generation_pb2.Usage | None = None
    """The worker's account, of a call that it ended."""

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, as far as is known here."""
        return self.received_tokens if self.usage is None else self.usage.completion_tokens
