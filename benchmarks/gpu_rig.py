"""What the checks of a device run on: its storage, its attention, and models with random weights of real shapes."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from prefixgate.cache.copy_kernel import CopyKernel, load_copy_kernel
from prefixgate.cache.cuda_storage import CudaKVStorage
from prefixgate.cache.kernel_compiler import KernelUnavailableError
from prefixgate.cache.kv_storage import KVLayout, KVStorage, TorchKVStorage
from prefixgate.worker.attention import AttentionBackend, AttentionShape, AttentionUnavailableError
from prefixgate.worker.decode_graphs import Record
from prefixgate.worker.model_runner import ModelSpec, TextAssets
from prefixgate.worker.probe import survey
from prefixgate.worker.sdpa_attention import SdpaBackend
from prefixgate.worker.transformers_runner import TransformersRunner, recorder_for
from prefixgate.worker.triton_attention import triton_attention

LLAMA_2_7B = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
"""512 KiB of keys and values for each token in float16."""

SMALL = {
    "vocab_size": 997,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}

TINY = {**SMALL, "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


class Rig(NamedTuple):
    """A device and how it is used. The CPU stands for one in tests of the checks themselves."""

    device: torch.device
    kernel: CopyKernel | None
    """None where torch copies: on a CPU, and where there is no kernel to be had."""
    no_kernel: str
    """Why there is none."""
    dtype: torch.dtype

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def storage(self, num_blocks: int, layout: KVLayout) -> KVStorage:
        """Allocate a pool as a worker does, with a scratch block."""
        if self.kernel is None:
            return TorchKVStorage(num_blocks, layout, device=self.device, scratch=True)
        return CudaKVStorage(num_blocks, layout, device=self.device, kernel=self.kernel, scratch=True)

    def backends(self, shape: AttentionShape) -> dict[str, AttentionBackend | str]:
        """Make every backend there is, or tell why there is none."""
        if not self.is_cuda:
            from tests.worker.graph_doubles import GatheringBackend

            return {"sdpa": SdpaBackend(), "gathering": GatheringBackend()}
        found: dict[str, AttentionBackend | str] = {"sdpa": SdpaBackend()}
        for name, make in {"triton": triton_attention, "vllm_flash_attn": _flash}.items():
            try:
                found[name] = make(shape, self.device)
            except AttentionUnavailableError as error:
                found[name] = str(error)
        return found

    def backend(self, shape: AttentionShape) -> AttentionBackend:
        """Make the backend that models are run by: one whose decode steps can be recorded."""
        found = self.backends(shape)["triton" if self.is_cuda else "gathering"]
        if isinstance(found, str):
            raise RuntimeError(f"there is no paged attention: {found}")
        return found

    def model(self, sizes: dict[str, int]) -> Any:
        """Make a Llama with random weights, on the device."""
        torch.manual_seed(0)
        with torch.device(self.device):
            return AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=self.dtype).eval()

    def runner(self, model: Any, storage: KVStorage, *, share: bool = True, graphs: bool = True) -> TransformersRunner:
        """Put a model over a pool. The one made last is the one whose attention the model's layers call."""
        shape = survey(model)
        backend = self.backend(shape)
        config = model.config
        spec = ModelSpec(
            name="random",
            fingerprint="",
            vocabulary_size=config.vocab_size,
            eos_ids=(),
            context_length=config.max_position_embeddings,
            kv_layout=shape.layout,
            text=TextAssets(b""),
        )
        record = self.recorder(storage, backend) if graphs else None
        runner = TransformersRunner(model, spec, storage, backend, share_prefixes=share, record=record)
        runner.is_ahead = True
        return runner

    def recorder(self, storage: KVStorage, backend: AttentionBackend) -> Record | None:
        """Return what records decode steps; on a CPU what stands for it."""
        if not self.is_cuda:
            from tests.worker.graph_doubles import TracingRecorder

            return TracingRecorder()
        return recorder_for(storage, backend)

    def finish(self) -> None:
        """Wait until the device has done everything."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give memory that nobody uses back to the device."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Memory that is to be had; on a CPU little, as not much is wanted."""
        return torch.cuda.mem_get_info(self.device)[0] if self.is_cuda else 1 << 26


def _flash(shape: AttentionShape, device: torch.device) -> AttentionBackend:
    from prefixgate.worker.flash_attention import flash_attention

    return flash_attention(shape, device)


@contextlib.contextmanager
def make_rig(device: str) -> Iterator[Rig]:
    """Get a device ready: "cpu", or "cuda" with the copy kernel compiled for it."""
    if device == "cpu":
        yield Rig(torch.device("cpu"), None, "", torch.float32)
        return
    with tempfile.TemporaryDirectory(prefix="pg-kernel-") as folder:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device()
        kernel, reason = None, ""
        try:
            kernel = load_copy_kernel(index, Path(folder))
        except KernelUnavailableError as error:
            # What needs the kernel fails with this; the rest can be measured without it.
            reason = str(error)
        yield Rig(torch.device("cuda", index), kernel, reason, torch.float16)
