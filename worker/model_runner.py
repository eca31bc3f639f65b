"""The seam between the engine and whatever computes: a model that reads and writes the pool by block table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from prefixgate.cache.hashing import CacheScope
from prefixgate.cache.kv_storage import KVLayout, KVStorage


class ModelRefusedError(Exception):
    """The model cannot be served, and why."""


@dataclass(frozen=True, slots=True)
class TextAssets:
    """What a gateway needs to turn text into this model's ids and back."""

    tokenizer: bytes
    """A ``tokenizer.json``."""
    chat_template: str = ""
    """Jinja; empty where the model has none."""
    template_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of the special tokens that the template may name (``bos_token``, ``eos_token`` and so on)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What there is to know of a model before it runs."""

    name: str
    fingerprint: str
    """Hexadecimal digest of weights, configuration and KV dtype."""
    vocabulary_size: int
    """Rows of the logits; ids are 0 to this less one."""
    eos_ids: tuple[int, ...]
    context_length: int
    """Longest prompt plus output, in tokens."""
    kv_layout: KVLayout
    text: TextAssets
    device: str = "cpu"
    attention: str = ""
    """The backend that computes attention; empty where the model needs none."""


class Row(NamedTuple):
    """One sequence's part of one step: some tokens of a prompt, or the token sampled last."""

    token_ids: Sequence[int]
    """The T >= 1 tokens to compute."""
    start: int
    """Position of the first of them; the slots of positions 0 to start - 1 are written."""
    block_ids: Sequence[int]
    """The sequence's block table, covering at least positions 0 to start + T - 1."""
    scope: CacheScope
    needs_logits: bool
    """Whether the last token's logits are wanted. The engine wants them of every chunk, as proof that the slots below
    are finite; who only fills slots does not."""
    needs_all_logits: bool = False
    """Whether those of every one of its tokens are."""

    @property
    def num_logits(self) -> int:
        """How many lines of logits the row gets: those of its last tokens."""
        return len(self.token_ids) if self.needs_all_logits else int(self.needs_logits)


class ModelRunner(Protocol):
    """A model on one device with its pool. Called from the engine's thread only."""

    spec: ModelSpec
    storage: KVStorage

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Compute the rows' tokens: write their slots, read the slots of all positions before.

        Returns float32 ``[L, vocabulary_size]`` on the runner's device: ``num_logits`` lines for each row, in the order
        of the rows and their tokens. Only slots below ``start + T`` of each row are read, by selection and not by
        masking.
        """


@runtime_checkable
class AheadRunner(ModelRunner, Protocol):
    """A runner whose device computes while the host goes on, so that a step can be launched behind another."""

    is_ahead: bool
    """Whether its device is such a one. If not, what stands below is not asked for."""

    def forward_ahead(self, rows: Sequence[Row], token_ids: torch.Tensor) -> torch.Tensor:
        """Compute one token of each row, int64 ``[R]`` ``token_ids`` on the device; those in the rows mean nothing.

        All work of the runner runs on one stream, in the order in which it was asked for, and takes what it needs of
        the rows before it returns: their tables may change after that.
        """
