"""The attention backends that this machine can run."""

import pytest
import torch

from prefixgate.worker.attention import AttentionBackend
from prefixgate.worker.conversion import cache_folder
from prefixgate.worker.cpu_attention import cpu_attention
from prefixgate.worker.native_library import NativeUnavailableError
from prefixgate.worker.sdpa_attention import SdpaBackend

NAMES = ("torch", "compiled")


def make_backend(name: str, dtype: torch.dtype = torch.float32) -> AttentionBackend:
    """Make a backend; the compiled one is kept where a worker keeps it. Skips the test where it cannot be had."""
    if name == "torch":
        return SdpaBackend()
    try:
        return cpu_attention(dtype, cache_folder(), lambda line: None)
    except NativeUnavailableError as error:
        pytest.skip(str(error))
