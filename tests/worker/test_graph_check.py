"""Recorded decode steps are tried before a worker serves, and given up where they do not give the same."""

from typing import Any

import pytest

from prefixgate.worker.decode_graphs import Recording
from prefixgate.worker.graph_check import check_graphs
from tests.worker.graph_doubles import TracingRecorder
from tests.worker.test_decode_graphs import make_runner
from tests.worker.tiny_models import llama_config, make_model


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(llama_config())


def test_steps_that_agree_are_recorded_from_the_start(model: Any) -> None:
    runner = make_runner(model, recorder=TracingRecorder())
    assert check_graphs(runner) == "decode steps are recorded as CUDA graphs"
    assert runner.graphs is not None
    assert runner.graphs.shapes == [(4, 16)]


def test_without_a_recorder_there_is_nothing_to_try(model: Any) -> None:
    assert check_graphs(make_runner(model)) == "decode steps are launched kernel by kernel"


def test_a_model_that_cannot_be_recorded_is_served_all_the_same(model: Any) -> None:
    recorder = TracingRecorder()
    recorder.fails = True
    runner = make_runner(model, recorder=recorder)
    assert "recording one failed" in check_graphs(runner)
    assert runner.graphs is None


def test_a_recording_that_gives_something_else_is_not_used(model: Any) -> None:
    class Stale(TracingRecorder):
        """Replays what it was recorded with."""

        def __call__(self, work: Any) -> Any:
            recording: Recording = super().__call__(work)
            recording.replay = lambda: recording.output.mul_(1.5)  # type: ignore[method-assign, assignment]
            return recording

    runner = make_runner(model, recorder=Stale())
    assert "differs by" in check_graphs(runner)
    assert runner.graphs is None
