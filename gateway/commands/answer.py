"""An answer as it comes to the terminal, and its cost."""

import time
from typing import Any

from prefixgate.gateway.client import Answer, AnswerStream, Output, TokenLogprob, Usage
from prefixgate.gateway.commands.json_form import json_form
from prefixgate.gateway.console import write_text


class ShownAnswer:
    """Reads a stream to its end, and shows the first output as it comes, unless ``quiet``."""

    def __init__(self, stream: AnswerStream, *, quiet: bool = False) -> None:
        self._stream = stream
        self._quiet = quiet
        self._started = time.monotonic()
        self.first_token_seconds = 0.0
        """From the beginning to the first piece of news, as seen here."""

    def read(self) -> Answer:
        """Read all of it. Whatever interrupts that cancels the call."""
        with self._stream as deltas:
            for count, delta in enumerate(deltas):
                if count == 0:
                    self.first_token_seconds = time.monotonic() - self._started
                if delta.index == 0 and not self._quiet:
                    write_text(delta.text)
            return deltas.result()


def cost(answer: Answer, first_token_seconds: float) -> str:
    """Say in one line what a call cost."""
    usage = answer.usage
    reasons = ", ".join(output.finish_reason or "" for output in answer.outputs)
    return "; ".join(
        (
            f"prompt {usage.prompt_tokens} tokens, {cached(usage)}",
            f"copied blocks {usage.copied_blocks}",
            f"completion {usage.completion_tokens} tokens ({reasons})",
            f"first token after {first_token_seconds:.3f} s",
        )
    )


def cached(usage: Usage) -> str:
    """Say how many tokens came from the cache, and how."""
    sources = [
        f"{count} {how}"
        for count, how in (
            (usage.block_hit_tokens, "in shared blocks"),
            (usage.partial_copy_tokens, "copied"),
            (usage.claimed_tail_tokens, "taken over"),
        )
        if count
    ]
    return f"{usage.cached_tokens} cached" + (f" ({', '.join(sources)})" if sources else "")


def answer_form(answer: Answer, first_token_seconds: float) -> dict[str, Any]:
    """Make the answer as a JSON object."""
    form: dict[str, Any] = {
        "request_id": answer.request_id,
        "model": answer.model,
        "incarnation": answer.incarnation,
        "outputs": [_output_form(output) for output in answer.outputs],
        "usage": json_form(answer.usage),
        "client_first_token_seconds": first_token_seconds,
    }
    if answer.prompt_logprobs:
        form["prompt_logprobs"] = [json_form(entry) for entry in answer.prompt_logprobs]
    return form


def _output_form(output: Output) -> dict[str, Any]:
    form: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "matched_stop": output.matched_stop,
    }
    entries: list[TokenLogprob] = output.logprobs
    return form | ({"logprobs": [json_form(entry) for entry in entries]} if entries else {})
