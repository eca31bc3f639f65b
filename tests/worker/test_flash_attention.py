"""The adapter to vllm-flash-attn, over doubles of both of its generations: what it is told, and what comes of it."""

import importlib
import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.cache.hashing import CacheScope
from prefixgate.cache.kv_storage import KVLayout, TorchKVStorage
from prefixgate.worker.attention import (
    KEYS,
    VALUES,
    AttentionShape,
    AttentionUnavailableError,
    DecodeStep,
    GraphBackend,
    PackedStep,
    Scoring,
)
from prefixgate.worker.flash_attention import FlashAttention, flash_attention, refuse_shape
from prefixgate.worker.flash_functions import PACKAGES, FlashFunctions, find_flash_functions
from prefixgate.worker.model_runner import Row
from prefixgate.worker.sdpa_attention import SdpaBackend
from tests.worker.flash_double import FlashDouble

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SCOPE = CacheScope("t", "m")
LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 3, 2, 16, 16, 48
LAYOUT = KVLayout(LAYERS, KV_HEADS, HEAD_DIM, torch.bfloat16)
GENERATIONS = ("old", "new")


def make(double: FlashDouble, generation: str) -> FlashAttention:
    return FlashAttention(FlashFunctions(getattr(double, generation)()))


class Case:
    """Rows over one layer of a pool in which every slot that no row has written is NaN."""

    def __init__(
        self, rows: list[tuple[int, int, list[int]]], seed: int = 0, group: int = 2, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """``rows`` are start, tokens and block table."""
        random = torch.Generator().manual_seed(seed)
        self.rows = [Row([0] * tokens, start, table, SCOPE, True) for start, tokens, table in rows]
        storage = TorchKVStorage(NUM_BLOCKS, LAYOUT if dtype == LAYOUT.dtype else KVLayout(LAYERS, 2, HEAD_DIM, dtype))
        storage.poison(range(NUM_BLOCKS))
        self.layer = storage.data[:, 1]
        """The view of one layer as the runner gives it, in the pool's strides."""
        for start, tokens, table in rows:
            for position in range(start + tokens):
                slot = self.layer[table[position // BLOCK_SIZE], :, position % BLOCK_SIZE]
                if slot.isnan().all():
                    slot.copy_(torch.randn(slot.shape, generator=random))
        count = sum(tokens for _, tokens, _ in rows)
        # As attention layers give them: heads first, seen the other way round.
        self.query = torch.randn(2 * group, count, HEAD_DIM, generator=random).to(dtype).transpose(0, 1)

    def step(self, *, share: bool = True) -> PackedStep:
        return PackedStep(self.rows, BLOCK_SIZE, CPU, share=share)

    def expected(self, scoring: Scoring) -> tuple[torch.Tensor, torch.Tensor]:
        reference = SdpaBackend()
        reference.begin(self.step(share=False))
        return reference.attend_with_lse(self.query, self.layer, scoring)


TRUNK = list(range(40, 48))
MIXED = [
    (20, 1, [3, 9]),
    (0, 33, [4, 8, 2]),
    (7 * 16, 1, [*TRUNK[:7], 11]),
    (6 * 16 + 5, 21, [*TRUNK[:6], 12, 13]),
    (5 * 16, 1, [*TRUNK[:5], 14]),
]
"""Decodes and chunks in turn, three of them with a common beginning of different length."""


def compare(backend: FlashAttention, case: Case, scoring: Scoring, *, share: bool = True) -> None:
    backend.begin(case.step(share=share))
    output, sums = backend.attend_with_lse(case.query, case.layer, scoring)
    expected, expected_sums = case.expected(scoring)
    assert output.dtype == case.layer.dtype
    torch.testing.assert_close(output.float(), expected.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(sums, expected_sums, atol=2e-2, rtol=1e-2)
    alone = backend.attend(case.query, case.layer, scoring)
    torch.testing.assert_close(alone.float(), expected.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scoring", [Scoring(0.25), Scoring(0.3, window=9), Scoring(0.3, softcap=2.0)])
def test_mixed_rows_come_out_as_from_the_reference(generation: str, dtype: torch.dtype, scoring: Scoring) -> None:
    compare(make(FlashDouble(), generation), Case(MIXED, dtype=dtype), scoring)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_rows_with_and_without_a_hit_go_together_in_any_order(generation: str, order: tuple[int, ...]) -> None:
    rows = [(5 * 16, 9, [*TRUNK[:5], 1]), (0, 50, [2, 3, 4, 5]), (4 * 16, 30, [*TRUNK[:4], 6, 7])]
    compare(make(FlashDouble(), generation), Case([rows[i] for i in order]), Scoring(0.25))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    free = list(range(NUM_BLOCKS))
    trunk = [free.pop() for _ in range(12)]
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        shared = draw(st.integers(0, len(trunk)))
        start = shared * BLOCK_SIZE + draw(st.integers(0, 2 * BLOCK_SIZE + 1))
        tokens = draw(st.sampled_from([1, 1, 2, 7, 40]))
        own = -(-(start + tokens) // BLOCK_SIZE) - shared
        rows.append((start, tokens, trunk[:shared] + [free.pop() for _ in range(own)]))
    return Case(rows, draw(st.integers(0, 999)), draw(st.sampled_from([1, 2, 4])))


@given(
    case=cases(),
    generation=st.sampled_from(GENERATIONS),
    window=st.sampled_from([None, None, 1, 5, 70]),
    softcap=st.sampled_from([None, 3.0]),
    share=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_any_rows_come_out_as_from_the_reference(
    case: Case, generation: str, window: int | None, softcap: float | None, share: bool
) -> None:
    compare(make(FlashDouble(), generation), case, Scoring(0.2, window, softcap), share=share)


def test_the_pool_is_given_as_it_lies_and_never_copied() -> None:
    double, case = FlashDouble(), Case(MIXED)
    backend = make(double, "new")
    backend.begin(case.step())
    backend.attend(case.query, case.layer, Scoring(0.25))
    for _, given_ in double.calls:
        for name, part in (("k", KEYS), ("v", VALUES)):
            assert given_[name].data_ptr() == case.layer[:, part].data_ptr()
            assert given_[name].stride() == (
                LAYERS * 2 * BLOCK_SIZE * KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, HEAD_DIM, 1,
            )  # fmt: skip


def test_decodes_and_chunks_are_told_apart_and_windows_are_the_librarys() -> None:
    double, case = FlashDouble(), Case(MIXED)
    backend = make(double, "old")
    backend.begin(case.step())
    backend.attend(case.query, case.layer, Scoring(0.25, window=9, softcap=4.0))
    (first, decode), (second, chunks) = double.calls
    assert (first, second) == ("kvcache", "varlen")
    assert decode["cache_seqlens"].tolist() == [21, 7 * 16 + 1, 5 * 16 + 1]
    assert chunks["cu_seqlens_q"].tolist() == [0, 33, 54]
    assert chunks["cu_seqlens_k"].tolist() == [0, 33, 33 + 6 * 16 + 5 + 21]
    assert (chunks["max_seqlen_q"], chunks["max_seqlen_k"]) == (33, 122)
    for call in (decode, chunks):
        assert call["window_size"] == (8, 0)
        assert (call["softcap"], call["softmax_scale"], call["causal"]) == (4.0, 0.25, True)
        assert call["block_table"].shape[1] % 16 == 0, "a whole tile's blocks are looked up"
        assert int(call["block_table"].min()) >= 0
        assert int(call["block_table"].max()) < NUM_BLOCKS


def test_what_rows_begin_with_is_read_once_and_by_levels() -> None:
    double, case = FlashDouble(), Case(MIXED)
    backend = make(double, "new")
    backend.begin(case.step())
    backend.attend(case.query, case.layer, Scoring(0.25))
    shared = [given_ for _, given_ in double.calls if not given_["causal"]]
    assert [call["seqused_k"].tolist() for call in shared] == [[5 * 16]]
    assert shared[0]["cu_seqlens_q"].tolist() == [0, 23]
    assert shared[0]["block_table"][0, :5].tolist() == TRUNK[:5]
    assert all(call["return_softmax_lse"] for _, call in double.calls)


def test_the_plan_is_made_once_for_all_layers_of_a_kind() -> None:
    double, case = FlashDouble(), Case(MIXED)
    backend = make(double, "new")
    backend.begin(case.step(share=False))
    for window in (None, 5, None, 5):
        backend.attend(case.query, case.layer, Scoring(0.25, window))
    tables = {id(call["block_table"]) for _, call in double.calls}
    assert len(double.calls) == 8
    assert len(tables) == 4
    assert not any(call["return_softmax_lse"] for _, call in double.calls), "nothing is merged"


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_recorded_decode_step_names_only_tensors_that_stay(generation: str) -> None:
    double, case = FlashDouble(), Case([(20, 1, [3, 9]), (0, 1, [5]), (33, 1, [1, 2, 6])])
    backend = make(double, generation)
    assert isinstance(backend, GraphBackend)
    tables = torch.zeros(3, 3, dtype=torch.int32)
    for row, given_ in zip(tables, case.rows, strict=True):
        row[: len(given_.block_ids)] = torch.tensor(given_.block_ids, dtype=torch.int32)
    packed = case.step()
    lengths = (packed.positions + 1).to(torch.int32)
    step = DecodeStep(packed.positions, packed.blocks, packed.offsets, tables, lengths, BLOCK_SIZE)
    backend.begin_decode(step)
    output = backend.attend(case.query, case.layer, Scoring(0.25))
    torch.testing.assert_close(output.float(), case.expected(Scoring(0.25))[0].float(), atol=2e-2, rtol=2e-2)
    backend.begin_decode(step)
    backend.attend(case.query, case.layer, Scoring(0.25, window=4))
    before, after = (call for _, call in double.calls)
    for call in (before, after):
        assert call["block_table"] is tables
        assert call["cache_seqlens" if generation == "old" else "seqused_k"] is lengths
    if generation == "new":
        assert before["cu_seqlens_q"] is after["cu_seqlens_q"]
        assert before["max_seqlen_k"] == 48, "of the tables' width and no value"


def test_new_keys_and_values_are_written_where_they_belong_in_the_pools_format() -> None:
    case = Case(MIXED)
    backend, step = make(FlashDouble(), "new"), case.step()
    keys, values = torch.randn(2, len(case.query), KV_HEADS, HEAD_DIM)
    before = case.layer.clone()
    backend.begin(step)
    backend.write(keys, values, case.layer)
    assert torch.equal(case.layer[step.blocks, KEYS, step.offsets], keys.bfloat16())
    assert torch.equal(case.layer[step.blocks, VALUES, step.offsets], values.bfloat16())
    case.layer[step.blocks, :, step.offsets] = before[step.blocks, :, step.offsets]
    assert torch.equal(case.layer.nan_to_num(), before.nan_to_num())


def test_sinks_are_refused_and_so_is_a_call_outside_a_step() -> None:
    case, backend = Case(MIXED), make(FlashDouble(), "new")
    with pytest.raises(RuntimeError, match="outside a step"):
        backend.attend(case.query, case.layer, Scoring(0.25))
    backend.begin(case.step())
    with pytest.raises(RuntimeError, match="sinks"):
        backend.attend(case.query, case.layer, Scoring(0.25, sinks=torch.zeros(4)))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (AttentionShape(KVLayout(2, 2, 64, torch.float32), 4), "float16 and bfloat16, and the model is in torch.float"),
        (AttentionShape(KVLayout(2, 2, 264, torch.float16), 4), "heads are 264 numbers long"),
        (AttentionShape(KVLayout(2, 2, 36, torch.float16), 4), "multiples of 8 up to 256"),
        (AttentionShape(KVLayout(2, 2, 64, torch.float16, block_size=8), 4), "blocks hold 8 tokens"),
        (AttentionShape(LAYOUT, 4, sinks=True), "layers have sinks"),
    ],
)
def test_what_the_library_does_not_have_is_refused_by_its_reason(shape: AttentionShape, reason: str) -> None:
    with pytest.raises(AttentionUnavailableError, match=re.escape(reason)):
        refuse_shape(shape)
    refuse_shape(AttentionShape(LAYOUT, 4, windows=True, softcap=True))


def test_on_a_cpu_it_is_not_even_looked_for() -> None:
    with pytest.raises(AttentionUnavailableError, match="it runs on a CUDA device, and the model on cpu"):
        flash_attention(AttentionShape(LAYOUT, 4), CPU)


@pytest.mark.parametrize(
    ("generation", "capability", "reason"),
    [
        ("old", (7, 5), "compute capabilities 8.0 to 9.0, and cuda:0 has 7.5"),
        ("old", (12, 0), "8.0 to 9.0, and cuda:0 has 12.0"),
        ("new", (7, 0), "8.0 and more, and cuda:0 has 7.0"),
        ("old", (8, 9), None),
        ("old", (9, 0), None),
        ("new", (12, 0), None),
    ],
)
def test_devices_without_machine_code_are_refused(
    generation: str, capability: tuple[int, int], reason: str | None
) -> None:
    functions = FlashFunctions(getattr(FlashDouble(), generation)())
    if reason is None:
        functions.refuse_device(CUDA, capability)
    else:
        with pytest.raises(AttentionUnavailableError, match=re.escape(reason)):
            functions.refuse_device(CUDA, capability)


def test_what_a_release_says_of_a_device_is_heard() -> None:
    module = FlashDouble().new()
    module.fa_version_unsupported_reason = lambda version, device: f"no FA{version} on {device}"
    with pytest.raises(AttentionUnavailableError, match="no FA2 on cuda:0"):
        FlashFunctions(module).refuse_device(CUDA, (9, 0))


def without(*names: str) -> Any:
    """A function that takes what release 2.6 takes, but for some of it."""
    taken = {"cu_seqlens_k", "block_table", "softcap", "window_size", "return_attn_probs"}.difference(names)
    scope: dict[str, Any] = {}
    exec(f"def varlen(q, {', '.join(sorted(taken))}): pass", scope)
    return scope["varlen"]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (SimpleNamespace(__name__="m"), "m is a release without varlen"),
        (SimpleNamespace(__name__="m", flash_attn_varlen_func=without("softcap")), "without block tables, softcap and"),
        (SimpleNamespace(__name__="m", flash_attn_varlen_func=without("block_table")), "it takes q, cu_seqlens_k"),
        (SimpleNamespace(__name__="m", flash_attn_varlen_func=without()), "m is a release without kvcache"),
    ],
)
def test_a_release_that_is_not_known_is_refused(module: Any, reason: str) -> None:
    with pytest.raises(AttentionUnavailableError, match=re.escape(reason)):
        FlashFunctions(module)


def test_the_package_is_found_by_itself_or_inside_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = dict.fromkeys(PACKAGES, ModuleNotFoundError("No module", name="vllm_flash_attn"))
    modules: dict[str, Any] = {**missing, "vllm.vllm_flash_attn": ModuleNotFoundError("No module", name="vllm")}

    def import_module(name: str) -> Any:
        if isinstance(modules[name], Exception):
            raise modules[name]
        return modules[name]

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(AttentionUnavailableError, match=r"vllm_flash_attn is not installed; vllm\.vllm_flash_attn is"):
        find_flash_functions()
    modules["vllm_flash_attn"] = ImportError("undefined symbol: _ZN3c10")
    with pytest.raises(AttentionUnavailableError, match="vllm_flash_attn cannot be imported: undefined symbol"):
        find_flash_functions()
    modules["vllm.vllm_flash_attn"] = FlashDouble().new()
    assert not find_flash_functions().old
    modules["vllm_flash_attn"] = FlashDouble().old()
    assert find_flash_functions().old
