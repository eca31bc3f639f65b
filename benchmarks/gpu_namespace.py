"""Makes ``prefixgate`` importable from this very tree, on a machine where it is not installed.

A machine that is lent for a check has the libraries that compute and nothing else. What is missing there and computes
nothing gets a stand-in: the hash of blocks, and the messages of protocols that the check does not speak.
"""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

_STUBS = ("gateway_pb2", "generation_pb2", "worker_pb2")


def provide_prefixgate() -> None:
    """Make the import root of this tree, with ``benchmarks`` and ``tests`` beside it."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    if not _is_this_tree():
        # Its packages are folders of this one.
        root = ModuleType("prefixgate")
        root.__path__ = [str(ROOT)]
        sys.modules["prefixgate"] = root
    if importlib.util.find_spec("xxhash") is None:
        sys.modules["xxhash"] = _hash_stand_in()
    try:
        importlib.import_module("prefixgate.proto.worker_pb2")
    except Exception:  # no protobuf, or one that is too old for the stubs
        proto = importlib.import_module("prefixgate.proto")
        for name in _STUBS:
            sys.modules[f"prefixgate.proto.{name}"] = stand_in = _Absent(f"prefixgate.proto.{name}")
            setattr(proto, name, stand_in)


def _is_this_tree() -> bool:
    """Whether ``prefixgate`` is importable and this tree's, as it is where it was installed to be edited.

    Its parts are asked and not the root: that is no folder, and one put in its place would lack what others hold of it.
    """
    try:
        found = importlib.util.find_spec("prefixgate.worker.engine")
    except ModuleNotFoundError:
        return False
    return found is not None and found.origin is not None and Path(found.origin).resolve() == ROOT / "worker/engine.py"


class _Absent(ModuleType):
    """A module of which only the names are wanted, in annotations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _hash_stand_in() -> ModuleType:
    module = ModuleType("xxhash")

    def digest(data: bytes, seed: int = 0) -> bytes:
        return hashlib.blake2b(data, digest_size=16, key=seed.to_bytes(8, "little")).digest()

    vars(module)["xxh3_128_digest"] = digest
    vars(module)["xxh3_64_intdigest"] = lambda data, seed=0: int.from_bytes(digest(data, seed)[:8], "little")
    return module
