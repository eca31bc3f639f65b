"""A whole step goes to the device without one question to it, and comes back in one copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.cache.kv_storage import TorchKVStorage
from prefixgate.worker import device_sampler
from prefixgate.worker.model_runner import ModelSpec, TextAssets
from prefixgate.worker.probe import survey
from prefixgate.worker.request import SamplingParams
from prefixgate.worker.sdpa_attention import SdpaBackend
from prefixgate.worker.transfers import Readback, refill, upload
from prefixgate.worker.transformers_runner import TransformersRunner
from tests.worker.driver import Driver
from tests.worker.tiny_models import CONTEXT, VOCABULARY, llama_config, make_model


class EmptyReadback:
    """Stands for the copy from a device whose tensors hold nothing: it brings zeros, and counts itself."""

    made = 0

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        assert {part.device.type for part in parts} == {"meta"}
        EmptyReadback.made += 1
        self._parts = parts

    def wait(self) -> list[npt.NDArray[Any]]:
        return [
            np.ones(part.shape, bool) if part.dtype == torch.bool else np.zeros(part.shape, np.int64)
            for part in self._parts
        ]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5),
    reason="torch before 2.5 refuses what rotary embeddings do around tensors without values",
)
@pytest.mark.parametrize(
    "samplings",
    [
        [SamplingParams(6)] * 3,
        [SamplingParams(6, temperature=1.0, top_p=0.9), SamplingParams(6, temperature=0.7, top_k=5)],
        [SamplingParams(6, repetition_penalty=1.2), SamplingParams(6, logit_bias=((3, 1.0),), min_tokens=3)],
    ],
    ids=["greedy", "sampled", "edited"],
)
def test_each_step_is_one_copy_to_the_host_and_no_question(
    samplings: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On "meta" tensors have shapes and no values. A question to one raises, and would end the call.
    monkeypatch.setattr(device_sampler, "Readback", EmptyReadback)
    monkeypatch.setattr(EmptyReadback, "made", 0)
    model = make_model(llama_config())
    layout = survey(model).layout
    storage = TorchKVStorage(32, layout, device="meta")
    spec = ModelSpec("tiny", "1", VOCABULARY, (2,), CONTEXT, layout, TextAssets(b""))
    runner = TransformersRunner(model.to("meta"), spec, storage, SdpaBackend())
    runner.is_ahead = True
    driver = Driver(32, runner=runner, is_ahead=True)
    calls = [
        driver.submit([3 + seed, *range(5, 25)], sampling=sampling, n=1 + seed % 2)
        for seed, sampling in enumerate(samplings)
    ]
    driver.run()
    assert [call.outputs for call in calls] == [{i: [0] * 6 for i in range(call.request.n)} for call in calls]
    assert EmptyReadback.made == len(driver.runner.steps)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from("ibf")), min_size=1, max_size=5))
def test_what_comes_back_is_what_was_sent(shapes: list[tuple[int, int, str]]) -> None:
    random = torch.Generator().manual_seed(0)
    parts = [
        {
            "i": torch.randint(-(2**62), 2**62, shape, generator=random),
            "b": torch.randint(0, 2, shape, generator=random).bool(),
            "f": torch.randn(shape, generator=random, dtype=torch.float64) * float("inf" if shape[0] == 3 else 1),
        }[kind]
        for *shape, kind in shapes
    ]
    for part, found in zip(parts, Readback(parts).wait(), strict=True):
        assert found.shape == tuple(part.shape)
        np.testing.assert_array_equal(found, part.numpy())


def test_numbers_go_up_and_over_what_is_there() -> None:
    device = torch.device("cpu")
    assert upload(np.arange(3), device).tolist() == [0, 1, 2]
    target = torch.zeros(5, dtype=torch.int64)
    refill(target[1:4], np.array([7, 8, 9]))
    assert target.tolist() == [0, 7, 8, 9, 0]
