"""From settings to a model that is ready to run, with its pool."""

from collections.abc import Callable

import torch

from prefixgate.cache.kv_storage import KVLayout, TorchKVStorage
from prefixgate.config.settings import DEFAULT_POOL_BYTES, CacheSettings, WorkerSettings
from prefixgate.worker.model_runner import ModelRefusedError, ModelRunner
from prefixgate.worker.witness import WitnessModel, witness_layout
from prefixgate.worker.witness_options import parse_witness

Progress = Callable[[str], None]
"""Takes lines that tell a waiting person what is being done."""

_MIN_BLOCKS = 2


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

    return load_pretrained(settings, lambda layout: pool_blocks(cache, layout), progress)


def is_witness(model: str) -> bool:
    """Tell whether ``worker.model`` names the witness model, with or without options."""
    return model == "witness" or model.startswith("witness:")


def poisons(settings: WorkerSettings, cache: CacheSettings) -> bool:
    """Tell whether fresh blocks are to be poisoned. Always with the witness: a slot that nobody wrote must show."""
    return cache.poison or is_witness(settings.model)


def pool_blocks(cache: CacheSettings, layout: KVLayout) -> int:
    """Return the size of the pool in blocks."""
    if cache.blocks is not None:
        return cache.blocks
    memory = DEFAULT_POOL_BYTES if cache.memory is None else cache.memory
    num_blocks = memory // layout.block_bytes
    if num_blocks < _MIN_BLOCKS:
        raise ModelRefusedError(
            f"cache.memory: {memory:,} bytes hold {num_blocks} blocks of {layout.block_bytes:,} bytes; "
            f"at least {_MIN_BLOCKS * layout.block_bytes:,} bytes are needed"
        )
    return num_blocks


def _load_witness(settings: WorkerSettings, cache: CacheSettings) -> WitnessModel:
    if settings.device not in ("auto", "cpu"):
        raise ModelRefusedError(f"worker.device: {settings.device!r}; the witness model runs on the CPU only")
    if settings.dtype != "auto":
        raise ModelRefusedError(f"worker.dtype: {settings.dtype!r}; the witness model's numbers are int64")
    options = parse_witness(settings.model)
    layout = witness_layout()
    storage = TorchKVStorage(pool_blocks(cache, layout), layout)
    return WitnessModel(settings.served_name or "witness", storage, options)
