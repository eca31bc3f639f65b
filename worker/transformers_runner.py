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
from prefixgate.worker.attention import AttentionBackend, DecodeStep, GraphBackend, PackedStep
from prefixgate.worker.attention_hook import PagedAttention, use_attention
from prefixgate.worker.decode_graphs import CudaRecorder, DecodeGraphs, Record
from prefixgate.worker.graph_shapes import is_decode, saves_by_sharing
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
        record: Record | None = None,
    ) -> None:
        """Make the model's layers attend over ``storage`` by ``backend``.

        ``share_prefixes`` false attends to what rows have in common once for each of them. ``record`` has decode steps
        recorded, which needs a ``GraphBackend`` and a storage with a scratch block; see ``recorder_for``.
        """
        self.spec = spec
        self.storage = storage
        self.model = model
        self.is_ahead = storage.data.device.type == "cuda"
        self._share_prefixes = share_prefixes
        self.attention = PagedAttention(storage, backend)
        use_attention(model, self.attention.name)
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.graphs: DecodeGraphs | None = None
        if record is not None:
            assert storage.scratch is not None
            self.graphs = DecodeGraphs(
                self._decode,
                record,
                block_size=storage.layout.block_size,
                max_blocks=-(-spec.context_length // storage.layout.block_size),
                scratch=storage.scratch,
                device=storage.data.device,
            )

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute the rows in one pass of the model; only wanted tokens go through the output layer."""
        return self._forward(rows, None)

    def forward_ahead(self, rows: Sequence[Row], token_ids: torch.Tensor) -> torch.Tensor:
        """Compute one token of each row, of which the device alone knows which it is."""
        return self._forward(rows, token_ids)

    def _forward(self, rows: Sequence[Row], token_ids: torch.Tensor | None) -> torch.Tensor:
        with torch.inference_mode():
            logits = self._run_graph(rows, token_ids)
            if logits is None:
                logits = self._compute(rows, token_ids)
        # What inference mode made cannot be changed in place outside of it, and what a graph gave lasts until it runs
        # again; the copy is the caller's to do with as it likes, and small beside the step.
        return logits.clone()

    def _run_graph(self, rows: Sequence[Row], token_ids: torch.Tensor | None) -> torch.Tensor | None:
        if self.graphs is None or self.graphs.failed or not is_decode(rows):
            return None
        layout = self.storage.layout
        if self._share_prefixes and saves_by_sharing(rows, layout.block_size, layout.token_bytes, layout.num_layers):
            return None
        return self.graphs.run(rows, token_ids)

    def _compute(self, rows: Sequence[Row], token_ids: torch.Tensor | None) -> torch.Tensor:
        block_size, device = self.storage.layout.block_size, self.storage.data.device
        step = PackedStep(rows, block_size, device, share=self._share_prefixes, token_ids=token_ids)
        self.attention.begin(step)
        wanted = {"logits_to_keep": step.wanted} if self._selects_logits else {}
        output = self.model(
            input_ids=step.token_ids[None], position_ids=step.positions[None], use_cache=False, **wanted
        )
        logits: torch.Tensor = output.logits[0]
        return (logits if self._selects_logits else logits[step.wanted]).float()

    def _decode(self, token_ids: torch.Tensor, step: DecodeStep) -> torch.Tensor:
        """Compute a step of one token for each row, such that it can be recorded."""
        self.attention.begin_decode(step)
        output = self.model(input_ids=token_ids[None], position_ids=step.positions[None], use_cache=False)
        logits: torch.Tensor = output.logits[0].float()
        return logits


def recorder_for(storage: KVStorage, backend: AttentionBackend) -> Record | None:
    """Return what records decode steps over a storage by a backend; None where they run as they are."""
    can = storage.data.device.type == "cuda" and storage.scratch is not None and isinstance(backend, GraphBackend)
    return CudaRecorder(storage.data.device) if can else None
