"""Whole engines on the device: what is cached, copied, recorded or launched ahead changes no token."""

from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.bench_engine import BenchEngine
from prefixgate.worker.device_sampler import Awaited, Outcome
from prefixgate.worker.limits import Limits
from prefixgate.worker.transformers_runner import TransformersRunner

if TYPE_CHECKING:
    from benchmarks.gpu_rig import Rig

NUM_BLOCKS = 400
TOKENS = 24 if torch.cuda.is_available() else 6


@pytest.fixture(scope="module")
def exact(rig: "Rig") -> "Rig":
    """The device in float32: in less, rounding that moves with the shape of a batch can change the likeliest token."""
    return rig._replace(dtype=torch.float32)


@pytest.fixture(scope="module")
def model(exact: "Rig") -> Any:
    from benchmarks.gpu_rig import SMALL, TINY

    model = exact.model(SMALL if exact.is_cuda else TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Large enough that every slot changes every logit.
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model


def engine_over(
    exact: "Rig", model: Any, *, graphs: bool = True, ahead: bool = True, share: bool = True
) -> BenchEngine:
    from prefixgate.worker.probe import survey

    storage = exact.storage(NUM_BLOCKS, survey(model).layout)
    storage.data.fill_(float("nan"))
    runner = exact.runner(model, storage, graphs=graphs, share=share)
    runner.is_ahead = ahead
    return BenchEngine(runner, Limits(max_batch_tokens=300, max_running=16, max_waiting=99), poison=True)


def prompts(seed: int = 0) -> list[list[int]]:
    """Beginnings that are shared whole, in part and not at all."""
    trunk = [(7 * i + seed) % 90 + 5 for i in range(150)]
    return [
        [*trunk, 6, 7, 8],
        trunk[:100] + [9] * 20,
        trunk[:71],
        [11, 12],
        [(5 * i) % 80 + 9 for i in range(65)],
        [*trunk, 6, 7, 9, 10],
    ]


def outputs(bench: BenchEngine) -> list[list[int]]:
    found = bench.generate(prompts(), TOKENS)
    bench.cache.check_integrity()
    return found


def test_what_is_found_in_the_cache_gives_the_tokens_that_computing_gives(exact: "Rig", model: Any) -> None:
    cold = [engine_over(exact, model, graphs=False).generate([prompt], TOKENS)[0] for prompt in prompts()]
    bench = engine_over(exact, model)
    assert outputs(bench) == cold
    before = bench.engine.report().computed_tokens
    assert outputs(bench) == cold
    again = bench.engine.report().computed_tokens - before
    assert again < before / 2, "most of it was found the second time"
    assert len({tuple(tokens) for tokens in cold}) == len(cold)


@pytest.fixture(scope="module")
def plain(exact: "Rig", model: Any) -> list[list[int]]:
    """What is heard where nothing is recorded, launched ahead or shared."""
    return outputs(engine_over(exact, model, graphs=False, ahead=False, share=False))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_no_way_of_running_a_step_changes_a_token(
    exact: "Rig", model: Any, plain: list[list[int]], *, graphs: bool, ahead: bool, share: bool
) -> None:
    bench = engine_over(exact, model, graphs=graphs, ahead=ahead, share=share)
    assert outputs(bench) == plain
    runner = bench.runner
    assert isinstance(runner, TransformersRunner)
    if graphs:
        assert runner.graphs is not None
        assert not runner.graphs.failed
        assert runner.graphs.shapes


def test_outputs_of_one_call_part_by_a_copy(exact: "Rig", model: Any) -> None:
    bench = engine_over(exact, model)
    prompt = prompts()[2]
    request = bench.submit(prompt, TOKENS, n=3)
    bench.run()
    tokens = bench.take(request)
    (alone,) = engine_over(exact, model, graphs=False).generate([prompt], TOKENS)
    # Greedy: three times the same, taken in turns.
    assert sorted(tokens) == sorted(alone * 3)
    assert bench.engine.report().copied_blocks >= 2


def test_a_step_is_launched_without_a_question_to_the_device(
    exact: "Rig", model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exact.is_cuda:
        pytest.skip("torch tells of questions to a CUDA device only")
    bench = engine_over(exact, model)
    for prompt in prompts():
        bench.submit(prompt, 60)
    for _ in range(12):  # kernels are compiled and graphs recorded by then
        bench.engine.step()
    wait = Awaited.wait
    waited: list[int] = []

    def allowed(awaited: Awaited) -> Outcome:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return wait(awaited)
        finally:
            waited.append(1)
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(Awaited, "wait", allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            bench.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waited) == 20
    bench.run()
