"""The source distribution and the wheel, built and installed where nothing else of the tree is."""

import json
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from prefixgate.config.version import VERSION
from tests.project.tree import PACKAGES, ROOT, project_settings, tracked_files

PATIENCE_SECONDS = 900
"""After which a build or an installation that hangs is given up."""
pytestmark = pytest.mark.timeout(2 * PATIENCE_SECONDS)

BEYOND_BASE = {
    "torch": "worker",
    "numpy": "worker",
    "cuda": "cuda",
    "opentelemetry": "otel",
}
"""Libraries that modules outside of the worker may need, and the extras that bring them."""

_IMPORT_ALL = """
import importlib, json, pathlib, prefixgate
missing = {}
for root in map(pathlib.Path, prefixgate.__path__):
    for path in sorted(root.rglob("*.py")):
        name = ".".join(["prefixgate", *path.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
        if name.startswith("prefixgate.worker") or name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing[name] = error.name
print(json.dumps(missing))
"""


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert result.returncode == code, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both from a copy of the tree, so that nothing that lies beside it gets in."""
    folder = tmp_path_factory.mktemp("dist")
    for path in tracked_files():
        copy = folder / "tree" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    # The wheel is made from the source distribution, as an index would have it.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "tree", cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    (sdist,) = dist.glob("*.tar.gz")
    return sdist


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[Path]:
    """A fresh environment with the wheel and the base dependencies, as pinned. Yields its folder of programs."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    run(*pip(folder / "bin"), "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    yield folder / "bin"
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(request: pytest.FixtureRequest, environment: Path, sdist: Path) -> Path:
    """The programs of that environment; at the second time with prefixgate from the source distribution."""
    if request.param == "sdist":
        again = ("install", "--quiet", "--no-compile", "--force-reinstall", "--no-deps", sdist)
        run(*pip(environment), *again, cwd=environment)
    return environment


def pip(programs: Path) -> list[str | Path]:
    """Make a command of our own pip for another environment, which has none: it takes longer to make than all else."""
    return [sys.executable, "-m", "pip", "--python", programs / "python", "--disable-pip-version-check"]


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def packaged() -> set[str]:
    """What git tracks of the packages."""
    return {str(path.relative_to(ROOT)) for path in tracked_files() if path.relative_to(ROOT).parts[0] in PACKAGES}


def test_the_wheel_holds_all_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {f"prefixgate/{name}" for name in packaged()}


def test_the_source_distribution_holds_what_it_takes_to_build_the_wheel(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    beside = {"pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt"}
    made = {"PKG-INFO", "setup.cfg"}
    assert {name for name in names if not name.startswith("prefixgate.egg-info/")} == packaged() | beside | made


def test_the_metadata_says_what_the_project_says(wheel: Path) -> None:
    told, project = metadata(wheel), project_settings()["project"]
    assert told["Version"] == VERSION
    assert told["License-Expression"] == project["license"]
    assert told["Requires-Python"] == project["requires-python"]
    assert told.get_all("Classifier") == project["classifiers"]
    assert set(told.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]


def test_the_command_knows_its_version(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "prefixgate", "--version", cwd=tmp_path) == f"prefixgate {VERSION}\n"


def test_what_is_installed_fits_together(installed: Path, tmp_path: Path) -> None:
    assert run(*pip(installed), "check", cwd=tmp_path) == "No broken requirements found.\n"


def test_every_module_outside_of_the_worker_can_be_imported_or_needs_an_extra(installed: Path, tmp_path: Path) -> None:
    missing = json.loads(run(installed / "python", "-c", _IMPORT_ALL, cwd=tmp_path))
    extras = {name: BEYOND_BASE.get(library.partition(".")[0]) for name, library in missing.items()}
    assert None not in extras.values(), missing
    # The gateway and its client need nothing more, but for what makes the spans of traced calls.
    assert {name for name in extras if name.startswith("prefixgate.gateway")} == {"prefixgate.gateway.call_spans"}


def test_without_the_extra_the_worker_says_what_it_needs(installed: Path, tmp_path: Path) -> None:
    command = [str(installed / "prefixgate"), "serve"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, "pip install 'prefixgate[worker]'" in result.stderr) == (2, True)


def test_doctor_runs_without_torch(installed: Path, tmp_path: Path) -> None:
    free = ["--gateway-listen", "127.0.0.1:0", "--gateway-http", "127.0.0.1:0"]
    report = json.loads(run(installed / "prefixgate", "doctor", "gateway", "--json", *free, cwd=tmp_path, code=1))
    problems = {finding["check"] for finding in report["findings"] if finding["level"] == "problem"}
    assert problems == {"hash key", "workers"}
