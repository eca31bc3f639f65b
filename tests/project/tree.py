"""The project's own tree, as the checks on it see it."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("cache", "config", "gateway", "proto", "worker")
SUBPACKAGES = ("gateway/client", "gateway/commands")
"""Folders of modules inside a package; `gateway/client` has a public face, its `__init__`."""


def project_settings() -> dict[str, Any]:
    """Read pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def modules() -> list[Path]:
    """List the modules of the five packages that people wrote: no generated stubs and no empty `__init__`."""
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [path for path in found if path.name != "__init__.py" and "_pb2" not in path.name]


def tracked_files() -> list[Path]:
    """List what git tracks, and what it would if all were added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]
