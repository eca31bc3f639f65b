"""The Triton kernels become machine code for real devices, none of which has to be there."""

import importlib.metadata
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from packaging.version import Version

ARCHITECTURES = (80, 90)
LEAST_SHARED_MEMORY = 99 * 1024
"""Bytes that a program may have on the smallest of the devices since compute capability 8.0 (8.6, 8.9, 12.0)."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    if Version(importlib.metadata.version("triton")) < Version("3.3"):
        pytest.skip("the compiler of Triton below 3.3 is called in other ways")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    output = subprocess.run(
        [sys.executable, "-m", "tests.worker.triton_compiler", *map(str, ARCHITECTURES)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_compile_as_they_are_launched(compiled: list[dict[str, Any]], architecture: int) -> None:
    seen = [(kernel["kernel"], kernel["rows"]) for kernel in compiled if kernel["architecture"] == architecture]
    assert sorted(seen, key=str) == [("attend", 128), ("attend", 16), ("merge", None), ("store", None)]


def test_programs_fit_the_memory_and_the_registers_of_every_device(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        assert kernel["shared"] <= LEAST_SHARED_MEMORY, kernel
        assert kernel["stack"] == 0, kernel


def test_the_pool_is_read_in_16_bytes_and_multiplied_by_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        assert kernel["wide_loads"] >= 2, kernel
        assert (kernel["products"] > 0) == (kernel["kernel"] == "attend"), kernel
