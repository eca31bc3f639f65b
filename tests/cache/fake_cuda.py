"""What the CUDA storage uses of torch's CUDA side, where no device is there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch


@dataclass
class FakeCuda:
    """Stands in for what the storage uses of ``torch.cuda``, and notes what it was asked for."""

    stream: int = 77
    current: torch.device | None = None
    uploads: list[tuple[torch.device, bool]] = field(default_factory=list)
    """Device and ``non_blocking`` of each transfer from pinned memory."""

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.current = device
        yield
        self.current = None

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        assert device == self.current
        return SimpleNamespace(cuda_stream=self.stream)

    def pin_memory(self, tensor: torch.Tensor) -> "PinnedTensor":
        assert self.current is not None
        return PinnedTensor(self, tensor)

    @classmethod
    def put_in_place(cls, monkeypatch: pytest.MonkeyPatch) -> "FakeCuda":
        """Have torch use it until the test is over."""
        fake = cls()
        monkeypatch.setattr(torch.cuda, "device", fake.device)
        monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: fake.pin_memory(tensor))
        return fake


@dataclass
class PinnedTensor:
    """A tensor in pinned memory: it can only be sent to the device."""

    cuda: FakeCuda
    tensor: torch.Tensor

    def to(self, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        self.cuda.uploads.append((device, non_blocking))
        return self.tensor.clone()
