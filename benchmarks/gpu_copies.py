"""How fast blocks are copied, beside one plain copy of as many bytes on the same device."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.gpu_rig import Rig
from prefixgate.cache.copy_plan import Copy
from prefixgate.cache.kv_storage import KVLayout

REPEATS, BATCH = 7, 5
"""Measurements, of which the median counts, and how many copies each of them is."""
_SPIN_CYCLES = 4_000_000
"""About two milliseconds: the device is kept busy while the host queues what is measured."""


class CopySizes(NamedTuple):
    """What is copied."""

    layout: KVLayout
    pairs: tuple[int, ...]
    partial: int
    """Tokens of a partial copy."""


def seconds_each(rig: Rig, work: Callable[[], object]) -> float:
    """Return how long a piece of work takes on the device, by its own clock, however slow the host is."""
    work()
    times: list[float] = []
    for _ in range(REPEATS):
        if rig.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(_SPIN_CYCLES)  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(BATCH):
                work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / BATCH)
        else:
            since = time.perf_counter()
            work()
            times.append(time.perf_counter() - since)
    return statistics.median(times)


def measure_copies(rig: Rig, sizes: CopySizes, record: Callable[[str, float], None]) -> None:
    """Record bandwidths in GB/s of bytes copied, and the ratio to a plain copy, for each number of pairs."""
    if rig.no_kernel:
        raise RuntimeError(f"there is no copy kernel: {rig.no_kernel}")
    layout = sizes.layout
    most = max(sizes.pairs)
    storage = rig.storage(2 * most, layout)
    storage.data.normal_()
    order = torch.randperm(2 * most, generator=torch.Generator().manual_seed(0)).tolist()
    flat = storage.data.view(-1)
    for kind, tokens in (("whole", layout.block_size), ("partial", sizes.partial)):
        for pairs in sizes.pairs:
            copies = [Copy(order[2 * i], order[2 * i + 1], tokens) for i in range(pairs)]
            size = pairs * tokens * layout.token_bytes
            count = size // layout.dtype.itemsize
            # As far apart as they can be in the pool.
            source, target = flat[:count], flat[flat.numel() - count :]
            ours = seconds_each(rig, lambda copies=copies: storage.copy_blocks(copies))  # type: ignore[misc]
            plain = seconds_each(rig, lambda target=target, source=source: target.copy_(source))  # type: ignore[misc]
            record(f"copy_{kind}_{pairs}_gb_per_s", size / ours / 1e9)
            record(f"copy_{kind}_{pairs}_over_plain", plain / ours)
