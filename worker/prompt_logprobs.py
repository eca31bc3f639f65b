"""Log-probabilities of a prompt's own tokens, as its chunks are computed.

The logits at a position tell how likely the next token is: the first token of a prompt has no log-probability, and the
last position's logits are those of the first output token. What was told once is not told again by a call that is
computed anew after a preemption.
"""

import torch

from prefixgate.worker.logprobs import TokenLogprob, logprobs_of
from prefixgate.worker.request import Request


def wants_all_logits(request: Request, stop: int) -> bool:
    """Tell whether a chunk that ends before position ``stop`` has log-probabilities to tell."""
    wanted = request.sampling.prompt_logprobs is not None
    return wanted and request.prompt_logprobs_told < min(stop, len(request.token_ids) - 1)


def take_prompt_logprobs(request: Request, start: int, logits: torch.Tensor) -> list[TokenLogprob]:
    """Return what the logits ``[T, V]`` of the positions from ``start`` tell that was not told yet, and note it."""
    told, count = request.prompt_logprobs_told, request.sampling.prompt_logprobs or 0
    stop = min(start + len(logits), len(request.token_ids) - 1)
    token_ids = request.token_ids[told + 1 : stop + 1]
    found = logprobs_of(logits[told - start : stop - start], token_ids, [count] * len(token_ids))
    request.prompt_logprobs_told = stop
    return found
