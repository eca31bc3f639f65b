"""The backend for any CUDA device that Triton compiles for: our own kernels, reading the pool where it lies.

It takes whatever layers ask for (windows, caps, sinks, heads of any size up to ``MAX_HEAD_DIM``), on any release of
torch and its Triton. Where a more specialised library serves a model, that one is faster.
"""

import importlib.util

import torch

from prefixgate.cache.hashing import CacheScope
from prefixgate.worker.attention import AttentionShape, AttentionUnavailableError, DecodeStep, PackedStep, Scoring
from prefixgate.worker.model_runner import Row
from prefixgate.worker.triton_plan import MIN_PART_SLOTS, Plan, plan_decode, plan_step

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
"""A tile of longer heads does not fit the registers and the shared memory of a multiprocessor."""
_CUT_SLOTS = 4 * MIN_PART_SLOTS
"""A row of so many slots, alone in a step, is cut into parts."""
_NOBODY = CacheScope("", "")


class TritonAttention:
    """Attention by our Triton kernels. Its decode steps can be recorded in a CUDA graph.

    Run a decode step once before it is recorded: the first launch compiles, and lays out the work of its shape.
    """

    def __init__(self, processors: int) -> None:
        """``processors`` is how many multiprocessors the device has. Raises ImportError where there is no Triton."""
        from prefixgate.worker import triton_programs

        self._kernels = triton_programs
        self._processors = processors
        self._step: PackedStep | DecodeStep | None = None
        self._plan: Plan | None = None
        self._tables = self._lengths = torch.empty(0, dtype=torch.int32)
        self._decode_plans: dict[tuple[int, ...], Plan] = {}
        """By shape. They stay, since graphs go on reading them."""

    def prepare(self, shape: AttentionShape, device: torch.device) -> None:
        """Compile every program that steps of a model can need, so that no call waits for one later.

        Triton keeps what it compiled on disk, and looks there first.
        """
        layout, heads = shape.layout, shape.query_heads
        layer = torch.zeros(
            (1, 2, 2, layout.block_size, layout.num_kv_heads, layout.head_dim), dtype=layout.dtype, device=device
        )[:, 1]
        sinks = torch.zeros(heads, dtype=layout.dtype, device=device) if shape.sinks else None
        group = heads // layout.num_kv_heads
        for size in self._kernels.tile_sizes(group, layout.head_dim, layout.dtype.itemsize):
            for start in (0, _CUT_SLOTS):
                tokens = size // group
                table = [0] * -(-(start + tokens) // layout.block_size)
                self.begin(PackedStep([Row([0] * tokens, start, table, _NOBODY, False)], layout.block_size, device))
                numbers = layer.new_zeros((tokens, heads, layout.head_dim))
                keys = numbers[:, : layout.num_kv_heads]
                self.write(keys, keys, layer)
                for window in (None, 1) if shape.windows else (None,):
                    self.attend(numbers, layer, Scoring(1.0, window, 1.0 if shape.softcap else None, sinks))
        self._step = None

    def begin(self, step: PackedStep) -> None:
        """Forget the step before; how this one is cut is settled by its first layer, which knows the heads."""
        self._step, self._plan = step, None
        self._lengths = step.positions.to(torch.int32) + 1

    def begin_decode(self, step: DecodeStep) -> None:
        """Take a step of one token for each row."""
        self._step, self._plan = step, None
        self._tables, self._lengths = step.tables, step.lengths

    def write(self, key: torch.Tensor, value: torch.Tensor, layer: torch.Tensor) -> None:
        """Store keys and values by block and offset."""
        step = self._current()
        self._kernels.store(key, value, layer, step.blocks, step.offsets)

    def attend(self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Attend."""
        return self.attend_with_lse(query, layer, scoring)[0]

    def attend_with_lse(
        self, query: torch.Tensor, layer: torch.Tensor, scoring: Scoring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend; the sums come with the outputs."""
        plan = self._settled(query, layer)
        return self._kernels.attend(query, layer, scoring, plan, self._tables, self._lengths)

    def _settled(self, query: torch.Tensor, layer: torch.Tensor) -> Plan:
        """Cut the step, once for all of its layers."""
        step = self._current()
        if self._plan is None:
            kv_heads, head_dim = layer.shape[3:]
            group = query.shape[1] // kv_heads
            sizes = self._kernels.tile_sizes(group, head_dim, layer.element_size())
            if isinstance(step, DecodeStep):
                self._plan = self._decode_plan(step, kv_heads, sizes[0])
            else:
                self._plan = plan_step(step, group, kv_heads, sizes, self._processors)
                self._tables = self._plan.tables
        return self._plan

    def _decode_plan(self, step: DecodeStep, kv_heads: int, size: int) -> Plan:
        rows, width = step.tables.shape
        key = (rows, width, step.block_size, kv_heads, size)
        if key not in self._decode_plans:
            self._decode_plans[key] = plan_decode(
                rows, width, step.block_size, kv_heads, size, self._processors, step.tables.device
            )
        return self._decode_plans[key]

    def _current(self) -> PackedStep | DecodeStep:
        if self._step is None:
            raise RuntimeError("attention was called outside a step")
        return self._step


def triton_attention(shape: AttentionShape, device: torch.device) -> TritonAttention:
    """Return the backend for a model's layers. Raises AttentionUnavailableError with the reason where it cannot be."""
    if device.type != "cuda":
        raise AttentionUnavailableError(f"it runs on a CUDA device, and the model on {device}")
    dtype, head_dim = shape.layout.dtype, shape.layout.head_dim
    if dtype not in DTYPES:
        raise AttentionUnavailableError(f"it computes {', '.join(map(str, DTYPES))}, and the model is in {dtype}")
    if head_dim > MAX_HEAD_DIM:
        raise AttentionUnavailableError(f"heads are {head_dim} numbers long, and it computes up to {MAX_HEAD_DIM}")
    if importlib.util.find_spec("triton") is None:
        raise AttentionUnavailableError("the package triton is not installed")
    try:
        return TritonAttention(torch.cuda.get_device_properties(device).multi_processor_count)
    except ImportError as error:
        raise AttentionUnavailableError(f"the package triton cannot be imported: {error}") from error
