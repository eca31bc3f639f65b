"""Looks at a loaded model before it may serve: what its layers keep, and whether our path gives its own logits.

Any causal model of the library can be tried, so nothing about it is taken on trust. ``survey`` runs it once with an
attention function that only writes down what it is given; ``probe`` then compares logits. What differs is refused with
its reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from prefixgate.cache.hashing import CacheScope
from prefixgate.cache.kv_storage import KVLayout, TorchKVStorage
from prefixgate.worker.attention import AttentionBackend, AttentionShape
from prefixgate.worker.attention_hook import layer_index, refuse_unknown, use_attention
from prefixgate.worker.model_runner import ModelRefusedError, ModelSpec, Row
from prefixgate.worker.transformers_runner import TransformersRunner

LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of a logit, as a share of the largest logit. A wrong position or a lost slot is far above, another
order of summing far below."""

PROBE_TOKENS = 40


class LayerCall(NamedTuple):
    """What one layer gave to its attention function."""

    layer: int
    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype


def probe_ids(vocabulary_size: int, context_length: int) -> list[int]:
    """Return the tokens that a model is tried with: spread over the vocabulary, none twice in a row."""
    return [(7919 * i + 1013) % vocabulary_size for i in range(min(PROBE_TOKENS, context_length))]


@torch.no_grad()
def stock_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits of all tokens, float32 ``[T, vocabulary]``, by the model's own attention."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        # What the library takes by default leaves the cap out, in releases before 5.
        model.set_attn_implementation("eager")
    device = next(model.parameters()).device
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids], device=device), use_cache=False).logits[0]
    return logits.float()


def refuse_moving_rope(config: Any) -> None:
    """Refuse rotary embeddings that depend on a sequence's length: a key cached in one would be wrong in another."""
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in LENGTH_DEPENDENT_ROPE:
            raise ModelRefusedError(
                f"rotary embedding of type {kind!r}: its frequencies change with the length of a sequence, so the keys "
                "of one prompt cannot serve another"
            )


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None)
        if isinstance(parameters, Mapping):
            yield parameters
            yield from (nested for nested in parameters.values() if isinstance(nested, Mapping))


class _Survey:
    """An attention function that writes down the shapes it is given."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self.windows: dict[int, int | None] = {}
        """What each layer was told about how far back it may look."""
        self.softcap = self.sinks = False

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        refuse_unknown(attention_mask, arguments, query.shape[2])
        self.windows[layer_index(module)] = sliding_window
        self.softcap |= bool(softcap)
        self.sinks |= s_aux is not None
        self.calls.append(
            LayerCall(layer_index(module), query.shape[1], key.shape[1], key.shape[3], value.shape[3], key.dtype)
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


@torch.inference_mode()
def survey(model: Any) -> AttentionShape:
    """Find out what a model's layers keep and ask for. Raises ModelRefusedError where a pool cannot hold it."""
    reusing = sum(bool(getattr(module, "is_kv_shared_layer", False)) for module in model.modules())
    if reusing:
        raise ModelRefusedError(
            f"{reusing} layer{'s use' if reusing > 1 else ' uses'} the keys and values of another; "
            "a pool holds those of each layer"
        )
    seen = _Survey()
    name = f"prefixgate_survey_{id(seen):x}"
    AttentionInterface.register(name, seen)
    use_attention(model, name)
    device = next(model.parameters()).device
    token_ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
    model(input_ids=token_ids, position_ids=torch.arange(2, device=device)[None], use_cache=False)
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    require_one_call_each([call.layer for call in seen.calls], num_layers)
    _refuse_untold_windows(config, seen.windows)
    first = seen.calls[0]
    for call in seen.calls:
        if call._replace(layer=first.layer) != first:
            raise ModelRefusedError(f"layers differ in their heads: {_sizes(first)}, {_sizes(call)}")
    if first.key_size != first.value_size:
        raise ModelRefusedError(f"keys and values differ in size: {_sizes(first)}")
    if first.dtype not in TOLERANCE:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TOLERANCE)
        raise ModelRefusedError(
            f"worker.dtype: its keys and values are {str(first.dtype).removeprefix('torch.')}; a pool holds {names}"
        )
    layout = KVLayout(num_layers, first.kv_heads, first.key_size, first.dtype)
    windowed = any(window is not None for window in seen.windows.values())
    return AttentionShape(layout, first.query_heads, windowed, seen.softcap, seen.sinks)


def require_one_call_each(layers_called: Sequence[int], num_layers: int) -> None:
    """Refuse a model whose layers do not each attend through us exactly once."""
    if sorted(layers_called) != list(range(num_layers)):
        raise ModelRefusedError(
            f"{len(set(layers_called))} of {num_layers} layers use the attention hook, with {len(layers_called)} "
            "calls; each must use it exactly once"
        )


def _refuse_untold_windows(config: Any, told: Mapping[int, int | None]) -> None:
    """Refuse a model that keeps its layers' windows to the masks it makes: we have none, and no probe is that long."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(told)
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelRefusedError(f"layer {layer} attends by {kind!r}, which is not supported")
        if kind == "sliding_attention" and told[layer] != window:
            raise ModelRefusedError(
                f"layer {layer} should look back {window} tokens, and its attention is told {told[layer]}"
            )


def _sizes(call: LayerCall) -> str:
    return (
        f"layer {call.layer} has {call.query_heads} query and {call.kv_heads} kv heads with {call.key_size} numbers a "
        f"key and {call.value_size} a value"
    )


def probe(model: Any, spec: ModelSpec, expected: torch.Tensor, backend: AttentionBackend) -> None:
    """Compare our path, by the backend that will serve, with the logits that the model gave for ``probe_ids``.

    Two sequences of the same tokens run side by side through a small poisoned pool, in chunks that fit no block and
    then token by token, so that a layer which mixes the tokens of one step with each other shows as well.
    """
    layout = spec.kv_layout
    token_ids = probe_ids(spec.vocabulary_size, spec.context_length)
    blocks = -(-len(token_ids) // layout.block_size)
    storage = TorchKVStorage(2 * blocks, layout, device=expected.device)
    storage.poison(range(2 * blocks))
    runner = TransformersRunner(model, spec, storage, backend)
    tables = [list(range(0, 2 * blocks, 2)), list(range(2 * blocks - 1, 0, -2))]
    limit = TOLERANCE[layout.dtype] * float(expected.abs().max())
    scope = CacheScope("probe", spec.name)
    for spans in _probe_steps(len(token_ids)):
        rows = [
            Row(token_ids[start:stop], start, table, scope, True)
            for (start, stop), table in zip(spans, tables, strict=True)
            if stop > start
        ]
        logits = runner.forward(rows)
        require_one_call_each(runner.attention.layers_called, layout.num_layers)
        ends = [row.start + len(row.token_ids) - 1 for row in rows]
        difference = float((logits - expected[ends]).abs().max())
        if not difference <= limit:  # true for NaN too
            raise ModelRefusedError(
                f"its logits differ by {difference:.3g} from those of the model's own attention; "
                f"at most {limit:.3g} can be rounding"
            )


def _probe_steps(length: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield for each step the span of positions that each of the two sequences computes."""
    ends = [(min(19, length), 0), (min(33, length), min(7, length))]
    while ends[-1] != (length, length):
        ahead, behind = ends[-1]
        ends.append((min(ahead + 1, length), min(behind + 5, length)))
    before = (0, 0)
    for end in ends:
        yield (before[0], end[0]), (before[1], end[1])
        before = end
