"""The copy kernel on a card: the cases that it passes on the host, and what only a device can show."""

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from prefixgate.cache.copy_kernel import DeviceCopyKernel, load_copy_kernel
from prefixgate.cache.copy_plan import Copy
from prefixgate.cache.cuda_storage import CudaKVStorage
from prefixgate.cache.kv_storage import KVLayout, TorchKVStorage
from tests.cache.copy_cases import Case, cases, pool_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

DEVICE = torch.device("cuda", 0)
LAYOUT = KVLayout(num_layers=4, num_kv_heads=4, head_dim=64, dtype=torch.float16)
GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def kernel(folder: Path) -> DeviceCopyKernel:
    return load_copy_kernel(DEVICE.index, folder)


def pair(kernel: DeviceCopyKernel, num_blocks: int) -> tuple[CudaKVStorage, TorchKVStorage]:
    """A storage on the card and its reference on the host, with the same content."""
    storage = CudaKVStorage(num_blocks, LAYOUT, device=DEVICE, kernel=kernel)
    reference = TorchKVStorage(num_blocks, LAYOUT)
    reference.data.copy_(torch.randn(reference.data.shape, generator=torch.Generator().manual_seed(num_blocks)))
    storage.data.copy_(reference.data)
    return storage, reference


def keep_busy(multiplications: int = 40) -> None:
    """Queue some work on the current stream, so that the host gets ahead of it."""
    matrix = torch.randn(4096, 4096, device=DEVICE)
    for _ in range(multiplications):
        matrix = torch.tanh(matrix @ matrix)


def chain(num_blocks: int, rounds: int) -> list[list[Copy]]:
    """Plans that each move on what the one before them brought, whole and in part."""
    half = num_blocks // 2
    plans = []
    for index in range(rounds):
        source, target = (0, half) if index % 2 == 0 else (half, 0)
        part = 1 + index % 15
        copies = [(source + at, target + (at + index) % half, 16 if at % 3 else part) for at in range(half)]
        plans.append([Copy(*copy) for copy in copies])
    return plans


@given(case=cases())
@settings(max_examples=300)
def test_the_kernel_does_what_torch_does(kernel: DeviceCopyKernel, case: Case) -> None:
    storage = CudaKVStorage(case.num_blocks, case.layout, device=DEVICE, kernel=kernel)
    pool_bytes(storage).copy_(case.pool())
    storage.copy_blocks(case.copies)
    assert torch.equal(pool_bytes(storage).cpu(), case.expected())


def test_the_kept_kernel_is_loaded_again(kernel: DeviceCopyKernel, folder: Path) -> None:
    (path,) = folder.iterdir()
    written = path.stat().st_mtime_ns
    storage, reference = pair(load_copy_kernel(DEVICE.index, folder), 4)
    storage.copy_blocks([Copy(0, 1, 9)])
    reference.copy_blocks([Copy(0, 1, 9)])
    assert torch.equal(storage.data.cpu(), reference.data)
    assert path.stat().st_mtime_ns == written


def test_plans_queued_behind_a_busy_stream_keep_their_tables(kernel: DeviceCopyKernel) -> None:
    storage, reference = pair(kernel, 64)
    plans = chain(64, 300)
    keep_busy()
    for plan in plans:
        storage.copy_blocks(plan)
    for plan in plans:
        reference.copy_blocks(plan)
    assert torch.equal(storage.data.cpu(), reference.data)


def test_a_plan_waits_for_nothing(kernel: DeviceCopyKernel) -> None:
    storage, _ = pair(kernel, 64)
    plans = chain(64, 20)
    storage.copy_blocks(plans[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for plan in plans:
            storage.copy_blocks(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_copies_stand_in_the_order_of_their_stream(kernel: DeviceCopyKernel) -> None:
    storage, reference = pair(kernel, 4)
    content = torch.randn(storage.data[0].shape, device=DEVICE).to(LAYOUT.dtype)
    stream = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        keep_busy()
        storage.data[0] = content  # queued before the copy, and overwritten behind it
        storage.copy_blocks([Copy(0, 1, 16), Copy(0, 2, 5)])
        storage.data[0] = float("nan")
    stream.synchronize()
    assert torch.equal(storage.data[1], content)
    assert torch.equal(storage.data[2, :, :, :5], content[:, :, :5])
    assert torch.equal(storage.data[2, :, :, 5:].cpu(), reference.data[2, :, :, 5:])


def test_poisoned_blocks_stay_nan_but_for_what_is_copied(kernel: DeviceCopyKernel) -> None:
    storage, reference = pair(kernel, 8)
    storage.poison(range(1, 8))
    storage.copy_blocks([Copy(0, 3, 7), Copy(0, 5, 16)])
    assert torch.equal(storage.data[3, :, :, :7].cpu(), reference.data[0, :, :, :7])
    assert torch.equal(storage.data[5].cpu(), reference.data[0])
    assert storage.data[3, :, :, 7:].isnan().all()
    assert storage.data[[1, 2, 4, 6, 7]].isnan().all()


def test_a_thread_that_did_not_load_the_kernel_can_launch_it(kernel: DeviceCopyKernel) -> None:
    storage, reference = pair(kernel, 4)
    failures: list[BaseException] = []

    def copy() -> None:
        try:
            storage.copy_blocks([Copy(0, 1, 16)])
            torch.cuda.synchronize(DEVICE)
        except BaseException as error:  # told by the test's own thread
            failures.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(60)
    assert failures == []
    assert torch.equal(storage.data[1].cpu(), reference.data[0])


def test_a_pool_of_more_than_4_gib_is_reached_to_its_end(kernel: DeviceCopyKernel) -> None:
    if torch.cuda.mem_get_info(DEVICE)[0] < 7 * GIB:
        pytest.skip("the device has no 6 GiB to spare")
    num_blocks = 5 * GIB // LAYOUT.block_bytes
    storage = CudaKVStorage(num_blocks, LAYOUT, device=DEVICE, kernel=kernel)
    storage.data[3] = torch.randn(storage.data[3].shape, device=DEVICE).to(LAYOUT.dtype)
    storage.copy_blocks([Copy(3, num_blocks - 1, 16), Copy(3, num_blocks - 2, 11)])
    assert torch.equal(storage.data[num_blocks - 1], storage.data[3])
    assert torch.equal(storage.data[num_blocks - 2, :, :, :11], storage.data[3, :, :, :11])
    written = {3, num_blocks - 1, num_blocks - 2}
    for start in range(0, num_blocks, 512):
        blocks = storage.data[start : start + 512]
        touched = (blocks.flatten(1) != 0).any(dim=1).nonzero().flatten() + start
        assert set(touched.tolist()) <= written


def test_more_pairs_than_a_grid_counts(kernel: DeviceCopyKernel) -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float16)
    half = 70_000
    storage = CudaKVStorage(2 * half, layout, device=DEVICE, kernel=kernel)
    storage.data[:half] = torch.randn(storage.data[:half].shape, device=DEVICE).to(layout.dtype)
    storage.copy_blocks([Copy(block, half + block, 16) for block in range(half)])
    assert torch.equal(storage.data[half:], storage.data[:half])
