"""Token ids drawn from logits where the logits are: the device chooses, and the host reads nothing meanwhile.

What ``sampling`` does on the host, with the same outcome, but for rounding: a device sums in an order of its own. There
work is saved by looking at values and gathering what they name; here every tensor has a shape that the host knows, so
what is not to be drawn stays in place with no weight. Lines that are not finite give some id of the vocabulary, which
is for nobody, and leave other lines alone.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from prefixgate.worker.sampling import FEW, Draw
from prefixgate.worker.transfers import upload

_TINIEST = math.ulp(0.0)


class _Columns(NamedTuple):
    """The draws of some rows, float64 ``[R, 1]`` each, on the device."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor


def sample_in_place(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Choose one token id for each line of ``[R, V]`` logits, int64 ``[R]``; as ``sampling.sample`` does."""
    groups: dict[_Choose, list[int]] = {}
    for row, draw in enumerate(draws):
        groups.setdefault(_way(draw, logits.shape[1]), []).append(row)
    if len(groups) == 1:
        (choose,) = groups
        chosen = choose(logits, draws)
    else:
        chosen = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        for choose, rows in groups.items():
            lines = upload(np.array(rows), logits.device)
            chosen.index_copy_(0, lines, choose(logits.index_select(0, lines), [draws[row] for row in rows]))
    # A line that is not finite can name the id after the last one, at which an embedding would fault.
    return chosen.clamp(max=logits.shape[1] - 1)


def finite_lines(logits: torch.Tensor) -> torch.Tensor:
    """Tell for each line of ``[R, V]`` logits whether all of it is finite, bool ``[R]``."""
    return (logits.amax(dim=1) < math.inf) & (logits.amin(dim=1) > -math.inf)


_Choose = Callable[[torch.Tensor, Sequence[Draw]], torch.Tensor]


def _way(draw: Draw, vocabulary: int) -> _Choose:
    if draw.greedy:
        return _most_likely
    if draw.top_k is not None and draw.top_k < vocabulary:
        return _from_few if draw.top_k <= FEW else _from_likely
    return _from_likely if draw.top_p < 1.0 else _from_all


def _most_likely(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    # Not argmax, which does not say which of equals it takes.
    ids = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape)
    return ids.where(logits == logits.amax(dim=1, keepdim=True), logits.shape[1]).amin(dim=1)


def _from_all(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    columns = _columns(draws, logits)
    weights = _weights(logits, logits.amax(dim=1, keepdim=True), columns)
    if any(draw.min_p for draw in draws):
        weights.masked_fill_(weights < columns.min_p, 0.0)
    return _pick(weights, columns)


def _from_few(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return _draw_leading(logits, logits.topk(min(FEW, logits.shape[1]), dim=1).values, _columns(draws, logits))


def _from_likely(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return _draw_leading(logits, logits.sort(dim=1, descending=True).values, _columns(draws, logits))


def _draw_leading(logits: torch.Tensor, ordered: torch.Tensor, columns: _Columns) -> torch.Tensor:
    """Draw from the tokens that the limits leave, as the logits in falling order ``[R, N]`` tell."""
    counts = _num_left(ordered, columns)
    least = ordered.gather(1, counts - 1)
    larger, equal = logits > least, logits == least
    # Of those that equal the last one let in, the lowest ids.
    room = counts - larger.sum(dim=1, keepdim=True)
    inside = larger | (equal & (equal.cumsum(dim=1) <= room))
    return _pick(_weights(logits, ordered[:, :1], columns).masked_fill_(~inside, 0.0), columns)


def _num_left(ordered: torch.Tensor, columns: _Columns) -> torch.Tensor:
    """Count what ``top_k``, ``top_p`` and ``min_p`` leave of logits in falling order, int64 ``[R, 1]``, at least 1."""
    weights = _weights(ordered, ordered[:, :1], columns)
    top_k = columns.top_k.clamp(max=ordered.shape[1]).long()
    cumulated = weights.cumsum(dim=1)
    by_top_p = torch.searchsorted(cumulated, cumulated.gather(1, top_k - 1) * columns.top_p) + 1
    least = columns.min_p.clamp(min=_TINIEST)
    by_min_p = torch.searchsorted(weights.neg_(), -least, right=True)
    # At least 1 whatever a line holds: of one that is not finite nothing may be left.
    return torch.minimum(torch.minimum(by_top_p, by_min_p), top_k).clamp(min=1)


def _weights(logits: torch.Tensor, highest: torch.Tensor, columns: _Columns) -> torch.Tensor:
    return logits.to(torch.float64, copy=True).sub_(highest).div_(columns.temperature).exp_()


def _pick(weights: torch.Tensor, columns: _Columns) -> torch.Tensor:
    cumulated = weights.cumsum(dim=1)
    return torch.searchsorted(cumulated, cumulated[:, -1:] * columns.uniform, right=True)[:, 0]


def _columns(draws: Sequence[Draw], logits: torch.Tensor) -> _Columns:
    vocabulary = logits.shape[1]
    values = [
        (
            draw.temperature,
            min(draw.top_k or vocabulary, vocabulary),
            # Rounding can bring a sum to the whole early: at 1 nothing is cut.
            draw.top_p if draw.top_p < 1.0 else math.inf,
            draw.min_p,
            draw.uniform,
        )
        for draw in draws
    ]
    return _Columns(*upload(np.array(values, dtype=np.float64).T.copy(), logits.device)[:, :, None])
