"""Decode steps that are recorded and run again: the same logits, whatever fills the batch up, and no foreign block."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from prefixgate.cache.kv_storage import TorchKVStorage
from prefixgate.worker.attention import GraphBackend
from prefixgate.worker.graph_shapes import MIN_WIDTH, SIZES, graph_size, graph_width, is_decode, saves_by_sharing
from prefixgate.worker.model_runner import ModelSpec, Row, TextAssets
from prefixgate.worker.probe import survey
from prefixgate.worker.sdpa_attention import SdpaBackend
from prefixgate.worker.transformers_runner import TransformersRunner, recorder_for
from tests.worker.driver import Driver
from tests.worker.graph_doubles import GatheringBackend, TracingRecorder
from tests.worker.tiny_models import CONTEXT, SCOPE, VOCABULARY, llama_config, make_model, row

NUM_BLOCKS = 40


def make_runner(model: Any, *, recorder: TracingRecorder | None = None, share: bool = True) -> TransformersRunner:
    """Put a model over a pool in which every slot is poisoned, the scratch block's too."""
    layout = survey(model).layout
    storage = TorchKVStorage(NUM_BLOCKS, layout, scratch=True)
    storage.poison(range(NUM_BLOCKS + 1))
    spec = ModelSpec("tiny", "1", VOCABULARY, (2,), CONTEXT, layout, TextAssets(b""))
    return TransformersRunner(model, spec, storage, GatheringBackend(), record=recorder, share_prefixes=share)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(llama_config())


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + position * 7 + 3) % VOCABULARY for position in range(length)]


def prefilled(runner: TransformersRunner, lengths: Sequence[int]) -> list[list[int]]:
    """Fill the pool with sequences over scattered blocks. Returns their tables, with room for a block more."""
    order = [(block * 17 + 5) % NUM_BLOCKS for block in range(NUM_BLOCKS)]
    tables: list[list[int]] = []
    for seed, length in enumerate(lengths):
        count = length // 16 + 2
        tables.append([order.pop() for _ in range(count)])
        runner.forward([row(prompt(seed, length), 0, tables[-1])])
    return tables


def decode_rows(lengths: Sequence[int], tables: Sequence[list[int]], step: int) -> list[Row]:
    return [row([(step * 13 + i) % VOCABULARY], length + step, tables[i]) for i, length in enumerate(lengths)]


@given(st.lists(st.integers(2, 40), min_size=1, max_size=9), st.integers(1, 5))
@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
def test_a_recorded_step_gives_the_logits_of_one_that_is_not(model: Any, lengths: list[int], steps: int) -> None:
    # Which function the layers call is a state of the model: one runner after the other.
    found: list[list[torch.Tensor]] = []
    recorder = TracingRecorder()
    for record in (None, recorder):
        runner = make_runner(model, recorder=record)
        tables = prefilled(runner, lengths)
        found.append([runner.forward(decode_rows(lengths, tables, step)) for step in range(steps)])
    for plain, recorded in zip(*found, strict=True):
        assert recorded.isfinite().all()
        torch.testing.assert_close(recorded, plain, rtol=1e-4, atol=1e-4)
    assert [traced.replays for traced in recorder.recorded] == [steps]


def test_what_fills_a_batch_up_touches_the_scratch_block_alone(model: Any) -> None:
    lengths = [5, 17, 33]
    runner = make_runner(model, recorder=TracingRecorder())
    tables = prefilled(runner, lengths)
    data, scratch = runner.storage.data, runner.storage.scratch
    assert scratch == NUM_BLOCKS
    for step in range(3):
        before = data.clone()
        runner.forward(decode_rows(lengths, tables, step))
        changed = (data != before) & ~(data.isnan() & before.isnan())
        slots = {tuple(index) for index in changed.any(dim=(1, 2)).any(dim=(2, 3)).nonzero().tolist()}
        written = {(tables[i][(n + step) // 16], (n + step) % 16) for i, n in enumerate(lengths)}
        assert written <= slots <= written | {(scratch, 0)}
    assert runner.graphs is not None
    assert runner.graphs.shapes == [(4, 16)]


def test_rows_that_leave_and_join_and_tables_that_grow_are_those_of_the_step(model: Any) -> None:
    lengths = [15, 16, 40, 31, 7]
    batches = [[0, 1, 2], [0, 1, 2, 3, 4], [4, 2], [3], [1, 3, 0, 4], [2, 1, 0]]
    found: list[list[torch.Tensor]] = []
    for record in (None, TracingRecorder()):
        runner = make_runner(model, recorder=record)
        tables = prefilled(runner, lengths)
        now = list(lengths)
        logits: list[torch.Tensor] = []
        for step, batch in enumerate(batches):
            if step == 3:
                # A block is exchanged for an equal one, as publishing does with twins.
                twin = next(block for block in range(NUM_BLOCKS) if all(block not in table for table in tables))
                runner.storage.data[twin] = runner.storage.data[tables[3][0]]
                tables[3][0] = twin
            logits.append(runner.forward([row([step + i], now[i], tables[i]) for i in batch]))
            for i in batch:
                now[i] += 1
        found.append(logits)
    for plain, recorded in zip(*found, strict=True):
        torch.testing.assert_close(recorded, plain, rtol=1e-4, atol=1e-4)


def test_tokens_that_only_the_device_knows_are_taken_from_there(model: Any) -> None:
    lengths = [5, 20, 9]
    runner = make_runner(model, recorder=TracingRecorder())
    tables = prefilled(runner, lengths)
    rows = decode_rows(lengths, tables, 0)
    expected = runner.forward(rows)
    token_ids = torch.tensor([row.token_ids[0] for row in rows])
    unknown = [row._replace(token_ids=(0,)) for row in rows]
    assert torch.equal(runner.forward_ahead(unknown, token_ids), expected)
    runner = make_runner(model)
    prefilled(runner, lengths)
    torch.testing.assert_close(runner.forward_ahead(unknown, token_ids), expected, rtol=1e-4, atol=1e-4)


def test_logits_outlast_the_next_step(model: Any) -> None:
    runner = make_runner(model, recorder=TracingRecorder())
    tables = prefilled(runner, [5, 20])
    first = runner.forward(decode_rows([5, 20], tables, 0))
    kept = first.clone()
    runner.forward(decode_rows([5, 20], tables, 1))
    assert torch.equal(first, kept)


def test_steps_with_prompts_in_them_are_not_recorded(model: Any) -> None:
    recorder = TracingRecorder()
    runner = make_runner(model, recorder=recorder)
    tables = prefilled(runner, [5, 20])
    runner.forward([row([1], 5, tables[0]), row([1, 2], 20, tables[1])])
    runner.forward([row([1], 6, tables[0], needs_logits=False)])
    assert recorder.recorded == []


def test_where_recording_fails_steps_run_without_from_then_on(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    lengths = [5, 20]
    recorder = TracingRecorder()
    runner, plain = make_runner(model, recorder=recorder), make_runner(model)
    tables = prefilled(plain, lengths)
    expected = [plain.forward(decode_rows(lengths, tables, step)) for step in range(4)]
    runner = make_runner(model, recorder=recorder)
    prefilled(runner, lengths)
    found = [runner.forward(decode_rows(lengths, tables, 0))]
    recorder.fails = True
    # Another size comes up, whose recording fails: it, and what was recorded before, runs as it is.
    runner.forward([row([3], 26, tables[1])])
    found += [runner.forward(decode_rows(lengths, tables, step)) for step in range(1, 4)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert runner.graphs is not None
    assert (runner.graphs.failed, runner.graphs.shapes) == (True, [])
    assert len([record for record in caplog.records if "could not be recorded" in record.message]) == 1
    assert recorder.recorded[0].replays == 1


def test_an_engine_over_recorded_steps_says_the_same(model: Any) -> None:
    def outputs(recorder: TracingRecorder | None, *, is_ahead: bool) -> list[dict[int, list[int]]]:
        runner = make_runner(model, recorder=recorder)
        driver = Driver(NUM_BLOCKS, runner=runner, is_ahead=is_ahead)
        # Equal prompts among them: shared blocks, hits and copies over a pool whose fresh blocks hold NaN.
        prompts = [prompt(0, 40), prompt(0, 40), prompt(1, 17), [*prompt(0, 36), 5, 6], prompt(2, 3)]
        calls = [driver.ask(prompts[0], 6)] + [driver.submit(token_ids, 20) for token_ids in prompts]
        driver.run()
        driver.assert_idle()
        assert all(call.end is not None and call.end.code.name == "OK" for call in calls)
        return [call.outputs for call in calls]

    recorder = TracingRecorder()
    plain = outputs(None, is_ahead=False)
    assert outputs(recorder, is_ahead=False) == plain
    assert sum(traced.replays for traced in recorder.recorded) > 10
    assert outputs(TracingRecorder(), is_ahead=True) == plain


class TestShapes:
    @given(st.integers(1, 300))
    def test_a_graph_is_large_enough_and_not_much_too_large(self, rows: int) -> None:
        size = graph_size(rows)
        if rows > SIZES[-1]:
            assert size is None
        else:
            assert size is not None
            assert rows <= size < 2 * rows
            assert rows <= 16 or size <= 1.5 * rows

    @given(st.integers(1, 5000), st.integers(1, 5000))
    def test_tables_have_room_for_the_longest(self, blocks: int, max_blocks: int) -> None:
        blocks = min(blocks, max_blocks)
        assert blocks <= graph_width(blocks, max_blocks) <= max_blocks
        widths = {graph_width(count, max_blocks) for count in range(1, max_blocks + 1, 7)}
        assert len(widths) <= 5
        assert graph_width(1, max_blocks) == min(MIN_WIDTH, max_blocks)

    def test_a_decode_step_is_one_token_each_with_its_logits(self) -> None:
        one, two = row([1], 3, [0]), row([1, 2], 3, [0])
        assert is_decode([one, one])
        assert not is_decode([one, two])
        assert not is_decode([one._replace(needs_logits=False)])

    def test_what_much_is_shared_in_runs_without_a_graph(self) -> None:
        # 512 KiB of KV for each token of 32 layers: 16,384 slots read once and not several times are worth it.
        trunk = list(range(16))

        def step(users: int, shared: int) -> list[Row]:
            tables = [trunk[:shared] + [100 + 20 * i + j for j in range(16 - shared + 1)] for i in range(users)]
            return [Row([1], 256, table, SCOPE, True) for table in tables]

        def saves(rows: Sequence[Row]) -> bool:
            return saves_by_sharing(rows, 16, 512 * 1024, 32)

        assert not saves(step(64, 16))
        assert saves(step(66, 16))
        assert not saves(step(66, 8))
        assert not saves(step(256, 0))
        assert saves(step(256, 5))


def test_graphs_are_recorded_where_there_is_a_device_and_a_backend_for_them() -> None:
    layout = survey(make_model(llama_config())).layout
    storage = TorchKVStorage(2, layout, scratch=True)
    assert isinstance(GatheringBackend(), GraphBackend)
    assert not isinstance(SdpaBackend(), GraphBackend)
    assert recorder_for(storage, GatheringBackend()) is None, "a CPU has no launches to save"
    on_device = TorchKVStorage(2, layout, device="meta", scratch=True)
    assert recorder_for(on_device, GatheringBackend()) is None
