"""Logits in order of likelihood: larger first, and the lower id first among equals.

A library's own top-k does not say which of equal values it takes, and what it takes changes with k, so that a row's
tokens would change with the company that it has in a batch. Here only values are sorted, which tells where a line is
to be cut, and the ids on the right side of the cut are collected after that. On a CPU numpy sorts plain values many
times faster than torch sorts values with their indices: a vocabulary of 49,152 takes 0.2 ms against 5 ms.
"""

import numpy as np
import torch


def likeliest(values: torch.Tensor) -> list[int]:
    """Return the id of the largest value of each line of ``[R, V]``, the lowest of equals."""
    if values.device.type == "cpu":
        # Documented to give the first of equals, which torch's function is not; and ten times as fast.
        return [int(token_id) for token_id in values.numpy().argmax(axis=1)]
    ids = torch.arange(values.shape[1], device=values.device).expand(values.shape)
    is_largest = values == values.amax(dim=1, keepdim=True)
    return [int(token_id) for token_id in ids.where(is_largest, values.shape[1]).amin(dim=1).tolist()]


def descending(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` largest values of each line of ``[R, V]``, ``[R, min(count, V)]``, in falling order."""
    size = values.shape[1]
    count = min(count, size)
    if values.device.type != "cpu":
        return values.topk(count, dim=1).values
    array = values.numpy()
    if 0 < count < size:
        array = np.partition(array, size - count, axis=1)
    return torch.from_numpy(np.sort(array[:, size - count :], axis=1)[:, ::-1].copy())


def leading_ids(values: torch.Tensor, counts: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Return the ids of the ``counts`` (``[R]``, at least 1) largest values of each line of ``[R, V]``, rising.

    ``least`` are the smallest of these values, ``[R]``, as ``descending`` tells them. Returns ``[R, max(counts)]``,
    short lines filled up with V, which is no id.
    """
    lines, ids = (values >= least[:, None]).nonzero(as_tuple=True)
    if len(ids) > counts.sum():
        inside = _inside(lines, values[lines, ids] == least[lines], counts)
        lines, ids = lines[inside], ids[inside]
    found = torch.full((len(values), int(counts.max())), values.shape[1], device=values.device)
    place = torch.arange(len(lines), device=values.device) - (counts.cumsum(0) - counts)[lines]
    found[lines, place] = ids
    return found


def _inside(lines: torch.Tensor, is_least: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Tell which candidates, in order of line and id, stay when each line keeps so many: of the least the first."""
    size = torch.bincount(lines)
    seen = is_least.cumsum(0)
    seen_before_line = (seen - is_least.long())[size.cumsum(0) - size]
    num_larger = size - torch.bincount(lines[is_least])
    return ~is_least | (seen - seen_before_line[lines] <= (counts - num_larger)[lines])


def leading(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest values of each line of finite ``[R, V]`` and their ids, in order of likelihood.

    Both are ``[R, min(count, V)]``.
    """
    found = descending(values, count)
    if not found.numel():
        return found, torch.empty(found.shape, dtype=torch.int64, device=values.device)
    counts = torch.full((len(values),), found.shape[1], device=values.device)
    ids = leading_ids(values, counts, found[:, -1])
    order = values.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return found, ids.gather(1, order)
