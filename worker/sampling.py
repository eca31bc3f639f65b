"""Token ids drawn from logits.

Every row is chosen from its own line of logits and its own ``Draw`` alone. Randomness is a function of (seed, output,
position) and not a generator's state, so what else runs in a step cannot move it, and a sequence that is computed
again draws the same tokens again.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from prefixgate.worker.ranking import leading

GREEDY_BELOW = 0.01
"""Temperatures below this are greedy: dividing logits by less can overflow, and the softmax is one-hot long before."""

CANDIDATES = 1024
"""How many of the likeliest tokens a limited row looks at first. Most need no more, and sorting a whole vocabulary
takes ten times as long. A constant, and not what a batch's rows happen to need, as a row's company must not matter."""

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
    return [bool(finite) for finite in torch.isfinite(logits).all(dim=1).tolist()]


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose one token id for each line of ``[R, V]`` logits.

    Greedy takes the lowest id among equals. Otherwise temperature comes first, then ``top_k``, then ``top_p`` over
    what ``top_k`` left, then ``min_p``; among equal logits lower ids count as more likely. A logit may be -inf, which
    is never chosen. Raises ValueError for a row that leaves nothing to choose.
    """
    vocabulary = logits.shape[1]
    groups: dict[_Choose, list[int]] = {}
    for row, draw in enumerate(draws):
        groups.setdefault(_way(draw, vocabulary), []).append(row)
    chosen = [vocabulary] * len(draws)
    for choose, rows in groups.items():
        lines = logits if len(rows) == len(draws) else logits[rows]
        for row, token_id in zip(rows, choose(lines, [draws[row] for row in rows]).tolist(), strict=True):
            chosen[row] = token_id
    if max(chosen, default=0) >= vocabulary:
        raise ValueError("a row leaves no token to choose")
    return chosen


_Choose = Callable[[torch.Tensor, Sequence[Draw]], torch.Tensor]


def _way(draw: Draw, vocabulary: int) -> _Choose:
    """Tell how a row is chosen: by the cheapest way that can do it, which is the same in any batch."""
    if draw.greedy:
        return _most_likely
    if draw.top_k is not None and draw.top_k < vocabulary:
        return _from_few if draw.top_k <= CANDIDATES else _from_ordered
    return _from_likely if draw.top_p < 1.0 else _from_all


def _most_likely(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return logits.argmax(dim=1)


def _from_all(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Pick by id order, which needs no sorting."""
    return _pick(_probabilities(logits, draws), draws)


def _from_few(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Pick where ``top_k`` leaves few tokens: nothing is computed of the others."""
    return _pick_ordered(*leading(logits, CANDIDATES), draws)


def _from_ordered(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Pick from the whole vocabulary in order of likelihood."""
    return _pick_ordered(*leading(logits, logits.shape[1]), draws)


def _pick_ordered(ordered: torch.Tensor, ids: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Pick from logits that are in order of likelihood, up to where ``top_k`` and ``top_p`` cut them off."""
    size = ordered.shape[1]
    top_k = _column([min(draw.top_k or size, size) for draw in draws], ordered.device)
    rank = torch.arange(size, device=ordered.device)
    probabilities = _probabilities(ordered.masked_fill(rank >= top_k, float("-inf")), draws)
    return ids.gather(1, _pick(_cut(probabilities, draws), draws)[:, None])[:, 0]


def _from_likely(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Pick where ``top_p`` alone limits: from the candidates, where they sum to as much, else from all in order."""
    ids = leading(logits, CANDIDATES)[1]
    probabilities = _probabilities(logits, draws).gather(1, ids)
    picked = ids.gather(1, _pick(_cut(probabilities, draws), draws)[:, None])[:, 0]
    if ids.shape[1] < logits.shape[1]:
        enough = probabilities.cumsum(dim=1)[:, -1].tolist()
        rest = [row for row, draw in enumerate(draws) if enough[row] < draw.top_p]
        if rest:
            picked[rest] = _from_ordered(logits[rest], [draws[row] for row in rest])
    return picked


def _cut(probabilities: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Set to zero what ``top_p`` cuts off of probabilities in falling order. The most likely token always stays."""
    before = probabilities.cumsum(dim=1) - probabilities
    # Rounding can bring a sum of probabilities to 1 early: at 1 nothing is cut.
    top_p = _column([draw.top_p if draw.top_p < 1.0 else float("inf") for draw in draws], probabilities.device)
    cut = before >= top_p
    cut[:, 0] = False
    return probabilities.masked_fill(cut, 0.0)


def _probabilities(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Softmax in float64, where no finite float32 divided by an allowed temperature overflows."""
    temperature = _column([draw.temperature for draw in draws], logits.device)
    return (logits.double() / temperature).softmax(dim=1)


def _pick(weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return per line the first index whose cumulated weight exceeds the draw's share of the whole."""
    if any(draw.min_p for draw in draws):
        least = weights.amax(dim=1, keepdim=True) * _column([draw.min_p for draw in draws], weights.device)
        weights = weights.masked_fill(weights < least, 0.0)
    cumulated = weights.cumsum(dim=1)
    target = cumulated[:, -1:] * _column([draw.uniform for draw in draws], weights.device)
    return torch.searchsorted(cumulated, target, right=True).squeeze(1)


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)
