"""Small random models of the Hugging Face library, and how to run them over a pool."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from prefixgate.cache.hashing import CacheScope
from prefixgate.cache.kv_storage import TorchKVStorage
from prefixgate.worker.model_runner import ModelSpec, Row, TextAssets
from prefixgate.worker.probe import survey
from prefixgate.worker.transformers_runner import TransformersRunner

VOCABULARY = 99
CONTEXT = 128
SCOPE = CacheScope("acme", "tiny@1")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama_config(**changes: Any) -> Any:
    return LlamaConfig(**{**SIZES, **changes})


def make_model(config: Any, seed: int = 0) -> Any:
    """Make a model whose weights are large enough that every position changes every logit."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


def make_runner(model: Any, num_blocks: int = 16) -> TransformersRunner:
    """Put a model over a pool in which every slot is poisoned."""
    layout = survey(model)
    storage = TorchKVStorage(num_blocks, layout)
    storage.poison(range(num_blocks))
    spec = ModelSpec("tiny", "1", VOCABULARY, (2,), CONTEXT, layout, TextAssets(b""))
    return TransformersRunner(model, spec, storage)


def row(token_ids: Sequence[int], start: int, block_ids: Sequence[int], *, needs_logits: bool = True) -> Row:
    return Row(token_ids, start, block_ids, SCOPE, needs_logits)
