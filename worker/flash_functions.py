"""The functions of the package vllm-flash-attn, whichever release there is, called in one way.

They come as a package of their own or inside an installed vLLM, and two generations of them differ in how the lengths
of sequences are told: releases up to 2.6 take cumulated ones and have a function of its own for decode; later ones take
the lengths themselves, and one function does both.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from prefixgate.worker.attention import AttentionUnavailableError

PACKAGES = ("vllm_flash_attn", "vllm.vllm_flash_attn")
"""Where the functions are looked for, in this order."""


class Sequences(NamedTuple):
    """What the queries of one call belong to: S sequences in the pool, each with its queries at its end."""

    tables: torch.Tensor
    """int32 ``[S, W]``: their blocks."""
    lengths: torch.Tensor
    """int32 ``[S]``: their slots."""
    query_ends: torch.Tensor
    """int32 ``[S + 1]``: 0, and how many queries there are up to the end of each sequence."""
    slot_ends: torch.Tensor | None
    """int32 ``[S + 1]``: as ``query_ends``, of the slots; None where each sequence has one query."""
    most_queries: int
    """Of one sequence."""
    most_slots: int
    """Of one sequence, or any larger number."""
    causal: bool
    """Whether the queries are the last tokens of their sequences and see what lies before them, or all of it."""


class Weighing(NamedTuple):
    """How scores become weights, in the library's terms."""

    scale: float
    window: tuple[int, int]
    """Slots seen before and after a query's own, -1 for all."""
    softcap: float


class FlashFunctions:
    """One release's functions. ``old`` tells its generation."""

    def __init__(self, module: Any) -> None:
        """Look at what a module has. Raises AttentionUnavailableError where it is none of the releases known here."""
        self._varlen: Callable[..., Any] = getattr(module, "flash_attn_varlen_func", None) or _missing(module, "varlen")
        told = inspect.signature(self._varlen).parameters
        self.old = "seqused_k" not in told
        self._sums_flag = "return_softmax_lse" if "return_softmax_lse" in told else "return_attn_probs"
        if not {"block_table", "softcap", "window_size", self._sums_flag} <= set(told):
            _missing(module, f"block tables, softcap and windows; it takes {', '.join(told)}")
        self._decode: Callable[..., Any] | None = None
        if self.old:
            self._decode = getattr(module, "flash_attn_with_kvcache", None) or _missing(module, "kvcache")
        self._unsupported: Callable[..., str | None] | None = getattr(module, "fa_version_unsupported_reason", None)

    def refuse_device(self, device: torch.device, capability: tuple[int, int]) -> None:
        """Raise AttentionUnavailableError where there is no machine code for a device."""
        major, minor = capability
        if major < 8 or (self.old and major > 9):
            known = "8.0 to 9.0" if self.old else "8.0 and more"
            raise AttentionUnavailableError(f"it serves compute capabilities {known}, and {device} has {major}.{minor}")
        reason = self._unsupported(2, device) if self._unsupported is not None else None
        if reason:
            raise AttentionUnavailableError(reason)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, over: Sequences, how: Weighing
    ) -> torch.Tensor:
        """Return the outputs of queries ``[T, heads, head_dim]`` over ``[block, token, kv_head, head_dim]``."""
        output: torch.Tensor = self._call(query, keys, values, over, how, sums=False)
        if query.dim() < output.dim():
            output = output[:, 0]
        return output

    def attend_with_lse(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, over: Sequences, how: Weighing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs and the log-sum-exp, float32 ``[T, heads]``."""
        output, sums, *_ = self._call(query, keys, values, over, how, sums=True)
        if query.dim() < output.dim():
            return output[:, 0], sums[:, :, 0]
        return output, sums.transpose(0, 1)

    def _call(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        over: Sequences,
        how: Weighing,
        *,
        sums: bool,
    ) -> Any:
        shared = {
            "block_table": over.tables,
            "softmax_scale": how.scale,
            "causal": over.causal,
            "window_size": how.window,
            "softcap": how.softcap,
        }
        if self._decode is not None and over.most_queries == 1:
            return self._decode(
                query[:, None], keys, values, cache_seqlens=over.lengths, return_softmax_lse=sums, **shared
            )
        most_queries = over.most_queries
        if sums:
            # For one query of each sequence heads are packed in another way, and the sums then lie in an order that
            # depends on how many parts the work was cut into. Any larger number says the same otherwise.
            most_queries = max(2, most_queries)
        lengths = {"cu_seqlens_k": over.slot_ends} if self.old else {"seqused_k": over.lengths}
        return self._varlen(
            query,
            keys,
            values,
            cu_seqlens_q=over.query_ends,
            max_seqlen_q=most_queries,
            max_seqlen_k=over.most_slots,
            **lengths,
            **shared,
            **{self._sums_flag: sums},
        )


def find_flash_functions() -> FlashFunctions:
    """Import the functions. Raises AttentionUnavailableError with what was found instead."""
    reasons = []
    for name in PACKAGES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            reasons.append(f"{name} is not installed" if (error.name or "") in name else f"{name}: {error}")
        except Exception as error:  # compiled for another torch, it fails in ways of its own
            reasons.append(f"{name} cannot be imported: {error}")
        else:
            return FlashFunctions(module)
    raise AttentionUnavailableError("; ".join(reasons))


def _missing(module: Any, what: str) -> Any:
    raise AttentionUnavailableError(f"{module.__name__} is a release without {what}")
