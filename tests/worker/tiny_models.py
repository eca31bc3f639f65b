"""Small random models of the Hugging Face library, and how to run them over a pool."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from prefixgate.cache.hashing import CacheScope
from prefixgate.cache.kv_storage import TorchKVStorage
from prefixgate.worker.attention import AttentionBackend
from prefixgate.worker.model_runner import ModelSpec, Row, TextAssets
from prefixgate.worker.probe import survey
from prefixgate.worker.sdpa_attention import SdpaBackend
from prefixgate.worker.transformers_runner import TransformersRunner
from prefixgate.worker.witness_text import witness_text

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


def make_runner(model: Any, num_blocks: int = 16, backend: AttentionBackend | None = None) -> TransformersRunner:
    """Put a model over a pool in which every slot is poisoned."""
    layout = survey(model).layout
    storage = TorchKVStorage(num_blocks, layout)
    storage.poison(range(num_blocks))
    spec = ModelSpec("tiny", "1", VOCABULARY, (2,), CONTEXT, layout, TextAssets(b""))
    return TransformersRunner(model, spec, storage, backend or SdpaBackend())


def row(token_ids: Sequence[int], start: int, block_ids: Sequence[int], *, needs_logits: bool = True) -> Row:
    return Row(token_ids, start, block_ids, SCOPE, needs_logits)


def save_folder(folder: Path, model: Any) -> Path:
    """Write a model with the witness's tokenizer, cut to no vocabulary in particular, as the library keeps one."""
    text = witness_text()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text.tokenizer.decode()),
        eos_token="<|im_end|>",
        chat_template=text.chat_template,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_gguf(path: Path) -> Path:
    """Write a random two-layer Llama as a GGUF file, tokenizer and chat template included."""
    random = np.random.default_rng(0)
    hidden, inner, heads, kv_heads, layers = 32, 48, 4, 2, 2
    tokens = [*sorted(ByteLevel.alphabet()), "he", "<|im_end|>"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["h e"] * 2)  # transformers 4 takes a list of one for its text
    writer.add_bos_token_id(257)  # transformers 4 does not read a file without one
    writer.add_eos_token_id(257)
    writer.add_chat_template(witness_text().chat_template)
    shapes = {"token_embd": (len(tokens), hidden), "output_norm": (hidden,)}
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.attn_norm": (hidden,),
            f"blk.{layer}.attn_q": (hidden, hidden),
            f"blk.{layer}.attn_k": (hidden * kv_heads // heads, hidden),
            f"blk.{layer}.attn_v": (hidden * kv_heads // heads, hidden),
            f"blk.{layer}.attn_output": (hidden, hidden),
            f"blk.{layer}.ffn_norm": (hidden,),
            f"blk.{layer}.ffn_gate": (inner, hidden),
            f"blk.{layer}.ffn_up": (inner, hidden),
            f"blk.{layer}.ffn_down": (hidden, inner),
        }
    for name, shape in shapes.items():
        values = random.normal(size=shape, scale=0.2).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values + (1 if len(shape) == 1 else 0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
