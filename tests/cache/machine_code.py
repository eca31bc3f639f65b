"""What the machine code of a kernel holds, as NVIDIA's own tools tell it; no driver and no device is needed."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Function:
    """One entry point."""

    instructions: tuple[str, ...]
    """Names with their modifiers, such as ``LDG.E.128``, in their order."""
    registers: int
    stack_bytes: int
    local_bytes: int

    def accesses(self, kind: str, bits: int) -> int:
        """Count the accesses of one width, such as ``LDG`` of 128 bits."""
        return sum(name.startswith(f"{kind}.") and str(bits) in name.split(".") for name in self.instructions)

    def uses_local_memory(self) -> bool:
        """Tell whether anything is kept in local memory, as spilled registers and indexed arrays are."""
        named = any(re.fullmatch(r"(LDL|STL)(\..+)?", name) for name in self.instructions)
        return named or self.stack_bytes > 0 or self.local_bytes > 0


def inspect(code: bytes, folder: Path) -> dict[str, Function]:
    """Return what is in compiled code, by entry point. Skips the test where the tools are not there."""
    path = folder / "code.cubin"
    path.write_bytes(code)
    listing = _run("nvdisasm", "--print-code", str(path))
    usage = _run("cuobjdump", "--dump-resource-usage", str(path))
    figures = {
        name: (int(registers), int(stack), int(local))
        for name, registers, stack, local in re.findall(
            r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage
        )
    }
    parts = re.split(r"^\.text\.(\w+):$", listing, flags=re.MULTILINE)
    return {
        name: Function(tuple(_instructions(text)), *figures[name])
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def _instructions(text: str) -> list[str]:
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*[A-Z0-9])", text, re.MULTILINE)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_find(tool), *arguments], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _find(tool: str) -> str:
    """Find a tool from its wheel, or from a CUDA toolkit."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        path = None
    else:
        path = find_nvidia_binary_utility(tool)
    path = path or shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not there to look at machine code: pip install nvidia-cuda-{tool}")
    return str(path)
