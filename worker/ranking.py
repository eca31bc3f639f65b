"""The likeliest tokens of each line of logits, in an order that leaves nothing to chance.

Larger first, and the lower id first among equals. A library's own top-k does not say which of equal values it takes,
and what it takes changes with k, so that a row's tokens would change with the company it has in a batch.
"""

import torch


def leading(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest of each line of ``[R, V]`` and their ids, both ``[R, min(count, V)]``, in order.

    Values may be -inf, which come last and in no particular order, and must not be NaN.
    """
    count = min(count, values.shape[1])
    if count == values.shape[1]:
        return values.sort(dim=1, descending=True, stable=True)
    if count == 0:
        return values[:, :0], torch.empty((len(values), 0), dtype=torch.int64, device=values.device)
    found, ids = values.topk(count, dim=1)
    ids, _ = ids.sort(dim=1)
    found, order = values.gather(1, ids).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    # Where equal values lie on both sides of the cut, those with the lowest ids belong inside.
    last = found[:, -1:]
    cut_among_equals = ((values >= last).sum(dim=1) > count) & (last[:, 0] > float("-inf"))
    for line in cut_among_equals.nonzero()[:, 0].tolist():
        ordered, order = values[line].sort(descending=True, stable=True)
        found[line], ids[line] = ordered[:count], order[:count]
    return found, ids
