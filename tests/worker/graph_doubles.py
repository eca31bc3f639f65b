"""What stands for CUDA graphs where there is no GPU: work is traced to the operations it runs, and these are run again.

As with a graph, nothing of the Python code runs when it is replayed, and a value that it read while it was recorded
would stay what it was.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from prefixgate.worker.attention import KEYS, VALUES, DecodeStep, PackedStep, Scoring
from prefixgate.worker.sdpa_attention import SdpaBackend


class Traced:
    """A recording of operations."""

    def __init__(self, graph: Callable[[], torch.Tensor], output: torch.Tensor) -> None:
        self.output = output
        self._graph = graph
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.output.copy_(self._graph())


class TracingRecorder:
    """Records by tracing, and can be told to fail."""

    def __init__(self) -> None:
        self.recorded: list[Traced] = []
        self.fails = False

    def __call__(self, work: Callable[[], torch.Tensor]) -> Traced:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        output = work().clone()
        graph: Any = make_fx(work, tracing_mode="real")()
        self.recorded.append(Traced(graph, output))
        return self.recorded[-1]


class GatheringBackend(SdpaBackend):
    """The reference, with decode steps whose operations are the same whatever the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self._decode: DecodeStep | None = None

    def begin(self, step: PackedStep) -> None:
        self._decode = None
        super().begin(step)

    def begin_decode(self, step: DecodeStep) -> None:
        self._decode = step

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: torch.Tensor) -> None:
        step = self._decode
        if step is None:
            super().write(key, value, layer)
            return
        layer[step.blocks, KEYS, step.offsets] = key
        layer[step.blocks, VALUES, step.offsets] = value

    def attend(self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        step = self._decode
        if step is None:
            return super().attend(query, layer, scoring)
        rows, heads, size = query.shape
        written = torch.arange(step.tables.shape[1] * step.block_size) < step.lengths[:, None]
        # By selection: what is not written may hold anything.
        keys, values = (
            layer[step.tables.long(), part].flatten(1, 2).where(written[..., None, None], 0.0)
            for part in (KEYS, VALUES)
        )
        queries = query.view(rows, layer.shape[3], -1, size)
        scores = torch.einsum("rkgd,rskd->rkgs", queries, keys) * scoring.scale
        weights = scores.where(written[:, None, None], float("-inf")).softmax(dim=-1)
        return torch.einsum("rkgs,rskd->rkgd", weights, values).reshape(rows, heads, size)
