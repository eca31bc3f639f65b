"""Token ids drawn from logits.

Every row is chosen from its own line of logits and its own ``Draw`` alone. Randomness is a function of (seed, output,
position) and not a generator's state, so what else runs in a step cannot move it, and a sequence that is computed
again draws the same tokens again.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from prefixgate.worker.ranking import descending, leading_ids, likeliest

GREEDY_BELOW = 0.01
"""Temperatures below this are greedy: dividing logits by less can overflow, and the softmax is one-hot long before."""

FEW = 1024
"""Up to this ``top_k`` only so many of the likeliest logits are put in order. A constant, and not what the rows of a
batch happen to need, as a row's company must not matter."""

_TINIEST = math.ulp(0.0)
_MASK = (1 << 64) - 1
_UNIFORM_BITS = 48


class Draw(NamedTuple):
    """How one row's token is chosen."""

    temperature: float = 0.0
    top_k: int | None = None
    """At least 1; None or the vocabulary's size and more is no limit."""
    top_p: float = 1.0
    """In (0, 1]."""
    min_p: float = 0.0
    """In [0, 1]; 0 is no limit."""
    uniform: float = 0.0
    """In [0, 1): where in the distribution the token is picked."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, whatever the other fields say."""
        return self.temperature < GREEDY_BELOW


def uniform(seed: int, output: int, position: int) -> float:
    """Return the number in [0, 1) that output ``output`` of a call draws its ``position``-th token with.

    The seed is any integer; it counts modulo 2**64.
    """
    state = 0
    for part in (seed, output, position):
        state = _mix((state ^ part) & _MASK)
    # 48 bits: the product with a float64 sum of probabilities then stays below that sum whatever the rounding.
    return (state >> (64 - _UNIFORM_BITS)) / (1 << _UNIFORM_BITS)


def _mix(value: int) -> int:
    """Scramble 64 bits: one step of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """Tell for each line of ``[R, V]`` logits whether all of it is finite."""
    # NaN is passed on by both, and no comparison with it holds. Ten times as fast as asking of each logit.
    finite = (logits.amax(dim=1) < math.inf) & (logits.amin(dim=1) > -math.inf)
    return [bool(is_finite) for is_finite in finite.tolist()]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose one token id for each line of ``[R, V]`` logits, of which any but not all may be -inf: never chosen.

    Greedy takes the lowest id among equals. Otherwise temperature comes first, then ``top_k``, then ``top_p`` over
    what ``top_k`` left, then ``min_p``; among equal logits lower ids count as more likely.
    """
    vocabulary = logits.shape[1]
    groups: dict[_Choose, list[int]] = {}
    for row, draw in enumerate(draws):
        groups.setdefault(_way(draw, vocabulary), []).append(row)
    chosen = [0] * len(draws)
    for choose, rows in groups.items():
        lines = logits if len(rows) == len(draws) else logits[rows]
        for row, token_id in zip(rows, choose(lines, [draws[row] for row in rows]), strict=True):
            chosen[row] = token_id
    return chosen


_Choose = Callable[[torch.Tensor, Sequence[Draw]], list[int]]


def _way(draw: Draw, vocabulary: int) -> _Choose:
    """Tell how a row is chosen: by the cheapest way that can do it, which is the same in any batch."""
    if draw.greedy:
        return _most_likely
    if draw.top_k is not None and draw.top_k < vocabulary:
        return _from_few if draw.top_k <= FEW else _from_likely
    return _from_likely if draw.top_p < 1.0 else _from_all


def _most_likely(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    return likeliest(logits)


def _from_all(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw from the whole vocabulary, which needs no order."""
    weights = _weights(logits, logits.amax(dim=1, keepdim=True), draws)
    if any(draw.min_p for draw in draws):
        # The largest weight is 1.
        weights.masked_fill_(weights < _column([draw.min_p for draw in draws], weights.device), 0.0)
    return _pick(weights, draws).tolist()


def _from_few(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw where ``top_k`` leaves few tokens: nothing is computed of the others."""
    return _draw_leading(logits, descending(logits, FEW), draws)


def _from_likely(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw from the likeliest tokens, however many they are."""
    return _draw_leading(logits, descending(logits, logits.shape[1]), draws)


def _draw_leading(logits: torch.Tensor, ordered: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw from the tokens that the limits leave, as the logits in falling order ``[R, N]`` tell."""
    counts = _num_left(ordered, draws)
    least = ordered.gather(1, counts[:, None] - 1)[:, 0]
    ids = leading_ids(logits, counts, least)
    # Short lines are filled up with an id of no weight: of the vocabulary's size, where there is one logit more.
    padded = torch.nn.functional.pad(logits, (0, 1), value=-math.inf).gather(1, ids)
    picked = _pick(_weights(padded, ordered[:, :1], draws), draws)
    return ids.gather(1, picked[:, None])[:, 0].tolist()


def _num_left(ordered: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Count what ``top_k``, ``top_p`` and ``min_p`` leave of logits in falling order: each cuts off an end."""
    size, device = ordered.shape[1], ordered.device
    weights = _weights(ordered, ordered[:, :1], draws)
    top_k = torch.tensor([[min(draw.top_k or size, size)] for draw in draws], device=device)
    cumulated = weights.cumsum(dim=1)
    # Rounding can bring a sum to the whole early: at 1 nothing is cut.
    top_p = _column([draw.top_p if draw.top_p < 1.0 else math.inf for draw in draws], device)
    by_top_p = torch.searchsorted(cumulated, cumulated.gather(1, top_k - 1) * top_p) + 1
    # Nor is anything left that has no likelihood at all.
    least = _column([max(draw.min_p, _TINIEST) for draw in draws], device)
    by_min_p = torch.searchsorted(weights.neg_(), -least, right=True)
    return torch.minimum(torch.minimum(by_top_p, by_min_p), top_k)[:, 0]


def _weights(logits: torch.Tensor, highest: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return the tokens' likelihoods beside that of the likeliest, ``exp((logit - highest) / temperature)``.

    In float64, where no finite float32 divided by an allowed temperature overflows.
    """
    temperature = _column([draw.temperature for draw in draws], logits.device)
    return logits.to(torch.float64, copy=True).sub_(highest).div_(temperature).exp_()


def _pick(weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return per line the first index whose cumulated weight exceeds the draw's share of the whole."""
    cumulated = weights.cumsum(dim=1)
    target = cumulated[:, -1:] * _column([draw.uniform for draw in draws], weights.device)
    return torch.searchsorted(cumulated, target, right=True).squeeze(1)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)
