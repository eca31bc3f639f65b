"""What the machine code of a kernel holds, as NVIDIA's own disassembler tells it; no driver and no device is needed."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ATTRIBUTE = r"EIATTR_(REGCOUNT|FRAME_SIZE)\n(?:(?!.*EIATTR).*\n)*?.*index@\((\w+)\)\n.*\.word\s+(0x[0-9a-f]+)"
"""What the compiler notes of an entry point: the attribute's name, the entry's, and the value."""


@dataclass(frozen=True)
class Function:
    """One entry point."""

    instructions: tuple[str, ...]
    """Names with their modifiers, such as ``LDG.E.128``, in their order."""
    registers: int
    frame_bytes: int
    """Local memory of each thread."""

    def accesses(self, kind: str, bits: int) -> int:
        """Count the accesses of one width, such as ``LDG`` of 128 bits."""
        return sum(name.startswith(f"{kind}.") and str(bits) in name.split(".") for name in self.instructions)

    def uses_local_memory(self) -> bool:
        """Tell whether anything is kept in local memory, as spilled registers and indexed arrays are."""
        named = any(re.fullmatch(r"(LDL|STL)(\..+)?", name) for name in self.instructions)
        return named or self.frame_bytes > 0


def inspect(code: bytes, folder: Path) -> dict[str, Function]:
    """Return what is in compiled code, by entry point. Skips the test where the tool is not there."""
    path = folder / "code.cubin"
    path.write_bytes(code)
    done = subprocess.run([_find("nvdisasm"), str(path)], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    attributes = {(name, attribute): int(value, 16) for attribute, name, value in re.findall(ATTRIBUTE, done.stdout)}
    parts = re.split(r"^\.text\.(\w+):$", done.stdout, flags=re.MULTILINE)
    return {
        name: Function(tuple(_instructions(text)), attributes[name, "REGCOUNT"], attributes[name, "FRAME_SIZE"])
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def _instructions(text: str) -> list[str]:
    return re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]*[A-Z0-9])", text, re.MULTILINE)


def _find(tool: str) -> str:
    """Find a tool in its wheel, or in a CUDA toolkit."""
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
