"""The next tokens of a batch, chosen from logits.

Every row is chosen from its own line of logits and its own ``Draw`` alone. Randomness is a function of (seed, output,
position) and not a generator's state, so what else runs in a step cannot move it, and a sequence that is computed
again draws the same tokens again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

GREEDY_BELOW = 0.01
"""Temperatures below this are greedy: dividing logits by less can overflow, and the softmax is one-hot long before."""

_MASK = (1 << 64) - 1
_UNIFORM_BITS = 48


class Draw(NamedTuple):
    """How one row's token is chosen."""

    temperature: float = 0.0
    top_k: int | None = None
    """At least 1; None or the vocabulary's size and more is no limit."""
    top_p: float = 1.0
    """In (0, 1]."""
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
    return [bool(finite) for finite in torch.isfinite(logits).all(dim=1).tolist()]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose one token id for each line of finite ``[R, V]`` logits.

    Greedy takes the lowest id among equals. Otherwise temperature comes first, then ``top_k``, then ``top_p`` over
    what ``top_k`` left; among equal logits lower ids count as more likely.
    """
    vocabulary = logits.shape[1]
    chosen = [0] * len(draws)
    greedy, plain, limited = [], [], []
    for row, draw in enumerate(draws):
        if draw.greedy:
            greedy.append(row)
        elif draw.top_p < 1.0 or (draw.top_k is not None and draw.top_k < vocabulary):
            limited.append(row)
        else:
            plain.append(row)
    for rows, choose in ((greedy, _most_likely), (plain, _from_all), (limited, _from_likely)):
        if rows:
            lines = logits if len(rows) == len(draws) else logits[rows]
            ids = choose(lines, [draws[row] for row in rows])
            for row, token_id in zip(rows, ids.tolist(), strict=True):
                chosen[row] = int(token_id)
    return chosen


def _most_likely(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return logits.argmax(dim=1)


def _from_all(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Pick by id order, which needs no sorting."""
    return _pick(_probabilities(logits, draws), draws)


def _from_likely(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Pick by order of likelihood, with what the limits cut off set to zero."""
    ordered, ids = logits.sort(dim=1, descending=True, stable=True)
    vocabulary = logits.shape[1]
    top_k = _column([min(draw.top_k or vocabulary, vocabulary) for draw in draws], logits.device)
    rank = torch.arange(vocabulary, device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
    probabilities = _probabilities(ordered, draws)
    before = probabilities.cumsum(dim=1) - probabilities
    # Rounding can bring a sum of probabilities to 1 early: at 1 nothing is cut. The most likely token always stays.
    top_p = _column([draw.top_p if draw.top_p < 1.0 else float("inf") for draw in draws], logits.device)
    cut = (before >= top_p) & (rank > 0)
    picked = _pick(probabilities.masked_fill(cut, 0.0), draws)
    return ids.gather(1, picked.unsqueeze(1)).squeeze(1)


def _probabilities(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Softmax in float64, where no finite float32 divided by an allowed temperature overflows."""
    temperature = _column([draw.temperature for draw in draws], logits.device)
    return (logits.double() / temperature).softmax(dim=1)


def _pick(weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return per line the first index whose cumulated weight exceeds the draw's share of the whole."""
    cumulated = weights.cumsum(dim=1)
    target = cumulated[:, -1:] * _column([draw.uniform for draw in draws], weights.device)
    return torch.searchsorted(cumulated, target, right=True).squeeze(1)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)
