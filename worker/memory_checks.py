"""Whether a model's weights and its pool fit into the memory that is free now, as far as files can tell."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from prefixgate.cache.kv_storage import KVLayout
from prefixgate.config.cache_settings import DEFAULT_POOL_BYTES
from prefixgate.config.settings import Settings
from prefixgate.proto.finding import Finding
from prefixgate.worker import embedded
from prefixgate.worker.conversion import cache_folder
from prefixgate.worker.loader import is_witness
from prefixgate.worker.witness import witness_layout

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CGROUP = Path("/sys/fs/cgroup")


def check_memory(settings: Settings) -> Iterator[Finding]:
    """Compare what is needed with what is free. Says nothing where the model's files are not there yet."""
    device = _device(settings.worker.device)
    free = free_bytes(device)
    if free is None:
        return
    folder = None if is_witness(settings.worker.model) else _folder(settings.worker.model)
    weights, layout = (0, witness_layout()) if folder is None else _needs(folder, settings.worker.dtype, device)
    if layout is None or (folder is None and not is_witness(settings.worker.model)):
        return
    pool = _pool_bytes(settings, layout, device)
    if pool is None:
        yield Finding("memory", "ok", f"{_size(free)} are free on {device}; the pool takes its part of them")
        return
    needs = f"weights of {_size(weights)} and a pool of {_size(pool)}"
    if weights + pool > free:
        remedy = "give the pool less (--kv-memory or --blocks), take a smaller model, or end what holds the memory"
        yield Finding("memory", "problem", f"{needs} do not fit: {_size(free)} are free on {device}", remedy)
    else:
        yield Finding("memory", "ok", f"{needs} fit: {_size(free)} are free on {device}")


def free_bytes(device: torch.device, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int | None:
    """Tell how much memory can be had on a device; None where nobody says. A container's own bound counts too."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None
    try:
        bound = int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # not there, or "max"
        return free
    return max(0, min(free, bound))


def _device(name: str) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(name.partition(":")[2] or 0)
    if name == "cpu" or index >= count:
        return torch.device("cpu")
    return torch.device("cuda", index)


def _folder(model: str) -> Path | None:
    if model == embedded.NAME:
        return next((cache_folder() / "models").glob("smollm2-*"), None)
    path = Path(model).expanduser()
    return path if (path / "config.json").is_file() else None


def _needs(folder: Path, dtype: str, device: torch.device) -> tuple[int, KVLayout | None]:
    """Read the size of the weights and the shape of a token's keys and values from a model's files."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    stored = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    used = _DTYPES.get(dtype, torch.float32 if device.type == "cpu" else stored)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    weights = size * used.itemsize // stored.itemsize
    try:
        heads = int(config["num_attention_heads"])
        layout = KVLayout(
            num_layers=int(config["num_hidden_layers"]),
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            dtype=used,
        )
    except KeyError:  # of a family that calls them otherwise
        return weights, None
    return weights, layout


def _pool_bytes(settings: Settings, layout: KVLayout, device: torch.device) -> int | None:
    """Tell the size of the pool; None where it is a part of what the weights leave."""
    cache = settings.cache
    if cache.blocks is not None:
        return cache.blocks * layout.block_bytes
    if cache.memory is not None:
        return cache.memory
    return None if device.type == "cuda" else DEFAULT_POOL_BYTES


def _size(size: int) -> str:
    return f"{size / (1 << 30):,.2f} GiB"
