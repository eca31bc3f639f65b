"""An answer as it comes to the terminal: the outputs so far, and at the end what the call cost."""

import json
import sys
import time
from dataclasses import dataclass, field

from prefixgate.proto import gateway_pb2, generation_pb2

_USAGE_COUNTS = (
    "prompt_tokens",
    "cached_tokens",
    "block_hit_tokens",
    "partial_copy_tokens",
    "claimed_tail_tokens",
    "copied_blocks",
    "completion_tokens",
)


@dataclass(slots=True)
class OutputText:
    """One output of the call."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    matched_stop: str = ""

    def add(self, delta: gateway_pb2.OutputDelta) -> None:
        """Append what one message brought."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.finish_reason:
            name = generation_pb2.FinishReason.Name(delta.finish_reason)
            self.finish_reason = name.removeprefix("FINISH_REASON_").lower()
            self.matched_stop = delta.matched_stop


class Answer:
    """Collects a call's messages. The first output is shown as it comes, unless ``quiet``."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._started = time.monotonic()
        self._first_token_seconds = 0.0
        self._outputs: dict[int, OutputText] = {}
        self._completion: gateway_pb2.Completion | None = None

    @property
    def complete(self) -> bool:
        """Whether the terminal message has come."""
        return self._completion is not None

    def add(self, message: gateway_pb2.GenerateResponse) -> None:
        """Take one message of the stream."""
        for delta in message.deltas:
            if not self._outputs:
                self._first_token_seconds = time.monotonic() - self._started
            self._outputs.setdefault(delta.index, OutputText()).add(delta)
            if delta.index == 0 and not self._quiet:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        if message.HasField("completion"):
            self._completion = message.completion

    def show_rest(self) -> None:
        """Print what could not be streamed: the outputs after the first, and on stderr the cost of the call."""
        sys.stdout.write("\n")
        for index, output in sorted(self._outputs.items()):
            if index > 0:
                sys.stdout.write(f"--- output {index}\n{output.text}\n")
        sys.stdout.flush()
        sys.stderr.write(f"[{self._cost()}]\n")

    def show_json(self) -> None:
        """Print all of it as one JSON object."""
        completion = self._completed()
        usage = completion.usage
        document = {
            "request_id": completion.request_id,
            "model": completion.model,
            "incarnation": completion.incarnation,
            "outputs": [
                {
                    "index": index,
                    "text": output.text,
                    "token_ids": output.token_ids,
                    "finish_reason": output.finish_reason,
                    "matched_stop": output.matched_stop,
                }
                for index, output in sorted(self._outputs.items())
            ],
            "usage": {name: getattr(usage, name) for name in _USAGE_COUNTS}
            | {"queue_seconds": usage.queue_seconds, "first_token_seconds": usage.first_token_seconds},
            "client_first_token_seconds": self._first_token_seconds,
        }
        sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
        sys.stdout.flush()

    def _cost(self) -> str:
        usage = self._completed().usage
        sources = [
            f"{count} {how}"
            for count, how in (
                (usage.block_hit_tokens, "in shared blocks"),
                (usage.partial_copy_tokens, "copied"),
                (usage.claimed_tail_tokens, "taken over"),
            )
            if count
        ]
        cached = f"{usage.cached_tokens} cached" + (f" ({', '.join(sources)})" if sources else "")
        reasons = ", ".join(output.finish_reason for _, output in sorted(self._outputs.items()))
        parts = (
            f"prompt {usage.prompt_tokens} tokens, {cached}",
            f"copied blocks {usage.copied_blocks}",
            f"completion {usage.completion_tokens} tokens ({reasons})",
            f"first token after {self._first_token_seconds:.3f} s",
        )
        return "; ".join(parts)

    def _completed(self) -> gateway_pb2.Completion:
        if self._completion is None:
            raise ValueError("the answer is not complete")
        return self._completion
