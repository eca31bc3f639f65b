"""Compiles the Triton kernels as they are launched, for devices that need not be there, and tells what came of it.

It is run as a program of its own: in the tests' process Triton interprets. It prints one JSON object for each kernel
that was compiled.
"""

import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from prefixgate.cache.hashing import CacheScope
from prefixgate.worker import triton_kernels
from prefixgate.worker.attention import PackedStep, Scoring
from prefixgate.worker.model_runner import Row
from prefixgate.worker.triton_attention import TritonAttention

_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Launch(NamedTuple):
    """A kernel, and what it was launched with."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


class Recorder:
    """Stands where a kernel stands, and writes down its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launch

    def _launch(self, *arguments: Any, **named: Any) -> None:
        options: dict[str, int] = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        bound = inspect.signature(self._kernel.fn).bind(*arguments, **named)
        self._launches.append(Launch(self._kernel, bound.arguments, options))


def launches_of(dtype: torch.dtype, head_dim: int, heads: int, scoring: Scoring) -> list[Launch]:
    """Return all launches of a layer in a step that decodes and prefills, some rows cut into parts."""
    launches: list[Launch] = []
    kernels = {name: getattr(triton_kernels, name) for name in ("attend", "merge", "store")}
    for name, kernel in kernels.items():
        setattr(triton_kernels, name, Recorder(kernel, launches))
    try:
        kv_heads = 8
        layer = torch.zeros((80, 2, 2, 16, kv_heads, head_dim), dtype=dtype)[:, 1]
        scope = CacheScope("t", "m")
        rows = [Row([0], 1000, range(63), scope, True), Row([0] * 80, 0, range(70, 75), scope, True)]
        backend = TritonAttention(64)
        backend.begin(PackedStep(rows, 16, torch.device("cpu")))
        keys = torch.zeros((81, kv_heads, head_dim), dtype=dtype)
        backend.write(keys, keys, layer)
        backend.attend(torch.zeros((81, heads, head_dim), dtype=dtype), layer, scoring)
    finally:
        for name, kernel in kernels.items():
            setattr(triton_kernels, name, kernel)
    return launches


def compile_for(launch: Launch, architecture: int) -> dict[str, Any]:
    """Compile a launch's kernel as it would be specialised for its arguments, and describe the machine code."""
    parameters = inspect.signature(launch.kernel.fn).parameters
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[tuple[int], list[Any]] = {}
    for index, (name, parameter) in enumerate(parameters.items()):
        value = launch.arguments[name]
        if parameter.annotation is not inspect.Parameter.empty or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)
    code = compiled.asm["ptx"]
    return {
        "kernel": launch.kernel.fn.__name__,
        "architecture": architecture,
        "rows": constants.get("ROWS"),
        "shared": compiled.metadata.shared,
        "stack": stack_of(compiled.asm["cubin"]),
        "wide_loads": len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*0x10|ld\.global[.\w]*\.v4", code)),
        "products": len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", code)),
    }


def stack_of(machine_code: bytes) -> int:
    """Return how many bytes of each thread's registers had no room."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage)))


def main() -> None:
    """Compile for the architectures that are named."""
    for architecture in map(int, sys.argv[1:]):
        for launch in launches_of(torch.bfloat16, 128, 32, Scoring(0.1, 500, 30.0, torch.zeros(32))):
            sys.stdout.write(json.dumps(compile_for(launch, architecture)) + "\n")


if __name__ == "__main__":
    main()
