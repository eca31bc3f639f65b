"""The probe lets through what computes the model's own logits, and refuses the rest with its reason."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import BloomConfig, DeepseekV3Config, Llama4TextConfig, MambaConfig, PhimoeConfig
from transformers import __version__ as transformers_version

from prefixgate.cache.kv_storage import KVLayout
from prefixgate.worker.attention_hook import refuse_unknown
from prefixgate.worker.model_runner import ModelRefusedError, ModelSpec, TextAssets
from prefixgate.worker.probe import probe, probe_ids, refuse_moving_rope, stock_logits, survey
from prefixgate.worker.sdpa_attention import SdpaBackend
from tests.worker.tiny_models import CONTEXT, SIZES, VOCABULARY, llama_config, make_model


def spec_of(layout: KVLayout) -> ModelSpec:
    return ModelSpec("tiny", "1", VOCABULARY, (2,), CONTEXT, layout, TextAssets(b""))


def test_a_plain_model_passes_and_its_slots_are_known() -> None:
    model = make_model(llama_config())
    expected = stock_logits(model, probe_ids(VOCABULARY, CONTEXT))
    layout = survey(model).layout
    assert layout == KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    probe(model, spec_of(layout), expected, SdpaBackend())


@pytest.mark.parametrize("context", [1, 2, 20])
def test_a_short_context_is_probed_as_far_as_it_goes(context: int) -> None:
    model = make_model(llama_config(max_position_embeddings=context))
    expected = stock_logits(model, probe_ids(VOCABULARY, context))
    assert len(expected) == context
    layout = survey(model).layout
    probe(model, ModelSpec("tiny", "1", VOCABULARY, (2,), context, layout, TextAssets(b"")), expected, SdpaBackend())


@pytest.mark.parametrize("position", [0, 18, 25, 39])
def test_logits_that_differ_anywhere_are_refused(position: int) -> None:
    model = make_model(llama_config())
    expected = stock_logits(model, probe_ids(VOCABULARY, CONTEXT))
    expected[position:, 17] += 0.1
    layout = survey(model).layout
    with pytest.raises(ModelRefusedError, match=r"logits differ by 0\.1 from those of the model's own"):
        probe(model, spec_of(layout), expected, SdpaBackend())


def test_logits_that_are_no_numbers_are_refused() -> None:
    model = make_model(llama_config())
    expected = stock_logits(model, probe_ids(VOCABULARY, CONTEXT))
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(ModelRefusedError, match="logits differ by nan"):
        probe(model, spec_of(survey(model).layout), expected, SdpaBackend())


def test_tokens_that_mix_outside_attention_are_refused() -> None:
    """Beside each other in one step lie tokens of different calls."""
    model = make_model(llama_config())
    original = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: original(hidden + 0.1 * hidden.roll(1, dims=1))
    expected = stock_logits(model, probe_ids(VOCABULARY, CONTEXT))
    with pytest.raises(ModelRefusedError, match="logits differ"):
        probe(model, spec_of(survey(model).layout), expected, SdpaBackend())


def test_a_layer_that_attends_twice_is_refused() -> None:
    model = make_model(llama_config())
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def twice(*args: Any, **arguments: Any) -> Any:
        original(*args, **arguments)
        return original(*args, **arguments)

    attention.forward = twice
    with pytest.raises(ModelRefusedError, match="2 of 2 layers use the attention hook, with 3 calls"):
        survey(model)


def test_layers_with_different_heads_are_refused() -> None:
    model, other = make_model(llama_config()), make_model(llama_config(num_key_value_heads=4))
    model.model.layers[1] = other.model.layers[1]
    model.model.layers[1].self_attn.config = model.config
    with pytest.raises(ModelRefusedError, match=r"layers differ in their heads: layer 0 .* 2 kv .* 4 kv"):
        survey(model)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param(
            MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4),
            "0 of 2 layers use the attention hook",
            id="no attention",
        ),
        pytest.param(
            BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
            "BloomForCausalLM takes no other attention function",
            id="no hook",
        ),
        pytest.param(
            DeepseekV3Config(
                **{**SIZES, "num_key_value_heads": 4, "first_k_dense_replace": 2},
                n_routed_experts=4,
                q_lora_rank=8,
                kv_lora_rank=8,
                qk_rope_head_dim=4,
                qk_nope_head_dim=8,
                v_head_dim=8,
            ),
            "keys and values differ in size: layer 0 has 4 query and 4 kv heads with 12 numbers a key and 8 a value",
            id="key and value sizes",
        ),
        pytest.param(
            Llama4TextConfig(
                **SIZES,
                head_dim=8,
                intermediate_size_mlp=48,
                num_local_experts=2,
                attention_chunk_size=16,
                layer_types=["full_attention", "chunked_attention"],
            ),
            "layer 1 attends by 'chunked_attention', which is not supported",
            id="attention in pieces",
        ),
        pytest.param(
            PhimoeConfig(**SIZES, num_local_experts=2, sliding_window=12),
            "layer 0 should look back 12 tokens, and its attention is told None",
            id="a window that only a mask has",
            marks=pytest.mark.skipif(
                int(transformers_version.partition(".")[0]) < 5, reason="there its attention takes no function of ours"
            ),
        ),
    ],
)
def test_what_a_pool_cannot_serve_is_refused(config: Any, reason: str) -> None:
    with pytest.raises(ModelRefusedError, match=re.escape(reason)):
        survey(make_model(config))


def attention_told(model: Any, **more: Any) -> None:
    """Make every layer tell its attention function something more, or something else."""

    def telling(original: Callable[..., object]) -> Callable[..., object]:
        return lambda *arguments, **options: original(*arguments, **{**options, **more})

    for layer in model.model.layers:
        layer.self_attn.forward = telling(layer.self_attn.forward)


def test_an_argument_of_attention_that_nobody_knows_is_refused() -> None:
    model = make_model(llama_config())
    attention_told(model, alibi_slopes=torch.ones(4))
    with pytest.raises(ModelRefusedError, match="the model's attention has 'alibi_slopes', which is not supported"):
        survey(model)


def test_a_token_alone_may_be_told_to_look_everywhere() -> None:
    refuse_unknown(None, {"is_causal": False}, 1)
    with pytest.raises(ModelRefusedError, match="not causal"):
        refuse_unknown(None, {"is_causal": False}, 2)


def test_attention_that_looks_ahead_is_refused() -> None:
    model = make_model(llama_config())
    attention_told(model, is_causal=False)
    with pytest.raises(ModelRefusedError, match="the model's attention is not causal"):
        survey(model)


def test_a_model_that_makes_its_own_mask_is_refused() -> None:
    model = make_model(llama_config())
    attention_told(model, attention_mask=torch.zeros(1, 1, 2, 2))
    with pytest.raises(ModelRefusedError, match="the model makes its own attention mask"):
        survey(model)


def test_a_layer_that_does_not_say_which_it_is_is_refused() -> None:
    model = make_model(llama_config())
    model.model.layers[1].self_attn.layer_idx = None
    with pytest.raises(ModelRefusedError, match=r"LlamaAttention does not say which layer it is \(layer_idx\)"):
        survey(model)


def set_rope(config: Any, parameters: dict[str, Any]) -> None:
    """Say how positions are rotated, by the name that the release has for it."""
    setattr(config, "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling", parameters)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_move_with_the_length_are_refused(kind: str) -> None:
    config = llama_config()
    set_rope(config, {"rope_type": kind})
    with pytest.raises(ModelRefusedError, match=f"rotary embedding of type '{kind}'"):
        refuse_moving_rope(config)
    set_rope(config, {"full_attention": {"rope_type": kind}})
    with pytest.raises(ModelRefusedError, match=f"rotary embedding of type '{kind}'"):
        refuse_moving_rope(config)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_fixed_rotary_embeddings_are_taken(kind: str) -> None:
    config = llama_config()
    set_rope(config, {"rope_type": kind})
    refuse_moving_rope(config)
