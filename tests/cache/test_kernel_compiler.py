"""Compiling for devices that are not there: what comes out, how it is kept, and what is said when it cannot be."""

import logging
import sys
import threading
from pathlib import Path

import pytest

from prefixgate.cache import copy_kernel
from prefixgate.cache.copy_kernel import SOURCE, load_copy_kernel
from prefixgate.cache.copy_launch import ACCESSES_IN_FLIGHT, THREADS
from prefixgate.cache.kernel_compiler import KernelUnavailableError, compiled, supported_archs
from tests.cache.machine_code import inspect

ARCHS = ("80", "86", "89", "90", "100", "120")


@pytest.fixture(scope="session")
def archs() -> list[str]:
    """The architectures that the compiler at hand makes code for."""
    try:
        return [str(arch) for arch in supported_archs()]
    except KernelUnavailableError as error:
        pytest.skip(f"there is no compiler to try: {error}")


@pytest.fixture
def small(tmp_path: Path, archs: list[str]) -> Path:
    """A kernel that compiles at once."""
    source = tmp_path / "small.cu"
    source.write_text('extern "C" __global__ void small(int* to) { *to = 1; }')
    return source


def no_more_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("this was to come from the folder")

    monkeypatch.setattr("cuda.core.Program", refuse)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_copy_kernel_compiles_to_128_bit_accesses_without_local_memory(
    arch: str, archs: list[str], tmp_path: Path
) -> None:
    if arch not in archs:
        pytest.skip(f"the compiler here makes no code for sm_{arch}, only for {', '.join(archs)}")
    functions = inspect(compiled(SOURCE, arch, tmp_path), tmp_path)
    assert set(functions) == {"copy_vectors", "copy_bytes"}
    vectors = functions["copy_vectors"]
    assert vectors.accesses("LDG", 128) >= ACCESSES_IN_FLIGHT
    assert vectors.accesses("STG", 128) >= ACCESSES_IN_FLIGHT
    assert functions["copy_bytes"].accesses("LDG", 128) == 0
    for function in functions.values():
        assert not function.uses_local_memory()
        assert function.registers * THREADS * 4 <= 65_536, "four thread blocks at least are to fit a processor"
    # All loads that a thread has under way at once stand before the first store that waits for one of them.
    order = [name[:3] for name in vectors.instructions if name[:3] in ("LDG", "STG") and "128" in name.split(".")]
    assert order[: ACCESSES_IN_FLIGHT + 1] == ["LDG"] * ACCESSES_IN_FLIGHT + ["STG"]


def test_the_inspection_sees_narrow_accesses_and_local_memory(archs: list[str], tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(
        'extern "C" __global__ void narrow(int* to, const int* from) { to[threadIdx.x] = from[threadIdx.x]; }\n'
        'extern "C" __global__ void local(int* to, const int* at) {\n'
        "    int held[64];\n"
        "    for (int i = 0; i < 64; ++i) held[at[i]] = i;\n"
        "    for (int i = 0; i < 64; ++i) to[i] = held[at[i] ^ 1];\n"
        "}\n"
    )
    functions = inspect(compiled(source, archs[-1], tmp_path), tmp_path)
    assert functions["narrow"].accesses("LDG", 128) == 0
    assert "LDG.E" in functions["narrow"].instructions
    assert not functions["narrow"].uses_local_memory()
    assert functions["local"].uses_local_memory()


def test_code_is_compiled_once_and_then_taken_from_the_folder(
    small: Path, archs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept" / "here"
    code = compiled(small, archs[-1], folder)
    assert code.startswith(b"\x7fELF")
    no_more_compiling(monkeypatch)
    assert compiled(small, archs[-1], folder) == code


def test_another_source_or_architecture_is_another_file(small: Path, archs: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    first = compiled(small, archs[-1], folder)
    compiled(small, archs[0], folder)
    small.write_text(small.read_text().replace("= 1", "= 2"))
    assert compiled(small, archs[-1], folder) != first
    assert len(list(folder.iterdir())) == 3


def test_another_compiler_is_another_file(
    small: Path, archs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import nvrtc

    folder = tmp_path / "kept"
    compiled(small, archs[-1], folder)
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (nvrtc.nvrtcResult.NVRTC_SUCCESS, 99, 1))
    compiled(small, archs[-1], folder)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_made_anew(
    damage: bytes | None, small: Path, archs: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kept"
    code = compiled(small, archs[-1], folder)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert compiled(small, archs[-1], folder) == code
    assert f"{path} is damaged" in caplog.text
    assert path.read_bytes() == whole


def test_many_at_once_all_get_the_code_and_leave_one_file(small: Path, archs: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    together, made = threading.Barrier(6), []

    def run() -> None:
        together.wait(60)
        made.append(compiled(small, archs[-1], folder))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 6
    assert len(set(made)) == 1
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_cannot_be_written_costs_only_the_compiling(
    small: Path, archs: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        assert compiled(small, archs[-1], tmp_path / "file" / "below").startswith(b"\x7fELF")
    assert "cannot be kept" in caplog.text


def test_a_device_that_the_compiler_does_not_know_is_named_with_those_it_knows(small: Path, tmp_path: Path) -> None:
    with pytest.raises(KernelUnavailableError, match=r"compute capability 999, only for .*\b90\b.*nvidia-cuda-nvrtc"):
        compiled(small, "999", tmp_path)


def test_what_does_not_compile_is_told_with_its_line(small: Path, archs: list[str], tmp_path: Path) -> None:
    small.write_text("\nwrong;")
    with pytest.raises(KernelUnavailableError, match=r"small\.cu(.|\n)*\(2\)"):
        compiled(small, archs[-1], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["small.cu"]


def test_a_missing_compiler_is_named(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda import pathfinder

    def find_nothing(name: str) -> None:
        raise pathfinder.DynamicLibNotFoundError(f"no {name} anywhere")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", find_nothing)
    with pytest.raises(KernelUnavailableError, match=r"pip install nvidia-cuda-nvrtc.*no nvrtc anywhere"):
        compiled(small, "90", tmp_path)


def test_a_missing_driver_is_named_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_kernel, "DRIVER", "libno-driver-here.so.1")
    for _ in range(2):
        with pytest.raises(KernelUnavailableError, match=r"NVIDIA driver is not found: libno-driver-here"):
            load_copy_kernel(0, tmp_path)


@pytest.mark.parametrize("module", ["cuda.core", "cuda.bindings", "cuda.pathfinder"])
def test_missing_packages_are_named(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KernelUnavailableError, match=r"cuda-core is not installed: pip install 'prefixgate\[cuda\]'"):
        compiled(SOURCE, "90", tmp_path)


def test_a_missing_package_is_named_where_there_is_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_kernel, "DRIVER", None)  # the program itself: it can always be loaded
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(KernelUnavailableError, match=r"cuda-core is not installed: pip install 'prefixgate\[cuda\]'"):
        load_copy_kernel(0, tmp_path)
