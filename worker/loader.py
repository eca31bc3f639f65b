"""From settings to a model that is ready to run, with its pool."""

from collections.abc import Callable

import torch

from prefixgate.cache.kv_storage import TorchKVStorage
from prefixgate.config.cache_settings import CacheSettings
from prefixgate.config.settings import WorkerSettings
from prefixgate.worker.model_runner import ModelRefusedError, ModelRunner
from prefixgate.worker.pool_size import pool_blocks
from prefixgate.worker.witness import WitnessModel, witness_layout
from prefixgate.worker.witness_options import parse_witness

Progress = Callable[[str], None]
"""Takes lines that tell a waiting person what is being done."""


def load_runner(settings: WorkerSettings, cache: CacheSettings, progress: Progress) -> ModelRunner:
    """Load the model that the settings name, and allocate its pool.

    Raises ModelRefusedError where the model cannot be served, with the reason.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if is_witness(settings.model):
        return _load_witness(settings, cache)
    # Here and not above: the library takes seconds to import, and the witness needs nothing of it.
    from prefixgate.worker.pretrained import load_pretrained

    return load_pretrained(settings, lambda layout, room: pool_blocks(cache, layout, room), progress)


def is_witness(model: str) -> bool:
    """Tell whether ``worker.model`` names the witness model, with or without options."""
    return model == "witness" or model.startswith("witness:")


def poisons(settings: WorkerSettings, cache: CacheSettings) -> bool:
    """Tell whether fresh blocks are to be poisoned. Always with the witness: a slot that nobody wrote must show."""
    return cache.poison or is_witness(settings.model)


def _load_witness(settings: WorkerSettings, cache: CacheSettings) -> WitnessModel:
    if settings.device not in ("auto", "cpu"):
        raise ModelRefusedError(f"worker.device: {settings.device!r}; the witness model runs on the CPU only")
    if settings.dtype != "auto":
        raise ModelRefusedError(f"worker.dtype: {settings.dtype!r}; the witness model's numbers are int64")
    if settings.attention != "auto":
        raise ModelRefusedError(f"worker.attention: {settings.attention!r}; the witness model has no attention")
    options = parse_witness(settings.model)
    layout = witness_layout()
    storage = TorchKVStorage(pool_blocks(cache, layout), layout)
    return WitnessModel(settings.served_name or "witness", storage, options)
