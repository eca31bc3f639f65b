"""A model on disk as the Hugging Face libraries keep it: configuration, safetensors weights, tokenizer, template."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from prefixgate.worker.file_digests import FileDigests
from prefixgate.worker.model_runner import ModelRefusedError, TextAssets


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a model, in order of their names."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelRefusedError(f"{folder}: no *.safetensors file; weights in other formats are not loaded")
    return files


def load_model(folder: Path, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Load a causal language model for inference; None keeps the number format of its files."""
    weight_files(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype or "auto", local_files_only=True, use_safetensors=True
        )
        return model.to(device).eval()
    except Exception as error:  # files can be wrong in any way, and the library raises whatever it then meets
        raise ModelRefusedError(f"{folder}: the model cannot be loaded: {error}") from error


def eos_ids(model: Any) -> tuple[int, ...]:
    """Return all ids that end an output: the generation settings', or else the configuration's."""
    for config in (model.generation_config, model.config.get_text_config()):
        given = getattr(config, "eos_token_id", None)
        if given is not None:
            return (given,) if isinstance(given, int) else tuple(given)
    return ()


def load_text(folder: Path) -> TextAssets:
    """Load tokenizer and chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        raise ModelRefusedError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ModelRefusedError(f"{folder}: its tokenizer cannot be written as a tokenizer.json")
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):  # several by name
        template = template.get("default", "")
    texts = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return TextAssets(tokenizer.backend_tokenizer.to_str().encode(), template, texts)


def model_fingerprint(folder: Path, kv_dtype: torch.dtype, digests: FileDigests) -> str:
    """Digest everything on disk that decides what keys and values are, and the format they are kept in."""
    digest = hashlib.sha256(f"prefixgate model 1\n{kv_dtype}\n".encode())
    for file in [folder / "config.json", *weight_files(folder)]:
        digest.update(f"{digests.sha256(file)}\n".encode())
    return digest.hexdigest()
