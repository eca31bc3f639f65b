import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import NormalizedName, canonicalize_name
from packaging.version import Version

from prefixgate.config.version import VERSION
from tests.project.tree import PACKAGES, ROOT, SUBPACKAGES, project_settings, tracked_files

OF_AN_OLDER_TORCH = {
    "cuda-bindings",
    "cuda-pathfinder",
    "huggingface-hub",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
}
"""What the stack of vllm-flash-attn has in versions of its own."""


def requirements(*extras: str) -> list[Requirement]:
    """What the project needs, with the extras of these names; without names with all that go together."""
    project = project_settings()["project"]
    optional = project["optional-dependencies"]
    lines = [line for extra in extras or set(optional) - {"flash"} for line in optional[extra]]
    return [Requirement(line) for line in [*project["dependencies"], *lines]]


def pins(file: str = "constraints.txt") -> dict[NormalizedName, Version]:
    lines = (ROOT / file).read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_every_package_directory_is_packaged_typed_and_seen_by_the_type_checker() -> None:
    with_init = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert with_init == set(PACKAGES)
    tools = project_settings()["tool"]
    named = {f"prefixgate.{name}" for name in PACKAGES}
    below = {f"prefixgate.{name.replace('/', '.')}" for name in SUBPACKAGES}
    assert set(tools["setuptools"]["packages"]) == named | below
    assert tools["setuptools"]["package-dir"] == {f"prefixgate.{name}": name for name in PACKAGES}
    assert set(tools["importlinter"]["root_packages"]) == named
    links = {path.name: path.resolve() for path in (ROOT / ".typing" / "prefixgate").iterdir()}
    assert links == {name: ROOT / name for name in PACKAGES}
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


def test_init_files_are_empty() -> None:
    assert [name for name in PACKAGES if (ROOT / name / "__init__.py").read_text()] == []


def test_subfolders_that_are_not_packages_hold_no_modules() -> None:
    # They would be in no wheel: packages are listed one by one.
    deep = [path for name in PACKAGES for path in (ROOT / name).glob("*/**/*.py")]
    assert {str(path.parent.relative_to(ROOT)) for path in deep} == set(SUBPACKAGES)


def test_files_beside_the_modules_are_packaged() -> None:
    data = project_settings()["tool"]["setuptools"]["package-data"]
    inside = {path: path.relative_to(ROOT).parts[0] for path in tracked_files() if path.parent != ROOT}
    beside = {path: package for path, package in inside.items() if package in PACKAGES and path.suffix != ".py"}
    assert {ROOT / "worker" / "cpu_attention.cpp", ROOT / "cache" / "cuda" / "copy_blocks.cu"} <= set(beside)
    for path, package in beside.items():
        patterns = [*data["*"], *data.get(f"prefixgate.{package}", [])]
        assert any(path.match(pattern) for pattern in patterns), path.name


def test_what_the_gateway_may_use_of_the_cache_brings_nothing_else_of_it() -> None:
    # import-linter lets the gateway import the hashing, and does not look at what lies behind it.
    hashing = (ROOT / "cache" / "hashing.py").read_text()
    assert re.findall(r"^\s*(?:from|import) prefixgate", hashing, re.MULTILINE) == []


@pytest.mark.parametrize(
    ("file", "extras"), [("constraints.txt", ()), ("constraints-cuda.txt", ("worker", "cuda", "flash", "otel"))]
)
def test_every_dependency_is_pinned_to_a_version_that_it_may_have(file: str, extras: Sequence[str]) -> None:
    pinned = pins(file)
    asked: dict[NormalizedName, SpecifierSet] = {}
    for requirement in requirements(*extras):
        name = canonicalize_name(requirement.name)
        asked[name] = asked.get(name, SpecifierSet()) & requirement.specifier
    assert sorted(set(asked) - set(pinned)) == []
    assert {name: pinned[name] for name, specifier in asked.items() if pinned[name] not in specifier} == {}


def test_the_stack_of_an_older_torch_differs_in_nothing_else() -> None:
    usual, older = pins(), pins("constraints-cuda.txt")
    assert {name for name in set(usual) & set(older) if usual[name] != older[name]} <= OF_AN_OLDER_TORCH


def test_pins_name_versions_that_everyone_can_install() -> None:
    # A local version such as "+cpu" exists on one machine or index only.
    for file in ("constraints.txt", "constraints-cuda.txt"):
        assert {name: version for name, version in pins(file).items() if version.local} == {}


def test_dependencies_are_at_least_as_new_as_the_stubs_demand() -> None:
    lowest = {
        canonicalize_name(requirement.name): Version(specifier.version)
        for requirement in requirements()
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    for path in sorted((ROOT / "proto").glob("*_pb2.py")):
        protobuf = re.search(r"^# Protobuf Python Version: (\S+)$", path.read_text(), re.MULTILINE)
        assert protobuf is not None
        assert lowest[canonicalize_name("protobuf")] >= Version(protobuf[1]), path.name
    for path in sorted((ROOT / "proto").glob("*_pb2_grpc.py")):
        grpcio = re.search(r"^GRPC_GENERATED_VERSION = '(\S+)'$", path.read_text(), re.MULTILINE)
        assert grpcio is not None
        assert lowest[canonicalize_name("grpcio")] >= Version(grpcio[1]), path.name


def test_the_license_is_the_one_named() -> None:
    assert project_settings()["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_changelog_knows_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", Path(ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert VERSION in headings or headings == ["Unreleased"]


def test_the_changelog_is_in_order() -> None:
    _, *releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    versions = [re.match(r"\[(.+?)\]", release) for release in releases]
    numbers = [Version(match[1]) for match in versions if match is not None and match[1] != "Unreleased"]
    assert numbers == sorted(set(numbers), reverse=True)
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for release in releases:
        found = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert found == [kind for kind in kinds if kind in found]


def test_the_version_stands_in_one_place() -> None:
    code = [path for path in tracked_files() if path.suffix in (".py", ".toml") and path.parent != ROOT / "tests"]
    holders = [path for path in code if f'"{VERSION}"' in path.read_text()]
    assert holders == [ROOT / "config" / "version.py"]


def test_classifiers_name_the_pythons_that_it_may_have() -> None:
    project = project_settings()["project"]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert pythons == sorted(pythons, key=Version)
    assert f">={pythons[0]}" == project["requires-python"]
    # The license is told by its expression; a classifier for it beside that is refused by indexes.
    assert [name for name in project["classifiers"] if name.startswith("License")] == []
