"""Which backend computes attention: the first that works for a model on its device, and why not those before it.

A backend that says it can serve is believed only after the probe: kernels are compiled for some devices and not for
others, and that shows when they run.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from prefixgate.worker.attention import AttentionBackend, AttentionShape, AttentionUnavailableError
from prefixgate.worker.cpu_attention import cpu_attention
from prefixgate.worker.model_runner import ModelRefusedError
from prefixgate.worker.native_library import NativeUnavailableError
from prefixgate.worker.sdpa_attention import SdpaBackend

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

    return {"cpu": compiled, "sdpa": lambda shape, device: SdpaBackend()}


def choose_attention(
    wanted: str,
    makers: Mapping[str, Maker],
    shape: AttentionShape,
    device: torch.device,
    prove: Callable[[AttentionBackend], None],
) -> AttentionChoice:
    """Return the backend that ``worker.attention`` names, or with "auto" the first that works.

    ``prove`` runs the model over a backend and raises where it does not give the model's own logits. Raises
    ModelRefusedError where the one that is named does not work, or with "auto" none does.
    """
    if wanted != AUTO:
        try:
            backend = makers[wanted](shape, device)
        except AttentionUnavailableError as error:
            raise ModelRefusedError(f"worker.attention: {wanted!r} cannot serve this model here: {error}") from error
        prove(backend)
        return AttentionChoice(wanted, backend, {})
    rejected: dict[str, str] = {}
    *_, last = makers
    for name, make in makers.items():
        try:
            backend = make(shape, device)
            prove(backend)
        except AttentionUnavailableError as error:
            rejected[name] = str(error)
        except Exception as error:  # whatever a kernel that does not fit the device raises
            if name == last:
                raise
            logger.warning("Attention by %s failed its probe", name, exc_info=not isinstance(error, ModelRefusedError))
            rejected[name] = str(error) if isinstance(error, ModelRefusedError) else f"{type(error).__name__}: {error}"
        else:
            return AttentionChoice(name, backend, rejected)
    raise ModelRefusedError(f"no attention backend can serve this model on {device}: {rejected}")
