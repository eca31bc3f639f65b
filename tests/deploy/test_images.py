"""The Dockerfiles, as far as they can be tried without building them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.container import read_image
from tests.project.tree import ROOT

IMAGES = sorted((ROOT / "deploy" / "images").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    command = [str(Path(sys.executable).with_name("hadolint")), "--failure-threshold", "style", str(path)]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_what_is_installed_is_declared(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source
    # A package that is not copied would be missing from the wheel.
    packages = set(re.findall(r'^"prefixgate\.(\w+)" = ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for stage in re.split(r"^FROM ", text, flags=re.MULTILINE):
        if "pip install" in stage and '".[' in stage:
            assert packages <= set(re.findall(r"^COPY (\w+) \1$", stage, re.MULTILINE))
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for wanted in re.findall(r'"\.\[([\w,]+)\]"', text):
        assert set(wanted.split(",")) <= extras


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_runs_one_command_as_nobody_special(path: Path) -> None:
    text = path.read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    image = read_image(f"prefixgate-{path.stem}")
    assert image.entrypoint == ["prefixgate"]
    assert image.command == [path.stem]
    assert re.search(r"^STOPSIGNAL SIGTERM$", text, re.MULTILINE)
