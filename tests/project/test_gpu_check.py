"""The check of a device runs as it is: without one, in small without one, and where little is installed."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.project.tree import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.py"
PARTS = ("checks", "copies", "capacity", "first", "decode", "overhead")
NAMED = ("torch", "transformers", "grpcio", "pytest")
"""What is there on a machine that is lent, with what these need."""


def run(*arguments: str, site: Path | None = None, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """Run the script; with ``site``, by an interpreter that sees nothing but the packages in there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    options = ["-I"]
    if site is not None:
        # No site-packages, and no links to this tree from there.
        environment["PYTHONPATH"], options = str(site), ["-S"]
    return subprocess.run(
        [sys.executable, *options, str(SCRIPT), *arguments],
        cwd=folder,
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def needed(names: tuple[str, ...]) -> set[str]:
    """Return the distributions that these need, with them."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system, or optional
        found.add(name)
        left += [re.split(r"[ ;<>=!~\[(]", line)[0] for line in requires if "extra ==" not in line]
    return found


def make_site(folder: Path, names: tuple[str, ...]) -> Path:
    """Fill a folder of packages with the named ones alone, and what they need."""
    for name in needed(names):
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(importlib.metadata.distribution(name).locate_file(top))))
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_each_part_is_skipped_with_the_reason(tmp_path: Path) -> None:
    result = run("--json", str(tmp_path / "figures.json"), folder=tmp_path)
    assert result.returncode == 0, result.stdout
    for part in PARTS:
        assert re.search(rf"^{part}: skipped: torch .* CUDA", result.stdout, re.MULTILINE), result.stdout
    assert json.loads((tmp_path / "figures.json").read_text()) == {}


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    result = run(site=tmp_path / "site")
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("skipped: torch cannot be imported") == len(PARTS)


@pytest.mark.timeout(600)  # two libraries are imported, and much is run: a hang takes longer
def test_all_that_is_measured_runs_in_small_with_the_named_packages_alone(tmp_path: Path) -> None:
    # Without pytest too: a part that fails fails the command, and not the parts after it.
    site, figures = make_site(tmp_path, NAMED[:-1]), tmp_path / "figures.json"
    result = run("--device", "cpu", "--tiny", "--json", str(figures), site=site, folder=tmp_path)
    assert result.returncode == 1, result.stdout
    assert re.findall(r"^(\w+): FAILED: .*pytest", result.stdout, re.MULTILINE) == ["checks"]
    assert re.findall(r"^(\w+): done", result.stdout, re.MULTILINE) == [part for part in PARTS if part != "checks"]
    found = json.loads(figures.read_text())
    assert found["capacity_shared_sequences"] > found["capacity_paged_sequences"] > found["capacity_reserved_sequences"]
    assert {"copy_whole_4_over_plain", "copy_partial_4_gb_per_s", "first_cold_over_hit"} <= found.keys()
    for sequences in (1, 3):
        for way in ("plain", "graphs", "shared", "served"):
            assert found[f"decode_{sequences}_{way}_tokens_per_s"] > 0
    assert {"step_64_ms", "step_64_overhead_ms", "step_64_host_ms"} <= found.keys()


@pytest.mark.timeout(600)
def test_the_checks_run_with_the_named_packages_alone(tmp_path: Path) -> None:
    result = run("--device", "cpu", "--only", "checks", site=make_site(tmp_path, NAMED), folder=tmp_path)
    assert result.returncode == 0, result.stdout
    assert "hypothesis is not installed: test_copy_kernel.py" in result.stdout
    assert re.search(r"^\d+ passed", result.stdout, re.MULTILINE), result.stdout
