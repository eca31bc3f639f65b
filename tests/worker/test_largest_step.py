"""What the largest step is, and what is made of its run, on a memory that counts what it is told."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from prefixgate.worker.largest_step import SCRATCH_BLOCKS, largest_step, measure_room, run_largest_step
from prefixgate.worker.limits import Limits
from prefixgate.worker.model_runner import ModelRefusedError
from prefixgate.worker.pool_size import Room
from tests.worker.tiny_models import CONTEXT, VOCABULARY, llama_config, make_model, make_runner


@dataclass
class CountedMemory:
    """A device of 1,000 bytes on which weights take 300."""

    name: str = "cuda:7"
    taken: int = 300
    kept: int = 0
    mark: int = 0
    log: list[str] = field(default_factory=list)

    def release(self) -> None:
        self.kept, self.mark = 0, self.taken
        self.log.append("release")

    def held(self) -> int:
        return self.taken + self.kept

    def highest(self) -> int:
        return self.mark

    def free(self) -> int:
        return 1000 - self.held()

    def work(self, peak: int, stays: int) -> None:
        """Take some at most, of which the allocator keeps all and a library a part for good."""
        self.mark = max(self.mark, self.taken + peak)
        self.kept = peak - stays
        self.taken += stays
        self.log.append("step")


def test_what_the_first_run_leaves_behind_is_taken_and_what_the_second_needs_is_set_aside() -> None:
    memory = CountedMemory()
    stays = iter([50, 0])
    room = measure_room(lambda: memory.work(250, next(stays)), memory)
    assert room == Room("cuda:7", free=650, step=250)
    assert room.available == 400
    assert memory.log == ["step", "release", "step", "release"]


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_step_that_does_not_fit_is_refused_by_the_setting_that_makes_it_smaller(fails_at: int) -> None:
    memory = CountedMemory()

    def run() -> None:
        memory.work(1, 0)
        if memory.log.count("step") == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    with pytest.raises(ModelRefusedError, match=r"worker\.max_batch_tokens: .* cuda:7 .* Tried to allocate 9 GiB"):
        measure_room(run, memory)


@pytest.mark.parametrize(("tokens", "running"), [(24, 4), (500, 64), (2, 1)])
def test_the_largest_step_is_full_and_at_the_end_of_the_longest_context(tokens: int, running: int) -> None:
    spec = make_runner(make_model(llama_config())).spec
    rows = largest_step(Limits(tokens, running, 8), spec)
    assert sum(len(row.token_ids) for row in rows) == tokens
    assert sum(len(row.token_ids) == 1 for row in rows) >= running - 1
    for row in rows:
        assert row.start + len(row.token_ids) == CONTEXT
        assert len(row.block_ids) == CONTEXT // 16
        assert set(row.block_ids) <= set(range(SCRATCH_BLOCKS))


def test_it_runs_on_a_pool_of_two_blocks_and_gives_a_line_for_each_token_that_wants_one() -> None:
    runner = make_runner(make_model(llama_config()), SCRATCH_BLOCKS)
    seen: list[torch.Size] = []
    forward: Callable[..., torch.Tensor] = runner.forward

    def watched(rows: object) -> torch.Tensor:
        logits = forward(rows)
        seen.append(logits.shape)
        return logits

    run_largest_step(watched, Limits(40, 8, 8), runner.spec)
    assert seen == [torch.Size([40, VOCABULARY])]
