"""From ``worker.model`` to a pretrained model that passed its probe, with its pool on its device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from prefixgate.cache.kv_storage import KVLayout, TorchKVStorage
from prefixgate.config.settings import WorkerSettings
from prefixgate.worker import embedded
from prefixgate.worker.attention import AttentionBackend
from prefixgate.worker.conversion import cache_folder, converted_folder
from prefixgate.worker.cpu_attention import cpu_attention
from prefixgate.worker.file_digests import FileDigests
from prefixgate.worker.model_folder import eos_ids, load_model, load_text, model_fingerprint
from prefixgate.worker.model_runner import ModelRefusedError, ModelSpec
from prefixgate.worker.native_library import NativeUnavailableError
from prefixgate.worker.probe import probe, probe_ids, refuse_moving_rope, stock_logits, survey
from prefixgate.worker.sdpa_attention import SdpaBackend
from prefixgate.worker.transformers_runner import TransformersRunner

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_pretrained(
    settings: WorkerSettings,
    pool_blocks: Callable[[KVLayout], int],
    progress: Callable[[str], None],
    cache: Path | None = None,
) -> TransformersRunner:
    """Load the model that the settings name, compare it with itself, and allocate its pool.

    ``cache`` is where downloads and conversions are kept; the default is the user's cache folder. Raises
    ModelRefusedError with the reason.
    """
    transformers_logging.disable_progress_bar()  # ours tell the same in lines
    cache = cache or cache_folder()
    digests = FileDigests(cache / "digests")
    name, folder = _find(settings.model, cache, digests, progress)
    device = _device(settings.device)
    progress(f"loading {name} from {folder}")
    model = load_model(folder, device, _dtype(settings.dtype, device))
    refuse_moving_rope(model.config.get_text_config())
    token_ids = probe_ids(_vocabulary_size(model), _context_length(model))
    expected = stock_logits(model, token_ids)
    layout = survey(model)
    spec = ModelSpec(
        name=settings.served_name or name,
        fingerprint=model_fingerprint(folder, layout.dtype, digests),
        vocabulary_size=expected.shape[1],
        eos_ids=eos_ids(model),
        context_length=_context_length(model),
        kv_layout=layout,
        text=load_text(folder),
    )
    backend = _backend(device, layout.dtype, cache, progress)
    probe(model, spec, expected, backend)
    blocks = pool_blocks(layout)
    runner = TransformersRunner(model, spec, TorchKVStorage(blocks, layout, device=device), backend)
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
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")  # torch.device keeps an index in a byte: there "cuda:256" is "cuda:0"
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ModelRefusedError(f"worker.device: {name!r}, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)


def _backend(
    device: torch.device, dtype: torch.dtype, cache: Path, progress: Callable[[str], None]
) -> AttentionBackend:
    """Return the fastest attention there is for a device and a number format."""
    if device.type != "cpu":
        return SdpaBackend()
    try:
        return cpu_attention(dtype, cache, progress)
    except NativeUnavailableError as error:
        progress(
            f"attention runs on torch alone, which is slower, since the compiled operator is not to be had: {error}"
        )
        return SdpaBackend()


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
