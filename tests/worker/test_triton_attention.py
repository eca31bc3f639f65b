"""The Triton backend against attention written out, its kernels run by Triton's interpreter on the CPU."""

import copy
import os
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig

from prefixgate.cache.kv_storage import KVLayout
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
from prefixgate.worker.attention_check import check_attention
from prefixgate.worker.model_runner import Row
from prefixgate.worker.sdpa_attention import SdpaBackend
from prefixgate.worker.triton_attention import TritonAttention, triton_attention
from tests.worker.attention_cases import CPU, KV_HEADS, SCOPE, Case, attend_by_hand, cases
from tests.worker.tiny_models import SIZES, make_model, make_runner
from tests.worker.tiny_models import row as model_row

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="here Triton compiles: see tests/gpu"),
    # The interpreter computes with numpy, which tells of each NaN that a test means.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton"),
]
MANY = 16
"""Processors to keep busy: more than a small step has programs for, so that its slots are cut."""


@pytest.fixture(scope="module")
def backend() -> TritonAttention:
    triton = pytest.importorskip("triton")
    if Version(triton.__version__) < Version("3.7") and Version(np.__version__) >= Version("2.4"):
        pytest.skip(f"the interpreter of Triton {triton.__version__} needs numpy below 2.4, not {np.__version__}")
    return TritonAttention(MANY)


def random_case(lengths: list[int], scoring: Scoring, *, tokens: int = 1, head_dim: int = 16, group: int = 2) -> Case:
    """Make rows of these lengths whose last tokens attend, over blocks in no order; what nobody wrote is NaN."""
    random = torch.Generator().manual_seed(sum(lengths))
    counts = [-(-length // 16) for length in lengths]
    layer = torch.full((sum(counts) + 1, 2, 16, KV_HEADS, head_dim), float("nan"))
    free = torch.randperm(sum(counts), generator=random).tolist()
    rows = []
    for length, count in zip(lengths, counts, strict=True):
        table = [free.pop() for _ in range(count)]
        for index, block in enumerate(table):
            layer[block, :, : length - 16 * index] = torch.randn(layer[block].shape, generator=random)[
                :, : length - 16 * index
            ]
        rows.append(Row([0] * tokens, length - tokens, table, SCOPE, True))
    query = torch.randn(len(lengths) * tokens, KV_HEADS * group, head_dim, generator=random)
    return Case(rows, layer, query, 16, scoring)


def check(backend: TritonAttention, case: Case, *, share: bool = True, tolerance: float = 1e-5) -> None:
    backend.begin(case.step(share=share))
    found = backend.attend_with_lse(case.query, case.layer, case.scoring)
    torch.testing.assert_close(found, attend_by_hand(case), rtol=tolerance, atol=tolerance)


@given(case=cases(most_rows=3, most_tokens=12))
@settings(max_examples=8)
def test_attention_is_what_its_definition_says(backend: TritonAttention, case: Case) -> None:
    check(backend, case)


@given(case=cases(torch.float16, most_rows=2, most_tokens=9))
@settings(max_examples=3)
def test_float16_is_accumulated_in_float32(backend: TritonAttention, case: Case) -> None:
    check(backend, case, tolerance=4e-3)


@pytest.fixture(scope="module")
def bfloat16_products() -> Iterator[None]:
    """The interpreter keeps bfloat16 as its bits, and would multiply those."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    language = pytest.importorskip("triton.language")
    product = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != language.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), language.float32)

    def create_dot(builder: Any, left: Any, right: Any, *rest: Any) -> Any:
        return product(builder, widened(left), widened(right), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


@given(case=cases(torch.bfloat16, most_rows=2, most_tokens=9))
@settings(max_examples=3)
@pytest.mark.usefixtures("bfloat16_products")
def test_bfloat16_is_accumulated_in_float32(backend: TritonAttention, case: Case) -> None:
    check(backend, case, tolerance=2e-2)


@pytest.mark.parametrize(
    "scoring", [Scoring(0.3), Scoring(0.3, window=700), Scoring(0.3, softcap=3.0, sinks=torch.tensor([1.0, -2, 0, 9]))]
)
def test_a_long_row_is_cut_and_merged_beside_short_ones(backend: TritonAttention, scoring: Scoring) -> None:
    check(backend, random_case([1500, 3, 530], scoring))


def test_a_chunk_behind_a_long_prefix_is_cut_by_slots(backend: TritonAttention) -> None:
    check(backend, random_case([900], Scoring(0.3), tokens=20))


def test_more_tokens_than_a_tile_holds(backend: TritonAttention) -> None:
    check(backend, random_case([40, 90], Scoring(0.3, window=33), tokens=37))


def test_more_query_heads_for_a_kv_head_than_the_least_tile_has_rows(backend: TritonAttention) -> None:
    check(backend, random_case([20], Scoring(0.3), group=71))


def test_rows_that_share_a_long_beginning_attend_to_it_together(backend: TritonAttention) -> None:
    case = random_case([640, 16, 16, 16], Scoring(0.3, window=500))
    trunk = case.rows[0].block_ids
    case.rows[1:] = [Row([0], 640 + 7, [*trunk, *row.block_ids], SCOPE, True) for row in case.rows[1:]]
    assert any(len(segment.rows) == 4 for segment in case.step(share=True).segments)
    check(backend, case)


def test_it_passes_the_check_before_it_serves(backend: TritonAttention) -> None:
    shape = AttentionShape(KVLayout(2, 1, 40, torch.float16), 2, windows=True, softcap=True, sinks=True)
    check_attention(backend, shape, CPU)


def test_a_model_with_windows_and_sinks_computes_the_same_over_it(backend: TritonAttention) -> None:
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = GptOssConfig(**sizes, head_dim=8, sliding_window=12, layer_types=["sliding_attention", "full_attention"])
    model = make_model(config)
    # Each takes the model's layers for itself, so that they run one after the other.
    ours, expected = (
        [runner.forward(step) for step in model_steps()]
        for runner in (make_runner(copy.deepcopy(model), backend=each) for each in (backend, SdpaBackend()))
    )
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def model_steps() -> list[list[Row]]:
    """Two prompts in chunks beside each other, and a token after each."""
    first, second = list(range(3, 36)), list(range(50, 60))
    return [
        [model_row(first[:20], 0, [4, 2])],
        [model_row(first[20:], 20, [4, 2, 7]), model_row(second, 0, [5])],
        [model_row([9], 33, [4, 2, 7]), model_row([8], 10, [5])],
    ]


class DecodeBatch:
    """A decode step in tensors that stay, and the rows that are in them."""

    def __init__(self, rows: int, width: int, scratch: int) -> None:
        self.step = DecodeStep(
            positions=torch.zeros(rows, dtype=torch.int64),
            blocks=torch.full((rows,), scratch),
            offsets=torch.zeros(rows, dtype=torch.int64),
            tables=torch.full((rows, width), scratch, dtype=torch.int32),
            lengths=torch.ones(rows, dtype=torch.int32),
            block_size=16,
        )
        self._scratch = scratch

    def fill(self, rows: list[Row]) -> None:
        self.step.tables.fill_(self._scratch)
        self.step.lengths.fill_(1)
        for index, row in enumerate(rows):
            self.step.tables[index, : len(row.block_ids)] = torch.tensor(row.block_ids)
            self.step.lengths[index] = row.start + 1


def test_a_decode_step_attends_over_whatever_its_tensors_hold(backend: TritonAttention) -> None:
    assert isinstance(backend, GraphBackend)
    batch = DecodeBatch(rows=4, width=70, scratch=0)
    for lengths in ([33, 1100, 16], [700, 1, 17]):
        case = random_case(lengths, Scoring(0.3, sinks=torch.randn(4)))
        batch.fill(case.rows)
        backend.begin_decode(batch.step)
        query = torch.cat([case.query, torch.zeros(1, *case.query.shape[1:])])
        outputs, sums = backend.attend_with_lse(query, case.layer, case.scoring)
        torch.testing.assert_close((outputs[:3], sums[:3]), attend_by_hand(case), rtol=1e-5, atol=1e-5)


class Recorder:
    """Stands where a kernel stands, and writes down what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            told = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            self.launches.append((grid, told, options))

        return launch


class Calls(TorchDispatchMode):
    """Writes down which operators of torch run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def recorders(backend: TritonAttention, monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    from prefixgate.worker import triton_kernels

    made = []
    for name in ("attend", "merge", "store"):
        made.append(Recorder())
        monkeypatch.setattr(triton_kernels, name, made[-1])
    return made


def test_a_decode_step_does_the_same_on_the_host_whatever_its_tensors_hold(
    backend: TritonAttention, recorders: list[Recorder]
) -> None:
    """What a graph records must be right for all that it is run for later."""
    batch = DecodeBatch(rows=4, width=70, scratch=0)
    keys = torch.randn(4, KV_HEADS, 16)
    seen = []
    case = random_case([5, 40, 1000], Scoring(0.3))
    query = torch.randn(4, 4, 16)
    backend.begin_decode(batch.step)
    backend.attend(query, case.layer, case.scoring)  # lays out the work of this shape, which is no work of the step
    for rows in (case.rows, case.rows[:1]):
        batch.fill(rows)
        for recorder in recorders:
            recorder.launches.clear()
        with Calls() as calls:
            backend.begin_decode(batch.step)
            backend.write(keys, keys, case.layer)
            backend.attend(query, case.layer, case.scoring)
        assert calls.names <= {"empty"}, "nothing is looked up or copied"
        # Outputs and parts are new tensors each time: a graph has them in its own memory.
        seen.append([(grid, len(told), told[5:], options) for r in recorders for grid, told, options in r.launches])
    assert seen[0] == seen[1]
    assert [len(recorder.launches) for recorder in recorders] == [1, 1, 1]


@pytest.mark.parametrize("windows", [False, True])
def test_all_programs_of_a_model_are_compiled_before_it_serves(
    backend: TritonAttention, recorders: list[Recorder], windows: bool
) -> None:
    shape = AttentionShape(KVLayout(2, 2, 64, torch.float16), 14, windows, softcap=True, sinks=True)
    backend.prepare(shape, CPU)
    names = ("ROWS", "FINAL", "WINDOW", "SOFTCAP", "SINKS")
    attend, merge, store = ([options for _, _, options in recorder.launches] for recorder in recorders)
    seen = {tuple(options[name] for name in names) for options in attend}
    assert seen == set(product((16, 64, 128), (True, False), {False, windows}, (True,), (True,)))
    assert merge
    assert store


@given(case=cases(most_rows=2, most_tokens=5))
@settings(max_examples=3)
def test_tokens_are_written_where_their_rows_say(backend: TritonAttention, case: Case) -> None:
    key, value = (
        torch.randn(KV_HEADS, len(case.query), case.query.shape[2]).transpose(0, 1) for _ in range(2)
    )  # as layers give them: heads first in memory
    before = case.layer.clone()
    backend.begin(case.step(share=True))
    backend.write(key, value, case.layer)
    for token, (row, length) in enumerate(case.lengths()):
        slot = (row.block_ids[(length - 1) // case.block_size], slice(None), (length - 1) % case.block_size)
        before[slot] = torch.stack([key[token], value[token]])
    assert torch.equal(case.layer.nan_to_num(7), before.nan_to_num(7))


def test_a_layer_of_a_pool_of_more_elements_than_32_bits_count(backend: TritonAttention) -> None:
    shape = (3, 2, 16, KV_HEADS, 16)
    # Memory that is never touched is never there.
    far = torch.empty(2**31 + 4096, dtype=torch.float16).as_strided(shape, (2**30, 512 * 2, 32, 16, 1))
    far[2] = torch.randn(shape[1:])
    query = torch.randn(1, 2, 16, dtype=torch.float16)
    key = torch.randn(1, KV_HEADS, 16, dtype=torch.float16)
    backend.begin(PackedStep([Row([0], 15, [2], SCOPE, True)], 16, CPU))
    backend.write(key, -key, far)
    assert torch.equal(far[2, KEYS, 15], key[0])
    assert torch.equal(far[2, VALUES, 15], -key[0])
    found = backend.attend(query, far, Scoring(0.3))
    near = far[2:].clone()
    backend.begin(PackedStep([Row([0], 15, [0], SCOPE, True)], 16, CPU))
    assert torch.equal(found, backend.attend(query, near, Scoring(0.3)))


@pytest.mark.parametrize("part", [KEYS, VALUES])
def test_a_slot_that_is_no_number_spoils_those_who_see_it_and_nobody_else(backend: TritonAttention, part: int) -> None:
    case = random_case([27, 5, 600], Scoring(1))
    case.layer[case.rows[0].block_ids[0], part, 2] = float("nan")
    case.layer[case.rows[2].block_ids[3], part, 2] = float("nan")
    backend.begin(case.step(share=True))
    output = backend.attend(case.query, case.layer, case.scoring)
    assert output.isnan().any(dim=-1).any(dim=-1).tolist() == [True, False, True]
    assert output[1].isfinite().all()


def test_attention_outside_a_step_is_an_error() -> None:
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="outside a step"):
        TritonAttention(MANY).attend(torch.zeros(1, 2, 8), torch.zeros(1, 2, 4, 2, 8), Scoring(1))


@pytest.mark.parametrize(
    ("layout", "device", "reason"),
    [
        (KVLayout(1, 2, 64, torch.float16), "cpu", "runs on a CUDA device, and the model on cpu"),
        (KVLayout(1, 2, 64, torch.float64), "cuda", "the model is in torch.float64"),
        (KVLayout(1, 2, 288, torch.float16), "cuda", "heads are 288 numbers long, and it computes up to 256"),
    ],
)
def test_the_reason_why_it_cannot_serve_a_model(layout: KVLayout, device: str, reason: str) -> None:
    with pytest.raises(AttentionUnavailableError, match=reason):
        triton_attention(AttentionShape(layout, 4), torch.device(device))


def test_without_triton_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(AttentionUnavailableError, match="triton is not installed"):
        triton_attention(AttentionShape(KVLayout(1, 2, 64, torch.float16), 4), torch.device("cuda"))
