"""Each family says greedily what the library's own ``generate`` says: prompts in chunks, on hits, side by side."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from prefixgate.cache.copy_plan import CopyPlan
from prefixgate.cache.hashing import BlockHasher
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.model_runner import ModelRefusedError
from prefixgate.worker.probe import probe, probe_ids, refuse_moving_rope, stock_logits, survey
from prefixgate.worker.transformers_runner import TransformersRunner
from tests.worker.backends import NAMES, make_backend
from tests.worker.tiny_models import CONTEXT, SCOPE, SIZES, VOCABULARY, llama_config, make_model, make_runner, row

NEW_TOKENS = 6
NUM_BLOCKS = 64
COMMON = [(7 * i + 3) % VOCABULARY for i in range(70)]
PROMPTS = [[*COMMON, 11, 12, 13], [*COMMON, 5], [*COMMON[:40], 8, 8, 9]]

WINDOWS: dict[str, Any] = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": llama_config(),
    "mistral": MistralConfig(**SIZES, sliding_window=12),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    # Caps so low that leaving them out would change every token.
    "gemma2": Gemma2Config(
        **SIZES, head_dim=8, **WINDOWS, attn_logit_softcapping=1.0, final_logit_softcapping=5.0, query_pre_attn_scalar=4
    ),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, **WINDOWS),
    "gpt-neox": GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    ),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT),
    "gpt-oss": GptOssConfig(
        **SIZES,
        head_dim=8,
        **WINDOWS,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}


def family_model(config: Any) -> Any:
    model = make_model(copy.deepcopy(config))  # a model writes down in its configuration what it attends with
    model.set_attn_implementation("eager")  # the one that knows caps and sinks in every release
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 2, len(parameter)))
    return model


def generated(model: Any, prompt: Sequence[int]) -> list[int]:
    """Let the library generate, greedily."""
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    output: list[int] = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
    )[0].tolist()
    return output[len(prompt) :]


def served(runner: TransformersRunner, cache: PrefixCache, prompts: Sequence[list[int]], chunk: int) -> list[list[int]]:
    """Serve prompts side by side, each in chunks of its prompt and then token by token, as an engine would."""
    texts = [list(prompt) for prompt in prompts]
    admissions = [cache.admit(SCOPE, text, max_new_tokens=NEW_TOKENS) for text in texts]
    tables = [admission.table for admission in admissions if admission is not None]
    written = [admission.cached_tokens for admission in admissions if admission is not None]
    assert len(tables) == len(prompts)

    def run_plan(plan: CopyPlan) -> None:
        runner.storage.poison(plan.fresh)
        runner.storage.copy_blocks(plan.copies)

    while unfinished := [i for i, text in enumerate(texts) if len(text) < len(prompts[i]) + NEW_TOKENS]:
        rows = []
        for i in unfinished:
            tokens = texts[i][written[i] : written[i] + chunk]
            cache.writable(tables[i], written[i], written[i] + len(tokens))
            rows.append(row(tokens, written[i], tables[i].block_ids))
        cache.run_plan(run_plan)
        for i, line, part in zip(unfinished, runner.forward(rows), rows, strict=True):
            written[i] += len(part.token_ids)
            cache.publish(tables[i], written[i])
            if written[i] == len(texts[i]):
                texts[i].append(int(line.argmax()))
    for table, count in zip(tables, written, strict=True):
        cache.release(table, count)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_says_what_it_says_by_itself(family: str, backend: str) -> None:
    model = family_model(FAMILIES[family])
    expected = [generated(model, prompt) for prompt in PROMPTS]
    assert len({tuple(text) for text in expected}) > 1, "the outputs depend on the prompts"
    ids = probe_ids(VOCABULARY, CONTEXT)
    logits = stock_logits(model, ids)
    runner = make_runner(model, NUM_BLOCKS, make_backend(backend))
    probe(model, runner.spec, logits, make_backend(backend))
    refuse_moving_rope(model.config.get_text_config())
    runner = make_runner(model, NUM_BLOCKS, make_backend(backend))
    cache = PrefixCache(NUM_BLOCKS, BlockHasher(bytes(16)))
    assert served(runner, cache, PROMPTS[:1], chunk=13) == expected[:1], "cold"
    admission = cache.match(SCOPE, PROMPTS[1])
    assert admission.cached_tokens == len(COMMON), "what follows is a hit that ends inside a block"
    assert served(runner, cache, PROMPTS, chunk=9) == expected, "on hits, side by side"


def test_layers_that_use_the_keys_of_others_are_refused() -> None:
    config = Gemma3nTextConfig(
        **{**SIZES, "num_hidden_layers": 3},
        head_dim=8,
        num_kv_shared_layers=1,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        sliding_window=12,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=4,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 3,
    )
    with pytest.raises(ModelRefusedError, match="1 layer uses the keys and values of another"):
        survey(make_model(config))
