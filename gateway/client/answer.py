"""An answer: the deltas that it comes in, and the whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

import grpc

from prefixgate.gateway.client.errors import BrokenStreamError
from prefixgate.proto import gateway_pb2, generation_pb2

FinishReason: TypeAlias = Literal["stop", "length", "time_limit"]
TokenLogprob: TypeAlias = generation_pb2.TokenLogprob
Usage: TypeAlias = generation_pb2.Usage


@dataclass(frozen=True, slots=True)
class Delta:
    """What one output gained. Concatenated, the texts are the output's whole text."""

    index: int
    """Which output."""
    text: str
    """Whole characters; may be empty, and lag behind the ids while it could still become a stop string."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    """Set once, on the output's last delta."""
    matched_stop: str
    """The stop string that ended the output, where one did."""
    logprobs: tuple[TokenLogprob, ...]
    """Where asked for: one for each of ``token_ids``."""


@dataclass(slots=True)
class Output:
    """One output: whole, or as far as it has come."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while it has not ended."""
    matched_stop: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Append what a delta brought."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.matched_stop = delta.matched_stop or self.matched_stop
        self.logprobs += delta.logprobs


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, and what it cost."""

    outputs: tuple[Output, ...]
    """By index."""
    usage: Usage
    request_id: str
    """The call's name in the gateway's log."""
    model: str
    incarnation: str
    """The life of the worker that answered; a new one begins with an empty cache."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text if self.outputs else ""


class PartialAnswer:
    """An answer while it comes."""

    def __init__(self) -> None:
        self.begun = False
        """Whether anything has come."""
        self._outputs: dict[int, Output] = {}
        self._prompt_logprobs: list[TokenLogprob] = []
        self._completion: gateway_pb2.Completion | None = None

    def add(self, message: gateway_pb2.GenerateResponse) -> list[Delta]:
        """Take one message of the stream, and give the deltas that it brought."""
        self.begun = True
        deltas = [_delta(delta) for delta in message.deltas]
        for delta in deltas:
            self._outputs.setdefault(delta.index, Output(delta.index)).add(delta)
        self._prompt_logprobs += message.prompt_logprobs
        if message.HasField("completion"):
            self._completion = message.completion
        return deltas

    @property
    def text(self) -> str:
        """The text of the first output, as far as it has come."""
        return self._outputs[0].text if 0 in self._outputs else ""

    def whole(self) -> Answer:
        """Give the whole answer. Raises BrokenStreamError where its end has not come."""
        if self._completion is None:
            raise broken_stream()
        outputs = [output for _, output in sorted(self._outputs.items())]
        return _answer(outputs, self._prompt_logprobs, self._completion)


def broken_stream() -> BrokenStreamError:
    """Make the error of a stream that ended well without the message that ends it."""
    return BrokenStreamError(grpc.StatusCode.UNKNOWN, "the stream ended without its terminal message")


def answer_of(response: gateway_pb2.CompleteResponse) -> Answer:
    """Translate an answer that came whole."""
    outputs = [
        Output(
            output.index,
            output.text,
            list(output.token_ids),
            _reason(output.finish_reason),
            output.matched_stop,
            list(output.logprobs),
        )
        for output in response.outputs
    ]
    return _answer(outputs, response.prompt_logprobs, response.completion)


def _answer(
    outputs: Sequence[Output], prompt_logprobs: Sequence[TokenLogprob], completion: gateway_pb2.Completion
) -> Answer:
    return Answer(
        tuple(outputs),
        completion.usage,
        completion.request_id,
        completion.model,
        completion.incarnation,
        tuple(prompt_logprobs),
    )


def _delta(delta: gateway_pb2.OutputDelta) -> Delta:
    return Delta(
        delta.index,
        delta.text,
        tuple(delta.token_ids),
        _reason(delta.finish_reason),
        delta.matched_stop,
        tuple(delta.logprobs),
    )


def _reason(reason: generation_pb2.FinishReason) -> FinishReason | None:
    if reason == generation_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    name = generation_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
    return cast("FinishReason", name)
