"""Which storage a device gets, and what is said where it gets none."""

from pathlib import Path

import pytest
import torch

from prefixgate.cache.copy_launch import CopyLaunch
from prefixgate.cache.cuda_storage import CudaKVStorage
from prefixgate.cache.kernel_compiler import KernelUnavailableError
from prefixgate.cache.kv_storage import KVLayout, TorchKVStorage
from prefixgate.worker import pool_storage
from prefixgate.worker.model_runner import ModelRefusedError
from prefixgate.worker.pool_storage import storage_on

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, dtype=torch.float16)
CUDA = torch.device("cuda", 1)


class Kernel:
    """Loaded, and never launched."""

    processors = 1

    def launch(self, launch: CopyLaunch, pool_address: int, table_address: int, stream: int) -> None:
        raise AssertionError("nothing is copied here")


def test_a_cpus_pool_is_torchs(tmp_path: Path) -> None:
    storage = storage_on(torch.device("cpu"), tmp_path)(3, LAYOUT)
    assert type(storage) is TorchKVStorage
    assert len(storage.data) == storage.num_blocks == 3
    assert list(tmp_path.iterdir()) == []


def test_a_pool_on_cuda_has_the_copy_kernel_of_its_device_and_a_scratch_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[int, Path]] = []

    def load(index: int, folder: Path) -> Kernel:
        loaded.append((index, folder))
        return Kernel()

    monkeypatch.setattr(pool_storage, "load_copy_kernel", load)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda shape, *, dtype, device: zeros(shape, dtype=dtype, device="meta"))
    allocate = storage_on(CUDA, tmp_path)
    small, large = allocate(3, LAYOUT), allocate(30, LAYOUT)
    assert isinstance(small, CudaKVStorage)
    assert (small.scratch, large.scratch) == (3, 30)
    assert loaded == [(1, tmp_path / "kernels")]


def test_what_copies_lack_is_told_before_anything_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int, folder: Path) -> Kernel:
        raise KernelUnavailableError("cuda-core is not installed")

    monkeypatch.setattr(pool_storage, "load_copy_kernel", refuse)
    with pytest.raises(ModelRefusedError, match=r"worker\.device: cuda:1 cannot copy blocks: cuda-core is not"):
        storage_on(CUDA, tmp_path)


def test_blocks_that_the_kernel_does_not_take_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_storage, "load_copy_kernel", lambda index, folder: Kernel())
    vast = KVLayout(num_layers=1 << 10, num_kv_heads=64, head_dim=1 << 10, dtype=torch.float32)
    with pytest.raises(ModelRefusedError, match="the copy kernel takes at most"):
        storage_on(CUDA, tmp_path)(2, vast)


def test_a_pool_that_finds_no_memory_is_told_by_its_size(tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match=r"cache: a pool of 1,125,899,906,842,624 blocks takes .* which cpu"):
        storage_on(torch.device("cpu"), tmp_path)(1 << 50, LAYOUT)
