"""The storage of CUDA devices, on this host: its launches run the kernel's own source on a CPU's tensors."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.cache.copy_kernel import SOURCE, DeviceCopyKernel, load_copy_kernel
from prefixgate.cache.copy_launch import THREADS, CopyLaunch
from prefixgate.cache.copy_plan import Copy
from prefixgate.cache.cuda_storage import CudaKVStorage
from prefixgate.cache.kernel_compiler import KernelUnavailableError
from prefixgate.cache.kv_storage import KVLayout, TorchKVStorage
from tests.cache.fake_cuda import FakeCuda
from tests.cache.host_kernel import InProcessKernel, kernel_text, needs_compiler
from tests.counts import scaled

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float16)
EXAMPLES = scaled(2_000)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda.put_in_place(monkeypatch)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> InProcessKernel:
    return InProcessKernel(tmp_path_factory.mktemp("kernel") / "here", kernel_text())


def pair(kernel: InProcessKernel, num_blocks: int, layout: KVLayout = LAYOUT) -> tuple[CudaKVStorage, TorchKVStorage]:
    """The storage and its reference, with the same content."""
    storage = CudaKVStorage(num_blocks, layout, device="cpu", kernel=kernel)
    reference = TorchKVStorage(num_blocks, layout)
    reference.data.copy_(torch.randn(reference.data.shape, generator=torch.Generator().manual_seed(num_blocks)))
    storage.data.copy_(reference.data)
    kernel.launches.clear()
    return storage, reference


@needs_compiler
def test_a_plan_is_one_launch_on_the_current_stream(kernel: InProcessKernel, cuda: FakeCuda) -> None:
    storage, reference = pair(kernel, 8)
    plan = [Copy(0, 1, 16), Copy(0, 2, 5), Copy(3, 4, 16)]
    storage.copy_blocks(plan)
    reference.copy_blocks(plan)
    assert torch.equal(storage.data, reference.data)
    ((launch, stream),) = kernel.launches
    assert stream == 77
    assert launch == CopyLaunch("copy_vectors", (1, 3, 1), (3, 4, 16 * 32, 32))
    cuda.stream = 78
    storage.copy_blocks([Copy(5, 6, 1)])
    assert [stream for _, stream in kernel.launches] == [77, 78]


@needs_compiler
def test_each_plans_table_has_pinned_memory_of_its_own_and_nothing_is_waited_for(
    kernel: InProcessKernel, cuda: FakeCuda
) -> None:
    storage, _ = pair(kernel, 8)
    storage.copy_blocks([Copy(0, 1, 16)])
    storage.copy_blocks([Copy(0, 2, 16), Copy(0, 3, 16)])
    assert cuda.uploads == [(torch.device("cpu"), True)] * 2


@needs_compiler
def test_a_plan_without_copies_launches_nothing(kernel: InProcessKernel, cuda: FakeCuda) -> None:
    storage, _ = pair(kernel, 2)
    storage.copy_blocks([])
    assert kernel.launches == []
    assert cuda.uploads == []


@needs_compiler
@pytest.mark.parametrize("copy", [Copy(0, 2, 16), Copy(2, 0, 16), Copy(0, -1, 16), Copy(0, 1, 17)])
def test_a_copy_outside_the_pool_is_refused_before_anything_is_queued(
    kernel: InProcessKernel, cuda: FakeCuda, copy: Copy
) -> None:
    storage, reference = pair(kernel, 2)
    with pytest.raises(IndexError):
        storage.copy_blocks([Copy(0, 1, 16), copy])
    assert kernel.launches == []
    assert torch.equal(storage.data, reference.data)


@needs_compiler
def test_the_scratch_block_is_beyond_what_copies_reach(kernel: InProcessKernel, cuda: FakeCuda) -> None:
    storage = CudaKVStorage(2, LAYOUT, device="cpu", kernel=kernel, scratch=True)
    assert storage.scratch == 2
    assert len(storage.data) == 3
    with pytest.raises(IndexError):
        storage.copy_blocks([Copy(0, 2, 16)])


@needs_compiler
def test_poison_and_then_a_copy_leaves_nan_where_no_token_was_copied(kernel: InProcessKernel, cuda: FakeCuda) -> None:
    storage, reference = pair(kernel, 3)
    storage.poison([2])
    storage.copy_blocks([Copy(0, 2, 5)])
    assert torch.equal(storage.data[2, :, :, :5], reference.data[0, :, :, :5])
    assert storage.data[2, :, :, 5:].isnan().all()
    assert torch.equal(storage.data[:2], reference.data[:2])


def test_blocks_too_large_for_the_kernel_are_refused_before_the_pool_is_allocated() -> None:
    layout = KVLayout(num_layers=1 << 10, num_kv_heads=64, head_dim=1 << 10, dtype=torch.float32)
    with pytest.raises(ValueError, match="the copy kernel takes at most"):
        CudaKVStorage(1 << 20, layout, device="cpu", kernel=RecordingKernel())


class RecordingKernel:
    """Runs nothing."""

    processors = 1

    def launch(self, launch: CopyLaunch, pool_address: int, table_address: int, stream: int) -> None:
        raise AssertionError("nothing was to be launched")


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[list[Copy]]]:
    """Several plans in a row, each of which keeps to what plans promise."""
    count = draw(st.integers(2, 10))
    made = []
    for _ in range(draw(st.integers(1, 4))):
        blocks = draw(st.permutations(range(count)))
        first = draw(st.integers(1, count - 1))
        made.append(
            [Copy(draw(st.sampled_from(blocks[:first])), dst, draw(st.integers(1, 16))) for dst in blocks[first:]]
        )
    return count, made


@needs_compiler
@given(drawn=plans(), dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
@settings(max_examples=EXAMPLES)
def test_plans_in_a_row_leave_what_torch_leaves(
    kernel: InProcessKernel, drawn: tuple[int, list[list[Copy]]], dtype: torch.dtype
) -> None:
    count, made = drawn
    with pytest.MonkeyPatch.context() as monkeypatch:
        FakeCuda.put_in_place(monkeypatch)
        storage, reference = pair(kernel, count, KVLayout(2, 1, 6, dtype))
        for plan in made:
            storage.copy_blocks(plan)
            reference.copy_blocks(plan)
    assert torch.equal(storage.data, reference.data)
    assert len(kernel.launches) == len(made)


# The way to the device, with doubles for what needs one


@dataclass
class FakeDevice:
    """A device of cuda.core's."""

    index: int
    arch: str = "90"
    is_current: bool = False

    @property
    def properties(self) -> SimpleNamespace:
        return SimpleNamespace(multiprocessor_count=132)

    def set_current(self) -> None:
        self.is_current = True


@dataclass
class FakeCode:
    """Loaded code."""

    code: bytes

    def get_kernel(self, name: str) -> str:
        assert name.encode() in self.code
        return f"kernel {name}"


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[FakeDevice]:
    """Cards on a machine with a driver, as far as cuda.core tells; the compiler is the real one."""
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    made: list[FakeDevice] = []

    def device(index: int) -> FakeDevice:
        made.append(FakeDevice(index))
        return made[-1]

    monkeypatch.setattr("prefixgate.cache.copy_kernel.DRIVER", None)  # the program itself: it can always be loaded
    monkeypatch.setattr(core, "Device", device)
    monkeypatch.setattr(core, "ObjectCode", SimpleNamespace(from_cubin=lambda code, *, name: FakeCode(code)))
    return made


def test_the_kernel_is_compiled_for_the_device_that_is_there(devices: list[FakeDevice], tmp_path: Path) -> None:
    kernel = load_copy_kernel(3, tmp_path)
    assert kernel.processors == 132
    ((index, is_current),) = [(device.index, device.is_current) for device in devices]
    assert index == 3
    assert is_current
    assert [path.name.split("-")[:2] for path in tmp_path.iterdir()] == [[SOURCE.stem, "sm90"]]


def test_a_device_that_is_not_there_is_named(
    devices: list[FakeDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(index: int) -> FakeDevice:
        raise RuntimeError("CUDA_ERROR_NO_DEVICE")

    monkeypatch.setattr("cuda.core.Device", refuse)
    with pytest.raises(KernelUnavailableError, match="CUDA device 1 is not to be had: CUDA_ERROR_NO_DEVICE"):
        load_copy_kernel(1, tmp_path)


def test_code_that_the_driver_does_not_load_is_told(
    devices: list[FakeDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(code: bytes, *, name: str) -> FakeCode:
        raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")

    monkeypatch.setattr("cuda.core.ObjectCode", SimpleNamespace(from_cubin=refuse))
    with pytest.raises(KernelUnavailableError, match="does not load code for sm_90: CUDA_ERROR_INVALID_IMAGE"):
        load_copy_kernel(0, tmp_path)


def test_a_launch_reaches_cuda_core_as_it_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    launched: list[tuple[object, ...]] = []
    monkeypatch.setattr(core, "launch", lambda *arguments: launched.append(arguments))
    kernel = DeviceCopyKernel(132, FakeCode(b"copy_vectors copy_bytes"))
    kernel.launch(CopyLaunch("copy_bytes", (5, 7, 1), (7, 4, 104, 8)), 1 << 47, 1 << 46, 0xABC)
    ((stream, config, entry, *arguments),) = launched
    assert stream.__cuda_stream__() == (0, 0xABC)  # type: ignore[attr-defined]
    assert config == core.LaunchConfig(grid=(5, 7, 1), block=THREADS)
    assert entry == "kernel copy_bytes"
    # Each a Python int, which cuda.core passes on in 64 bits, as the kernel takes them.
    assert arguments == [1 << 47, 1 << 46, 7, 4, 104, 8]
    assert {type(argument) for argument in arguments} == {int}
