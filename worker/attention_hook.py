"""The attention function that a Hugging Face model's layers call, and the way from there to the pool."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from prefixgate.cache.kv_storage import KVStorage
from prefixgate.worker.attention import AttentionBackend, DecodeStep, GraphBackend, PackedStep, Scoring
from prefixgate.worker.model_runner import ModelRefusedError

HARMLESS_ARGUMENTS = frozenset(
    {
        "cache_position", "dropout", "is_causal", "output_attentions", "output_router_logits", "position_embeddings",
        "position_ids", "use_cache",
    }
)  # fmt: skip
"""What layers pass to an attention function that says nothing our function does not know."""


class PagedAttention:
    """The function that the library's attention layers call: it owns the way from a layer to the pool."""

    def __init__(self, storage: KVStorage, backend: AttentionBackend) -> None:
        self.name = f"prefixgate_{id(self):x}"
        """Under this name the library finds it. One of its own for each runner, so that no state is shared."""
        self.step: PackedStep | DecodeStep | None = None
        """The step that is being computed."""
        self.layers_called: list[int] = []
        """Layers that attended in this step, in order."""
        self._storage = storage
        self._backend = backend
        AttentionInterface.register(self.name, _without_holding(self))

    def begin(self, step: PackedStep) -> None:
        """Set the step that the following calls belong to."""
        self.step = step
        self.layers_called = []
        self._backend.begin(step)

    def begin_decode(self, step: DecodeStep) -> None:
        """Set a step that can be recorded. The backend must be one that can, too."""
        assert isinstance(self._backend, GraphBackend)
        self.step = step
        self.layers_called = []
        self._backend.begin_decode(step)

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
        """Write one layer's new slots, then attend: ``[1, heads, T, head_dim]`` gives ``[1, T, heads, head_dim]``."""
        refuse_unknown(attention_mask, arguments, query.shape[2])
        if self.step is None:
            raise RuntimeError("attention was called outside a step")
        index = layer_index(module)
        self.layers_called.append(index)
        layer = self._storage.data[:, index]
        self._backend.write(key[0].transpose(0, 1), value[0].transpose(0, 1), layer)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scoring = Scoring(scale, sliding_window, softcap, s_aux)
        output = self._backend.attend(query[0].transpose(0, 1), layer, scoring)
        return output[None], None


def _without_holding(attention: PagedAttention) -> Callable[..., tuple[torch.Tensor, None]]:
    """Make the function that the library gets, and keeps for ever: it must not keep a whole pool with it."""
    reference = weakref.ref(attention)

    def attend(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
        found = reference()
        if found is None:
            raise RuntimeError("the model's layers attend over a pool that is gone")
        return found(*arguments, **options)

    return attend


def layer_index(module: torch.nn.Module) -> int:
    """Return which layer an attention module belongs to."""
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise ModelRefusedError(f"{type(module).__name__} does not say which layer it is (layer_idx)")
    return index


def refuse_unknown(attention_mask: torch.Tensor | None, arguments: dict[str, Any], tokens: int) -> None:
    """Refuse a model whose attention, of so many tokens, is told something that ours would ignore."""
    if attention_mask is not None:
        raise ModelRefusedError("the model makes its own attention mask")
    for name, value in arguments.items():
        if name == "is_causal" and value is False and tokens > 1:  # some say so of one, which has nothing ahead
            raise ModelRefusedError("the model's attention is not causal")
        if value is not None and name not in HARMLESS_ARGUMENTS:
            raise ModelRefusedError(f"the model's attention has {name!r}, which is not supported")


def use_attention(model: Any, name: str) -> None:
    """Make a model's layers call the attention function of this name. Raises ModelRefusedError where they would not."""
    try:
        model.set_attn_implementation(name)
    except (ValueError, AttributeError) as error:
        raise ModelRefusedError(f"{type(model).__name__} takes no other attention function: {error}") from error
    if model.config.get_text_config()._attn_implementation != name:
        raise ModelRefusedError(f"{type(model).__name__} takes no other attention function")
