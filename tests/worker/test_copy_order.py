"""Copies on a device that takes its time: queued when they are planned, and done no sooner than something needs them.

The witness's every token depends on every slot that its block table names, so a copy that came too late, read a block
that was handed out meanwhile, or overwrote one, changes what a call says.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from prefixgate.cache.copy_plan import Copy
from prefixgate.cache.cuda_storage import CudaKVStorage
from prefixgate.cache.kv_storage import TorchKVStorage
from prefixgate.worker.model_runner import Row
from prefixgate.worker.request import SamplingParams
from prefixgate.worker.witness import WitnessModel, witness_layout
from prefixgate.worker.witness_options import WitnessOptions
from tests.cache.fake_cuda import FakeCuda
from tests.cache.host_kernel import InProcessKernel, kernel_text, needs_compiler
from tests.worker.driver import Driver, words

NUM_BLOCKS = 22
"""Few enough that the calls below evict, and wait for room."""

OPTIONS = WitnessOptions(context=2048)
Outputs = list[dict[int, list[int]]]


class LateStorage(TorchKVStorage):
    """Keeps what it is asked for in a queue, as a device's stream does."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, witness_layout())
        self.queue: list[Callable[[], None]] = []
        self.copies = 0

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        self.copies += len(copies)
        self.queue.append(lambda: super(LateStorage, self).copy_blocks(copies))

    def poison(self, block_ids: Sequence[int]) -> None:
        self.queue.append(lambda: super(LateStorage, self).poison(block_ids))

    def catch_up(self) -> None:
        """Do all that is queued, in its order."""
        for work in self.queue:
            work()
        self.queue.clear()


class LateWitness(WitnessModel):
    """Its steps stand in the same queue, behind the copies."""

    def __init__(self, storage: LateStorage, *, copies_first: bool = True) -> None:
        super().__init__("witness", storage, OPTIONS)
        self.late = storage
        self.copies_first = copies_first

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        if self.copies_first:
            self.late.catch_up()
            return super().forward(rows)
        logits = super().forward(rows)
        self.late.catch_up()
        return logits


def serve(driver: Driver) -> Outputs:
    """Serve calls that fork, leave each other inside blocks, are cancelled, and do not fit beside each other."""
    sampling = SamplingParams(12, temperature=1.0, seed=3)
    prompt = words(40)
    calls = [driver.submit(prompt, n=3, sampling=sampling), driver.submit(words(50, 1), 20)]
    for _ in range(2):
        driver.step()
    cancelled = driver.submit([*prompt[:27], *words(9, 2)], 30, n=2)
    calls.append(driver.submit([*prompt[:21], *words(20, 3)], 10))
    for _ in range(2):
        driver.step()
    driver.engine.cancel(cancelled.request)
    for length in (39, 33, 7, 23):
        calls.append(driver.submit([*prompt[:length], *words(12, length)], n=2, sampling=sampling))
        driver.step()
    driver.run()
    driver.assert_idle()
    assert driver.cache.stats().evictions_total > 0
    return [call.outputs for call in calls]


@pytest.fixture(scope="module")
def expected() -> Outputs:
    """What the calls say where each copy is done at once."""
    return serve(Driver(NUM_BLOCKS, options=OPTIONS))


@pytest.mark.parametrize("is_ahead", [False, True])
def test_copies_done_as_late_as_their_stream_allows_change_nothing(expected: Outputs, is_ahead: bool) -> None:
    storage = LateStorage()
    assert serve(Driver(NUM_BLOCKS, runner=LateWitness(storage), is_ahead=is_ahead)) == expected
    assert storage.copies > 8


def test_copies_done_behind_the_step_that_needs_them_are_noticed(expected: Outputs) -> None:
    assert serve(Driver(NUM_BLOCKS, runner=LateWitness(LateStorage(), copies_first=False))) != expected


@needs_compiler
def test_calls_say_the_same_over_the_copy_kernel(
    expected: Outputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda.put_in_place(monkeypatch)
    kernel = InProcessKernel(tmp_path / "kernel", kernel_text())
    storage = CudaKVStorage(NUM_BLOCKS, witness_layout(), device="cpu", kernel=kernel)
    assert serve(Driver(NUM_BLOCKS, runner=WitnessModel("witness", storage, OPTIONS))) == expected
    assert len(kernel.launches) > 4


@needs_compiler
def test_a_copy_that_is_a_token_short_is_noticed(
    expected: Outputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda.put_in_place(monkeypatch)
    short = kernel_text(("(copy.tokens * token_bytes)", "((copy.tokens - 1) * token_bytes)"))
    kernel = InProcessKernel(tmp_path / "kernel", short)
    storage = CudaKVStorage(NUM_BLOCKS, witness_layout(), device="cpu", kernel=kernel)
    assert serve(Driver(NUM_BLOCKS, runner=WitnessModel("witness", storage, OPTIONS))) != expected
