"""What the witness says when it is asked alone: no scheduler, no cache, no process, nothing shared."""

from collections.abc import Sequence
from typing import NamedTuple

from prefixgate.cache.hashing import BLOCK_SIZE, CacheScope
from prefixgate.cache.kv_storage import TorchKVStorage
from prefixgate.proto import gateway_pb2, generation_pb2
from prefixgate.worker.model_runner import Row
from prefixgate.worker.sampling import Draw, sample, uniform
from prefixgate.worker.witness import WitnessModel, witness_layout
from prefixgate.worker.witness_options import WitnessOptions

_BYTES = 256
"""Ids below this are bytes of text; the others are special and come to no text."""


class Expected(NamedTuple):
    """One output, as a client should get it."""

    token_ids: list[int]
    text: str
    finish_reason: "generation_pb2.FinishReason"
    matched_stop: str


class Oracle:
    """Answers requests with a model of its own, one token after another."""

    def __init__(self, options: WitnessOptions, *, longest: int) -> None:
        """``longest`` is the most tokens that a prompt and its output come to."""
        self._blocks = range(-(-longest // BLOCK_SIZE))
        self._model = WitnessModel("witness", TorchKVStorage(len(self._blocks), witness_layout()), options)
        self._answers: dict[tuple[object, ...], list[int]] = {}

    def output(self, request: gateway_pb2.GenerateRequest, tenant: str, index: int) -> Expected | None:
        """Tell one output of a request whose prompt is text; None where nobody can know it, for want of a seed."""
        sampling = request.sampling
        if sampling.temperature and not sampling.HasField("seed"):
            return None
        # Greedy outputs of one prompt are all alike.
        drawn = (sampling.temperature, sampling.seed, index) if sampling.temperature else (0.0, 0, 0)
        key = (tenant, request.cache.salt, request.prompt, sampling.max_tokens, sampling.ignore_eos, drawn)
        if key not in self._answers:
            self._answers[key] = self._generate(request, CacheScope(tenant, "", salt=request.cache.salt), drawn)
        token_ids = self._answers[key]
        ended = not sampling.ignore_eos and token_ids[-1] in self._model.spec.eos_ids
        reason = generation_pb2.FINISH_REASON_STOP if ended else generation_pb2.FINISH_REASON_LENGTH
        return cut(token_ids, reason, request.stop)

    def _generate(
        self, request: gateway_pb2.GenerateRequest, scope: CacheScope, drawn: tuple[float, int, int]
    ) -> list[int]:
        temperature, seed, index = drawn
        prompt, output, start = list(request.prompt.encode()), list[int](), 0
        while len(output) < request.sampling.max_tokens:
            token_ids = [*prompt, *output]
            row = Row(token_ids[start:], start, self._blocks, scope, needs_logits=True)
            draw = Draw(temperature, uniform=uniform(seed, index, len(output)))
            output += sample(self._model.forward([row]), [draw])
            start = len(token_ids)
            if output[-1] in self._model.spec.eos_ids and not request.sampling.ignore_eos:
                break
        return output


def text_of(token_ids: Sequence[int]) -> str:
    """Read ids as text, whole characters only."""
    return bytes(token_id for token_id in token_ids if token_id < _BYTES).decode(errors="replace")


def cut(token_ids: list[int], reason: "generation_pb2.FinishReason", stops: Sequence[str]) -> Expected:
    """Cut an output where a stop string is complete for the first time."""
    for count in range(1, len(token_ids) + 1 if stops else 0):
        text = text_of(token_ids[:count])
        matches = [stop for stop in stops if text.endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return Expected(token_ids[:count], text.removesuffix(stop), generation_pb2.FINISH_REASON_STOP, stop)
    return Expected(token_ids, text_of(token_ids), reason, "")
