"""Stand-ins for both generations of vllm-flash-attn: they check what the library checks, and compute in torch.

Each call is recorded. What the library would refuse on a device is refused here in its own order, as it stands in the
library's host code: number formats, last dimensions, page sizes, shapes.
"""

from types import SimpleNamespace
from typing import Any

import torch


class FlashDouble:
    """What the doubled functions were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def old(self) -> Any:
        """Return a module like release 2.6."""
        return SimpleNamespace(
            __name__="old_double", flash_attn_varlen_func=self._old_varlen, flash_attn_with_kvcache=self._kvcache
        )

    def new(self) -> Any:
        """Return a module like those inside vLLM."""
        return SimpleNamespace(__name__="new_double", flash_attn_varlen_func=self._new_varlen)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    # The parameters in the library's order, since that is what the adapter looks at.

    def _old_varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
        *,
        out: None = None,
    ) -> Any:
        self.calls.append(("varlen", dict(locals())))
        assert cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_k.is_contiguous()
        lengths = cu_seqlens_k.diff()
        output, sums = _varlen(
            q, k, v, cu_seqlens_q, lengths, max_seqlen_q, max_seqlen_k, block_table, softmax_scale, causal,
            window_size, softcap,
        )  # fmt: skip
        return (output, sums, None) if return_attn_probs else output

    def _kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: None = None,
        v: None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: torch.Tensor | None = None,
        cache_batch_idx: None = None,
        block_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
        *,
        out: None = None,
    ) -> Any:
        self.calls.append(("kvcache", dict(locals())))
        assert q.dim() == 4
        batch, each = q.shape[:2]
        assert cache_seqlens is not None
        assert cache_seqlens.shape == (batch,)
        ends = torch.arange(0, batch * each + 1, each, dtype=torch.int32)
        output, sums = _varlen(
            q.flatten(0, 1), k_cache, v_cache, ends, cache_seqlens, each, int(cache_seqlens.max()), block_table,
            softmax_scale, causal, window_size, softcap,
        )  # fmt: skip
        output = output.view(batch, each, *output.shape[1:])
        sums = sums.T.reshape(batch, each, -1).transpose(1, 2)
        return (output, sums) if return_softmax_lse else output

    def _new_varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        q_v: None = None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: list[int] | tuple[int, int] | None = None,
        softcap: float = 0.0,
        alibi_slopes: None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
        return_softmax_lse: bool = False,
        out: None = None,
        fa_version: int = 2,
        s_aux: None = None,
    ) -> Any:
        self.calls.append(("varlen", dict(locals())))
        assert (cu_seqlens_k is None) != (seqused_k is None)
        assert seqused_k is not None, "needed with a block table"
        assert seqused_k.is_contiguous()
        output, sums = _varlen(
            q, k, v, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, block_table, softmax_scale, causal,
            window_size or (-1, -1), softcap,
        )  # fmt: skip
        heads, kv_heads = q.shape[1], k.shape[2]
        if max_seqlen_q == 1 and heads > kv_heads and (window_size or (-1, -1))[0] < 0:
            # Query heads are packed as if they were queries, and where the work is in one part the library hands their
            # sums out in the wrong order.
            sums = sums.view(kv_heads, -1, len(q)).transpose(1, 2).reshape(heads, len(q))
        return (output, sums) if return_softmax_lse else output


def _varlen(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_ends: torch.Tensor,
    lengths: torch.Tensor,
    most_queries: int,
    most_slots: int,
    tables: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    window: Any,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs ``[T, heads, head_dim]`` and sums ``[heads, T]``."""
    assert tables is not None
    assert scale is not None
    _check(query, keys, values, query_ends, lengths, tables)
    counts = query_ends.diff().tolist()
    assert max(counts) <= most_queries
    assert int(lengths.max()) <= most_slots
    heads, kv_heads = query.shape[1], keys.shape[2]
    output = torch.empty_like(query)
    sums = torch.empty((heads, len(query)), dtype=torch.float32)
    for sequence, (count, length) in enumerate(zip(counts, lengths.tolist(), strict=True)):
        blocks = tables[sequence, : -(-length // keys.shape[1])].long()
        k, v = (part[blocks].flatten(0, 1)[:length].float() for part in (keys, values))
        first = int(query_ends[sequence])
        q = query[first : first + count].float()
        group = heads // kv_heads
        scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        # Aligned at the end: the last query sees the last slot.
        at = torch.arange(count)[:, None] + length - count
        slots = torch.arange(length)
        left, right = window[0], 0 if causal else window[1]
        hidden = torch.zeros(count, length, dtype=torch.bool)
        if left >= 0:
            hidden |= slots < at - left
        if right >= 0:
            hidden |= slots > at + right
        scores = scores.masked_fill(hidden, float("-inf"))
        total = scores.logsumexp(-1)
        empty = total == float("-inf")
        weights = torch.where(empty[..., None], 0.0, (scores - total[..., None]).exp())
        result = torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, 1))
        output[first : first + count] = result.to(query.dtype)
        # What the library says of a query that sees nothing.
        sums[:, first : first + count] = torch.where(empty, float("inf"), total)
    return output, sums


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_ends: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
) -> None:
    assert query.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    assert keys.dtype == values.dtype == query.dtype
    assert query_ends.dtype == lengths.dtype == tables.dtype == torch.int32
    assert query_ends.is_contiguous()
    assert tables.stride(-1) == query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    # Loads are of 16 bytes.
    assert all(stride % 8 == 0 for part in (query, keys, values) for stride in part.stride()[:-1])
    assert keys.stride() == values.stride()
    batch, heads, head_dim = len(query_ends) - 1, query.shape[1], query.shape[2]
    num_blocks, page, kv_heads, _ = keys.shape
    assert page % 16 == 0, "Paged KV cache block size must be divisible by 16"
    assert head_dim <= 256
    assert head_dim % 8 == 0
    assert heads % kv_heads == 0
    assert keys.shape == values.shape == (num_blocks, page, kv_heads, head_dim)
    assert tables.shape[0] == batch == len(lengths) > 0
    assert int(query_ends[0]) == 0
    assert int(query_ends[-1]) == len(query)
