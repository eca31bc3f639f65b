"""GGUF files become model folders, once: the result is kept in the cache folder and found there by later starts."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefixgate.worker.file_lock import locked
from prefixgate.worker.model_runner import ModelRefusedError

_VERSION = f"2.{transformers.__version__.partition('.')[0]}"
"""Part of the folders' names. The first number is raised when what is written changes; the second is the library's,
whose older generation does not read what the newer one wrote."""


def converted_folder(
    name: str, sha256: str, fetch: Callable[[Path], Path], cache: Path, progress: Callable[[str], None]
) -> Path:
    """Return the folder made from the GGUF file with this digest, making it where it is not there yet.

    ``fetch`` is called with a scratch folder and returns the file's path. Processes that start together make it once:
    one works, the others wait. What is there under its name is complete, since it was renamed when it was.
    """
    target = cache / "models" / f"{name}-{sha256[:16]}-{_VERSION}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_suffix(".lock"), progress):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=target.parent, prefix="unfinished-") as scratch:
                gguf = fetch(Path(scratch))
                progress(f"converting {gguf.name} ({_megabytes(gguf)}) to safetensors")
                made = Path(scratch, "model")
                convert(gguf, made)
                made.rename(target)
                progress(f"converted: {target} ({_megabytes(target / 'model.safetensors')})")
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a model folder in float32, which holds every quantized weight exactly."""
    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        use_plain_decoder(tokenizer.backend_tokenizer)
    except Exception as error:  # a file can be wrong in any way, and the library raises whatever it then meets
        raise ModelRefusedError(f"{gguf}: the file cannot be converted: {error}") from error
    folder.mkdir()
    # Not the library's own save_pretrained: it refuses any model that came from a quantized file, unpacked or not.
    save_file(_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def use_plain_decoder(tokenizer: Tokenizer) -> None:
    """Leave a byte-level tokenizer the one decoder that it needs.

    transformers 4 puts others before it, of vocabularies that spell bytes and spaces in another way. They change no
    token of a byte-level one, and a gateway does not serve them, since what they give can hang on what stands before.
    """
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    if any(part["type"] == "ByteLevel" for part in decoder.get("decoders", ())):
        tokenizer.decoder = ByteLevel()


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's weights, each once: of two names for one tensor the one that every release looks for."""
    weights: dict[str, torch.Tensor] = model.state_dict()
    tied = set(model._tied_weights_keys or ())
    there = {weight.data_ptr() for name, weight in weights.items() if name not in tied}
    return {
        name: weight.contiguous()
        for name, weight in weights.items()
        if name not in tied or weight.data_ptr() not in there
    }


def _megabytes(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.0f} MB"


def cache_folder() -> Path:
    """Return where downloads and conversions are kept: ``$PREFIXGATE_CACHE_DIR``, or ``~/.cache/prefixgate``."""
    return Path(os.environ.get("PREFIXGATE_CACHE_DIR") or Path.home() / ".cache" / "prefixgate")
