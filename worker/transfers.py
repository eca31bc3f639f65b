"""Numbers on their way between host and device, such that neither waits for the other before it has to.

A copy to a CUDA device from ordinary memory waits for all that its stream has to do, and so does any question to a
tensor: ``item``, ``tolist``, ``bool``, an index whose length depends on values. What a step needs on the device goes
up through ``upload``, and what the host needs of it comes down in one ``Readback``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array's numbers on a device, in the device's own time; on the CPU they are the array's own."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host.to(device)
    # Pinned memory comes from a cache of torch's that keeps it until the copy has run.
    return host.pin_memory().to(device, non_blocking=True)


def refill(target: torch.Tensor, values: npt.NDArray[Any]) -> None:
    """Overwrite a tensor with an array's numbers, in the device's own time."""
    host = torch.from_numpy(values)
    target.copy_(host.pin_memory() if target.device.type == "cuda" else host, non_blocking=True)


class Readback:
    """Several tensors on their way to the host, packed into one copy."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        """Put the copy behind what computes the parts: integers, booleans and float64 of any shape, on one device."""
        self._shapes = [(part.shape, part.dtype) for part in parts]
        packed = torch.cat([_as_words(part) for part in parts])
        self._done: torch.cuda.Event | None = None
        if packed.device.type == "cuda":
            self._words = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True)
            self._words.copy_(packed, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(packed.device))
        else:
            self._words = packed.cpu()

    def wait(self) -> list[npt.NDArray[Any]]:
        """Return the parts once they have come, as int64, bool and float64 arrays of their shapes."""
        if self._done is not None:
            self._done.synchronize()
        words = self._words.numpy()
        parts: list[npt.NDArray[Any]] = []
        start = 0
        for shape, dtype in self._shapes:
            part = words[start : start + shape.numel()].reshape(tuple(shape))
            start += shape.numel()
            if dtype == torch.float64:
                part = part.view(np.float64)
            parts.append(part != 0 if dtype == torch.bool else part)
        return parts


def _as_words(part: torch.Tensor) -> torch.Tensor:
    if part.dtype == torch.float64:
        part = part.contiguous().view(torch.int64)
    return part.reshape(-1).to(torch.int64)
