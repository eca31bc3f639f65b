"""From ``worker.model`` to a pretrained model that passed its probe, with its pool on its device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from prefixgate.cache.kv_storage import KVLayout
from prefixgate.config.settings import WorkerSettings
from prefixgate.worker import embedded
from prefixgate.worker.attention import AttentionBackend
from prefixgate.worker.attention_check import check_attention
from prefixgate.worker.attention_choice import attention_makers, choose_attention
from prefixgate.worker.conversion import cache_folder, converted_folder
from prefixgate.worker.device_memory import DeviceMemory, memory_of
from prefixgate.worker.file_digests import FileDigests
from prefixgate.worker.graph_check import check_graphs
from prefixgate.worker.largest_step import SCRATCH_BLOCKS, measure_room, run_largest_step
from prefixgate.worker.limits import Limits
from prefixgate.worker.model_folder import eos_ids, load_model, load_text, model_fingerprint
from prefixgate.worker.model_runner import ModelRefusedError, ModelSpec
from prefixgate.worker.pool_size import Room
from prefixgate.worker.pool_storage import storage_on
from prefixgate.worker.probe import probe, probe_ids, refuse_moving_rope, stock_logits, survey
from prefixgate.worker.transformers_runner import TransformersRunner, recorder_for

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_pretrained(
    settings: WorkerSettings,
    pool_blocks: Callable[[KVLayout, Room | None], int],
    progress: Callable[[str], None],
    cache: Path | None = None,
    memory_of: Callable[[torch.device], DeviceMemory | None] = memory_of,
) -> TransformersRunner:
    """Load the model that the settings name, compare it with itself, and allocate its pool.

    ``pool_blocks`` sizes the pool for a layout and the room that the device has left; None where ``memory_of`` does not
    tell, as on a CPU.
    ``cache`` is where downloads and conversions are kept; the default is the user's cache folder. Raises
    ModelRefusedError with the reason.
    """
    transformers_logging.disable_progress_bar()  # ours tell the same in lines
    cache = cache or cache_folder()
    digests = FileDigests(cache / "digests")
    name, folder = _find(settings.model, cache, digests, progress)
    device = _device(settings.device)
    allocate = storage_on(device, cache)
    progress(f"loading {name} from {folder}")
    model = load_model(folder, device, _dtype(settings.dtype, device))
    refuse_moving_rope(model.config.get_text_config())
    token_ids = probe_ids(_vocabulary_size(model), _context_length(model))
    expected = stock_logits(model, token_ids)
    shape = survey(model)
    layout = shape.layout
    spec = ModelSpec(
        name=settings.served_name or name,
        fingerprint=model_fingerprint(folder, layout.dtype, digests),
        vocabulary_size=expected.shape[1],
        eos_ids=eos_ids(model),
        context_length=_context_length(model),
        kv_layout=layout,
        text=load_text(folder),
        device=str(device),
    )

    def prove(backend: AttentionBackend) -> None:
        check_attention(backend, shape, device)
        probe(model, spec, expected, backend)

    choice = choose_attention(settings.attention, attention_makers(cache, progress), shape, device, prove)
    progress(str(choice))
    spec = replace(spec, attention=choice.name)
    room, memory = None, memory_of(device)
    if memory is not None:
        scratch = TransformersRunner(model, spec, allocate(SCRATCH_BLOCKS, layout), choice.backend)
        limits = Limits(settings.max_batch_tokens, settings.max_running, settings.max_waiting)
        room = measure_room(lambda: run_largest_step(scratch.forward, limits, spec), memory)
    blocks = pool_blocks(layout, room)
    storage = allocate(blocks, layout)
    record = recorder_for(storage, choice.backend) if settings.cuda_graphs else None
    runner = TransformersRunner(model, spec, storage, choice.backend, record=record)
    if device.type == "cuda":
        progress(check_graphs(runner))
    progress(
        f"{spec.name} is ready on {device}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters, "
        f"{blocks:,} blocks of {layout.block_bytes / 1024:.0f} KiB for {blocks * layout.block_size:,} tokens"
    )
    return runner


def _find(model: str, cache: Path, digests: FileDigests, progress: Callable[[str], None]) -> tuple[str, Path]:
    """Return the model's own name and its folder."""
    if model == embedded.NAME:
        return model, embedded.embedded_folder(cache, progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name, path
    if path.is_file() and path.suffix == ".gguf":
        return path.stem, converted_folder(path.stem, digests.sha256(path), lambda _: path, cache, progress)
    raise ModelRefusedError(
        f"worker.model: {model!r} is neither {embedded.NAME!r} nor 'witness', and no folder or .gguf file has that name"
    )


def _device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    kind, _, index = name.partition(":")  # torch.device keeps an index in a byte: there "cuda:256" is "cuda:0"
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ModelRefusedError(f"worker.device: {name!r}, but there are {torch.cuda.device_count()} CUDA devices")
    # With its number: torch takes "cuda" and "cuda:0" for two devices.
    return torch.device("cuda", int(index or 0))


def _dtype(name: str, device: torch.device) -> torch.dtype | None:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    return _DTYPES[name]


def _vocabulary_size(model: Any) -> int:
    size: int = model.config.get_text_config().vocab_size
    return size


def _context_length(model: Any) -> int:
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise ModelRefusedError("its configuration does not say how long a context may be (max_position_embeddings)")
    return length
