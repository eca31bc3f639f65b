"""Runs a Hugging Face causal language model over the pool, through that library's own attention hook.

The library keeps what it is good at: weights, configurations, rotary embeddings, layers. Of attention it is told one
thing, the name of a function of ours, which every layer then calls with its queries, keys and values. That function
writes keys and values to the pool and attends over it by block table. The step's rows are packed into one line of
tokens with explicit positions, so nothing is padded and the library builds no mask.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from prefixgate.cache.kv_storage import KVStorage
from prefixgate.worker.attention import AttentionBackend, PackedStep
from prefixgate.worker.attention_hook import PagedAttention, use_attention
from prefixgate.worker.model_runner import ModelSpec, Row


class TransformersRunner:
    """A ``ModelRunner`` over a loaded causal language model."""

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        storage: KVStorage,
        backend: AttentionBackend,
        *,
        share_prefixes: bool = True,
    ) -> None:
        """Make the model's layers attend over ``storage`` by ``backend``.

        ``share_prefixes`` false attends to what rows have in common once for each of them.
        """
        self.spec = spec
        self.storage = storage
        self.model = model
        self._share_prefixes = share_prefixes
        self.attention = PagedAttention(storage, backend)
        use_attention(model, self.attention.name)
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute the rows in one pass of the model; only wanted tokens go through the output layer."""
        with torch.inference_mode():
            logits = self._compute(rows)
        # What inference mode made cannot be changed in place outside of it; the copy is the caller's to do with as it
        # likes, and small beside the step.
        return logits.clone()

    def _compute(self, rows: Sequence[Row]) -> torch.Tensor:
        step = PackedStep(rows, self.storage.layout.block_size, self.storage.data.device, share=self._share_prefixes)
        self.attention.begin(step)
        wanted = {"logits_to_keep": step.wanted} if self._selects_logits else {}
        output = self.model(
            input_ids=step.token_ids[None], position_ids=step.positions[None], use_cache=False, **wanted
        )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._selects_logits else logits[step.wanted]).float()
