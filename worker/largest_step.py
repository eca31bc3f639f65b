"""The largest step that a worker can be asked for, run once before the pool takes what is left of the device."""

from collections.abc import Callable, Sequence

import torch

from prefixgate.cache.hashing import CacheScope
from prefixgate.worker.device_memory import DeviceMemory
from prefixgate.worker.limits import Limits
from prefixgate.worker.model_runner import ModelRefusedError, ModelSpec, Row
from prefixgate.worker.pool_size import Room
from prefixgate.worker.sampling import Draw, sample

SCRATCH_BLOCKS = 2
"""Blocks of the pool that the largest step is run over: its tables name them again and again, since what lies in them
does not matter, and how long the tables are does."""


def largest_step(limits: Limits, spec: ModelSpec) -> list[Row]:
    """Return the rows of a step that is full, each sequence at the end of the longest context.

    All but one decode; the one that is left computes the end of a prompt and wants the logits of all of it.
    """
    context = spec.context_length
    table = [block % SCRATCH_BLOCKS for block in range(-(-context // spec.kv_layout.block_size))]
    scope = CacheScope("largest-step", spec.name)
    rows = [Row([0], context - 1, table, scope, True)] * (limits.max_running - 1)
    left = limits.prompt_tokens
    while left:
        tokens = min(left, context)
        rows.append(Row([0] * tokens, context - tokens, table, scope, True, True))
        left -= tokens
    return rows


def run_largest_step(forward: Callable[[Sequence[Row]], torch.Tensor], limits: Limits, spec: ModelSpec) -> None:
    """Compute the largest step, and choose tokens in the way that takes most."""
    logits = forward(largest_step(limits, spec))
    sample(logits[-limits.max_running :], [Draw(1.0, top_p=0.9)] * limits.max_running)


def measure_room(run: Callable[[], None], memory: DeviceMemory) -> Room:
    """Run the largest step, and tell what it takes and what the device has left.

    Raises ModelRefusedError where it does not fit even without a pool.
    """
    try:
        run()  # not measured: libraries take their workspaces at the first call, and keep them
        memory.release()
        before = memory.held()
        run()
        step = memory.highest() - before
    except torch.OutOfMemoryError as error:
        raise ModelRefusedError(
            f"worker.max_batch_tokens: a full step does not fit {memory.name} beside the weights: {error}"
        ) from error
    memory.release()
    return Room(memory.name, memory.free(), step)
