"""Log-probabilities of tokens: those that were sampled, those of a prompt, and the likeliest beside them.

Of the model's own distribution: the log-softmax of its logits as they come, before temperature, penalties, biases,
limits and bans. So they compare between calls that sample in different ways, and those of a token do not depend on
how it was chosen.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from prefixgate.worker.ranking import leading

_LINES_AT_ONCE = 16
"""Lines whose float64 log-softmax is held in memory together: a chunk of a prompt can have thousands."""

_LOWEST = torch.finfo(torch.float32).min


class TokenLogprob(NamedTuple):
    """A token and how likely the model found it."""

    token_id: int
    logprob: float
    """Natural logarithm, finite, at most 0."""
    rank: int
    """1 for the likeliest token; tokens that are equally likely share a rank."""
    top: tuple[tuple[int, float], ...] = ()
    """Id and log-probability of the likeliest tokens, likeliest first and lower ids first among equals."""


def logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """Tell for each line of finite ``[R, V]`` logits how likely its token is, and its ``counts`` likeliest tokens."""
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), _LINES_AT_ONCE):
        part = slice(start, start + _LINES_AT_ONCE)
        found += _logprobs_of(logits[part], token_ids[part], counts[part])
    return found


def _logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    _, top_ids = leading(logits, max(counts))
    parts = _measure(logits, torch.tensor(token_ids, device=logits.device)[:, None], top_ids)
    return assemble(token_ids, counts, *(part.tolist() for part in parts))


class LogprobParts(NamedTuple):
    """What ``assemble`` makes log-probabilities of, for K lines of logits."""

    ranks: torch.Tensor
    """int64 ``[K]``"""
    top_ids: torch.Tensor
    """int64 ``[K, C]``: the likeliest tokens of each."""
    logprobs: torch.Tensor
    """float64 ``[K, 1 + C]``: of the line's own token, then of these."""


def measure_in_place(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> LogprobParts:
    """Measure tokens ``[K]`` and the ``count`` likeliest beside each, on a device whose host reads nothing meanwhile.

    ``logits`` are ``[K, V]``; lines that are not finite give numbers that mean nothing.
    """
    parts: list[LogprobParts] = []
    for start in range(0, len(token_ids), _LINES_AT_ONCE):
        lines, chosen = logits[start : start + _LINES_AT_ONCE], token_ids[start : start + _LINES_AT_ONCE]
        likeliest = lines.sort(dim=1, descending=True, stable=True).indices[:, :count]
        parts.append(_measure(lines, chosen[:, None], likeliest))
    return LogprobParts(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _measure(logits: torch.Tensor, chosen: torch.Tensor, top_ids: torch.Tensor) -> LogprobParts:
    ranks = (logits > logits.gather(1, chosen)).sum(dim=1) + 1
    # Not by way of logsumexp: its sum is split between threads in a way that depends on the number of lines.
    wanted = logits.double().log_softmax(dim=1).gather(1, torch.cat((chosen, top_ids), dim=1))
    return LogprobParts(ranks, top_ids, wanted.clamp(min=_LOWEST))


def assemble(
    token_ids: Sequence[int],
    counts: Sequence[int],
    ranks: Sequence[int],
    top_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
) -> list[TokenLogprob]:
    """Put together what was measured, each line with its first ``counts`` likeliest tokens."""
    return [
        TokenLogprob(token_id, own, rank, tuple(zip(ids[:count], likeliest[:count], strict=True)))
        for token_id, count, rank, ids, (own, *likeliest) in zip(
            token_ids, counts, ranks, top_ids, logprobs, strict=True
        )
    ]
