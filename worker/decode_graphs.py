"""Decode steps recorded as CUDA graphs and run again for other rows.

A decode step is hundreds of short kernels, and a host needs longer to launch one than a fast device to run it. A graph
holds all of them and is launched at once. It knows no values, only places: so the rows' tokens, positions and block
tables are written to tensors that stay where they are, and the batch is filled up to one of a few sizes with rows that
are nobody's. These have one token each, in a block that no pool hands out.

A graph is recorded when its size first comes up. Should recording fail, for a model that asks the device for a value or
for want of memory, steps are computed without graphs from then on.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from prefixgate.worker.attention import DecodeStep
from prefixgate.worker.graph_shapes import SIZES, TABLE_STEP, graph_size, graph_width
from prefixgate.worker.model_runner import Row
from prefixgate.worker.transfers import refill

logger = logging.getLogger(__name__)

Compute = Callable[[torch.Tensor, DecodeStep], torch.Tensor]
"""From token ids, int64 ``[R]``, to the logits of all rows, float32 ``[R, vocabulary]``."""


class Recording(Protocol):
    """Work that can be run again over the same tensors."""

    output: torch.Tensor
    """What it returned, where it leaves that each time."""

    def replay(self) -> None:
        """Put the work on the device once more."""


Record = Callable[[Callable[[], torch.Tensor]], Recording]
"""Runs work once, as it is, and records it."""


class CudaRecording:
    """A CUDA graph and its output."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self.output = output
        self._graph = graph

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: they run one after another, never together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        """The pool's handle, once there is one."""

    def __call__(self, work: Callable[[], torch.Tensor]) -> CudaRecording:
        """Run work once so that kernels are compiled and libraries have what they need, then record it."""
        with torch.cuda.device(self._device):
            return self._record(work)

    def _record(self, work: Callable[[], torch.Tensor]) -> CudaRecording:
        current = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            work()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls count: others may ask the device things meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = work()
        self._pool = graph.pool()
        return CudaRecording(graph, output)


class DecodeGraphs:
    """The recorded decode steps of one model over one pool."""

    def __init__(
        self,
        compute: Compute,
        record: Record,
        *,
        block_size: int,
        max_blocks: int,
        scratch: int,
        device: torch.device,
    ) -> None:
        """``max_blocks`` is the length of the longest table, ``scratch`` a block that no table ever names."""
        self._compute = compute
        self._record = record
        self._block_size = block_size
        # Backends read tables some entries at a time, also those that they do not use.
        max_blocks = -(-max_blocks // TABLE_STEP) * TABLE_STEP
        self._max_blocks = max_blocks
        self._scratch = scratch
        self._recordings: dict[tuple[int, int], Recording] = {}
        self.failed = False
        """Whether recording failed once, and is not tried again."""
        self._numbers = torch.zeros(2 * SIZES[-1], dtype=torch.int64, device=device)
        """Token ids, then positions, of as many rows as the step's graph has."""
        self._tables = torch.zeros(SIZES[-1] * max_blocks, dtype=torch.int32, device=device)
        self._host_tables = np.zeros((SIZES[-1], max_blocks), dtype=np.int32)
        self._known: list[list[int]] = [[] for _ in range(SIZES[-1])]
        """What stands in the rows of ``_host_tables``: from step to step few tables change, and at their ends."""

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and table widths that are recorded, in the order in which they came up."""
        return list(self._recordings)

    def run(self, rows: Sequence[Row], token_ids: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the logits ``[R, V]`` of one token of each row, valid until the next step; None where no graph can.

        ``token_ids``, int64 ``[R]`` on the device, stand for those in the rows.
        """
        size = graph_size(len(rows))
        if self.failed or size is None:
            return None
        widest = max(row.start for row in rows) // self._block_size + 1
        width = graph_width(widest, self._max_blocks)
        self._fill(rows, size, width, token_ids)
        recording = self._recordings.get((size, width)) or self._try_to_record(size, width)
        if recording is None:
            return None
        recording.replay()
        return recording.output[: len(rows)]

    def _fill(self, rows: Sequence[Row], size: int, width: int, token_ids: torch.Tensor | None) -> None:
        """Bring a step's rows to the places that its graph reads, and those that fill it up."""
        for index, row in enumerate(rows):
            self._set_table(index, row.block_ids)
        for index in range(len(rows), size):
            self._set_table(index, [self._scratch])
        refill(self._tables[: size * width], self._host_tables[:size, :width].reshape(-1))
        numbers = np.zeros((2, size), dtype=np.int64)
        numbers[1, : len(rows)] = [row.start for row in rows]
        if token_ids is None:
            numbers[0, : len(rows)] = [row.token_ids[0] for row in rows]
            refill(self._numbers[: 2 * size], numbers.reshape(-1))
        else:
            refill(self._numbers[len(rows) : 2 * size], numbers.reshape(-1)[len(rows) :])
            self._numbers[: len(rows)].copy_(token_ids)

    def _set_table(self, index: int, block_ids: Sequence[int]) -> None:
        known = self._known[index]
        if known != block_ids:
            same = len(known) if block_ids[: len(known)] == known else 0
            count = min(len(block_ids), self._max_blocks)
            self._host_tables[index, same:count] = block_ids[same:count]
            self._known[index] = list(block_ids[:count])

    def _try_to_record(self, size: int, width: int) -> Recording | None:
        try:
            recording = self._record(lambda: self._work(size, width))
        except Exception:
            logger.exception("A decode step of %d rows could not be recorded; steps run without graphs", size)
            self.failed = True
            self._recordings.clear()
            return None
        self._recordings[size, width] = recording
        logger.info("Recorded the decode step of %d rows over tables of %d blocks", size, width)
        return recording

    def _work(self, size: int, width: int) -> torch.Tensor:
        """What is recorded: what else there is to know of a step follows from the places on the device."""
        token_ids, positions = self._numbers[:size], self._numbers[size : 2 * size]
        tables = self._tables[: size * width].view(size, width)
        inside = positions // self._block_size
        step = DecodeStep(
            positions=positions,
            blocks=tables.gather(1, inside[:, None])[:, 0].long(),
            offsets=positions - inside * self._block_size,
            tables=tables,
            lengths=(positions + 1).int(),
            block_size=self._block_size,
        )
        return self._compute(token_ids, step)
