"""How many blocks a pool has, from the settings and from what its device has left."""

from typing import NamedTuple

from prefixgate.cache.kv_storage import KVLayout
from prefixgate.config.cache_settings import DEFAULT_MEMORY_SHARE, DEFAULT_POOL_BYTES, CacheSettings
from prefixgate.worker.model_runner import ModelRefusedError

MIN_BLOCKS = 2


class Room(NamedTuple):
    """What a device has left once a model's weights are loaded."""

    device: str
    free: int
    """Bytes that nobody holds."""
    step: int
    """Bytes that the largest step takes beside weights and pool."""

    @property
    def available(self) -> int:
        """Bytes that a pool can take so that the largest step still fits beside it."""
        return max(0, self.free - self.step)

    def __str__(self) -> str:
        return (
            f"{self.device} has {self.available:,} bytes left for a pool: {self.free:,} are free, and the largest step "
            f"(worker.max_batch_tokens) needs {self.step:,}"
        )


def pool_blocks(cache: CacheSettings, layout: KVLayout, room: Room | None = None) -> int:
    """Return the size of the pool in blocks. ``room`` is None where nobody can tell, as on a CPU.

    Raises ModelRefusedError where the settings make a pool too small to serve anything, or too large for its device.
    """
    least = MIN_BLOCKS * layout.block_bytes
    if cache.blocks is not None:
        setting, num_blocks = f"cache.blocks: {cache.blocks:,} blocks", cache.blocks
    else:
        setting, memory = _memory(cache, room)
        num_blocks = memory // layout.block_bytes
    if num_blocks < MIN_BLOCKS:
        where = "" if room is None else f"; {room}"
        raise ModelRefusedError(
            f"{setting} hold {num_blocks} blocks of {layout.block_bytes:,} bytes; "
            f"at least {least:,} bytes are needed{where}"
        )
    if room is not None and num_blocks * layout.block_bytes > room.available:
        raise ModelRefusedError(
            f"{setting} take {num_blocks * layout.block_bytes:,} bytes, and {room}: "
            f"at most {room.available // layout.block_bytes:,} blocks fit"
        )
    return num_blocks


def _memory(cache: CacheSettings, room: Room | None) -> tuple[str, int]:
    """Return the words for what sets the pool's size, and its bytes."""
    if cache.memory is not None:
        return f"cache.memory: {cache.memory:,} bytes", cache.memory
    if room is not None:
        share = DEFAULT_MEMORY_SHARE if cache.memory_share is None else cache.memory_share
        memory = int(share * room.available)
        return f"cache.memory_share: {share:g}, which is {memory:,} bytes,", memory
    if cache.memory_share is not None:
        raise ModelRefusedError(
            f"cache.memory_share: {cache.memory_share:g} is a part of a CUDA device's memory, and the model runs on a "
            "CPU; set cache.memory"
        )
    return f"the default of cache.memory: {DEFAULT_POOL_BYTES:,} bytes", DEFAULT_POOL_BYTES
