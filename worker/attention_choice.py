"""Which backend computes attention: the first that works for a model on its device, and why not those before it.

A backend that says it can serve is believed only after it was proven: kernels are compiled for some devices and not
for others, and that shows when they run.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from prefixgate.worker.attention import AttentionBackend, AttentionShape, AttentionUnavailableError
from prefixgate.worker.cpu_attention import cpu_attention
from prefixgate.worker.flash_attention import flash_attention
from prefixgate.worker.model_runner import ModelRefusedError
from prefixgate.worker.native_library import NativeUnavailableError
from prefixgate.worker.sdpa_attention import SdpaBackend
from prefixgate.worker.triton_attention import triton_attention

logger = logging.getLogger(__name__)

AUTO = "auto"

Maker = Callable[[AttentionShape, torch.device], AttentionBackend]
"""Makes a backend for a model's layers on a device. Raises AttentionUnavailableError with the reason why it cannot."""


class AttentionChoice(NamedTuple):
    """The backend that was chosen, and those that were not."""

    name: str
    backend: AttentionBackend
    rejected: Mapping[str, str]
    """Backends that would have been preferred, each with the reason against it."""

    def __str__(self) -> str:
        reasons = "".join(f"; not {name}: {reason}" for name, reason in self.rejected.items())
        return f"attention by {self.name}{reasons}"


def attention_makers(cache: Path, progress: Callable[[str], None]) -> dict[str, Maker]:
    """Return all backends by the names that ``worker.attention`` has for them, the preferred ones first."""

    def compiled(shape: AttentionShape, device: torch.device) -> AttentionBackend:
        if device.type != "cpu":
            raise AttentionUnavailableError(f"it runs on a CPU, and the model on {device}")
        try:
            return cpu_attention(shape.layout.dtype, cache, progress)
        except NativeUnavailableError as error:
            raise AttentionUnavailableError(str(error)) from error

    def paged(shape: AttentionShape, device: torch.device) -> AttentionBackend:
        backend = triton_attention(shape, device)
        progress("compiling attention, or taking what is compiled already")
        # Its own choice is the home folder, where a service may have none that it can write to.
        os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
        backend.prepare(shape, device)
        return backend

    return {
        "vllm_flash_attn": flash_attention,
        "triton": paged,
        "cpu": compiled,
        "sdpa": lambda shape, device: SdpaBackend(),
    }


def choose_attention(
    wanted: str,
    makers: Mapping[str, Maker],
    shape: AttentionShape,
    device: torch.device,
    prove: Callable[[AttentionBackend], None],
) -> AttentionChoice:
    """Return the backend that ``worker.attention`` names, or with "auto" the first that works.

    ``prove`` runs a backend, alone and under the model, and raises where it is wrong. Raises ModelRefusedError where
    the one that is named does not work, or with "auto" none does.
    """
    if wanted != AUTO:
        try:
            backend = makers[wanted](shape, device)
            prove(backend)
        except ModelRefusedError as error:
            raise ModelRefusedError(f"with worker.attention {wanted!r}: {error}") from error
        except Exception as error:  # whatever a kernel that does not fit the device raises
            raise ModelRefusedError(
                f"worker.attention: {wanted!r} cannot serve this model on {device}: {_reason(error)}"
            ) from error
        return AttentionChoice(wanted, backend, {})
    rejected: dict[str, str] = {}
    last = list(makers)[-1]
    for name, make in makers.items():
        try:
            backend = make(shape, device)
            prove(backend)
        except Exception as error:  # as above
            if name == last:
                raise
            rejected[name] = _reason(error)
            if not isinstance(error, AttentionUnavailableError | ModelRefusedError):
                logger.warning("Attention by %s failed when it was tried", name, exc_info=error)
        else:
            return AttentionChoice(name, backend, rejected)
    raise AssertionError("the last one was either returned or raised")


def _reason(error: Exception) -> str:
    if isinstance(error, AttentionUnavailableError | ModelRefusedError):
        return str(error)
    return f"{type(error).__name__}: {error}"
