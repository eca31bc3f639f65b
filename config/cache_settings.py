"""The pool of blocks: how large, what stays in it, and the secret that names its content."""

from dataclasses import dataclass

from prefixgate.config.kinds import Choice, Flag, Integer, Number, Size, Text
from prefixgate.config.setting import setting

DEFAULT_POOL_BYTES = 512 << 20
"""The pool's size on a CPU where neither ``cache.memory`` nor ``cache.blocks`` is set."""

DEFAULT_MEMORY_SHARE = 0.9
"""The pool's part of a CUDA device's free memory where nothing sets its size."""

_HEX_KEY = Text("at least 16 bytes written as hexadecimal digits", r"(?:[0-9A-Fa-f]{2}){16,1024}|")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The pool of blocks, and the secret that names them."""

    memory: int | None = setting(
        None,
        Size(1, 1 << 50),
        "Size of the pool in bytes. Neither this nor blocks set: 512MiB on a CPU, memory_share of what is free on "
        "CUDA.",
        unit="bytes",
        flag="--kv-memory",
    )
    memory_share: float | None = setting(
        None,
        Number(0.01, 1),
        "Size of the pool as a part of the CUDA device's memory that is free once the weights are loaded, less what "
        f"the largest step needs. Not set, and neither memory nor blocks: {DEFAULT_MEMORY_SHARE}.",
        flag="--kv-memory-share",
    )
    blocks: int | None = setting(
        None, Integer(2, 1 << 31), "Size of the pool in blocks of 16 tokens, instead of memory.", unit="blocks"
    )
    mode: str = setting(
        "on",
        Choice(("on", "off")),
        '"off" computes every prompt anew: the baseline that shows what the cache is worth.',
        flag="--cache",
    )
    eviction: str = setting(
        "adaptive",
        Choice(("adaptive", "lru")),
        'Which cached block goes first: "adaptive" keeps what the pool has learned to come back, and is "lru" else.',
    )
    pin_share: float = setting(
        0.1,
        Number(0, 0.9),
        "Part of the pool that the pins of all tenants together may hold. No single call can have it either, so that "
        "pins never stand in the way of one. 0 allows no pins.",
    )
    hash_key: str = setting(
        "",
        _HEX_KEY,
        "Secret that gateway and worker share. A command line can be read by others on the machine: prefer the file, "
        "hash_key_file, or the variable PREFIXGATE_HASH_KEY. `serve` makes a fresh one where none is set.",
        secret=True,
    )
    hash_key_file: str = setting("", Text("a path"), "File that holds hash_key as hexadecimal digits.")
    poison: bool = setting(
        False,
        Flag(),
        "Fill fresh blocks with NaN, so that a read of an unwritten slot shows. The witness always does.",
    )
