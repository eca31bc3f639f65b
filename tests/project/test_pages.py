"""The pages of the tree, the Makefile and the CI script name only what is there."""

import os
import re
import tomllib
from pathlib import Path

import pytest

from prefixgate.config.settings import load_settings
from tests.project.tree import ROOT, tracked_files

PAGES = [path for path in tracked_files() if path.suffix == ".md"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_commands_on_pages_are_targets(page: Path) -> None:
    text = page.read_text()
    # In spans, and where a line of a block begins so; a sentence may go on with that word too.
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    commands = [*re.findall(r"`make ([a-z-]+)", text), *re.findall(r"^make ([a-z-]+)", blocks, re.MULTILINE)]
    assert sorted(set(commands) - TARGETS) == []


def test_every_target_is_phony_and_explained() -> None:
    # The folder proto would otherwise make `make proto` do nothing.
    assert set(re.findall(r"^\.PHONY: ([a-z-]+)$", MAKEFILE, re.MULTILINE)) == TARGETS
    assert set(re.findall(r"^([a-z-]+):.* ## \S", MAKEFILE, re.MULTILINE)) == TARGETS


def test_continuous_integration_runs_the_command_that_the_readme_gives() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "exec make test"
    assert "make test" in (ROOT / "README.md").read_text()


def test_the_configuration_page_shows_a_file_that_is_understood(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    example = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert example is not None
    path = tmp_path / "example.toml"
    # A digest in full would be too long for the page.
    path.write_text(example[1].replace("0f2b...", "0f" * 32))
    settings = load_settings(path, {})
    written = tomllib.loads(example[1])
    assert set(settings.tenants) == set(written["tenants"])
    assert settings.worker.model == written["worker"]["model"]


@pytest.mark.parametrize("page", [page for page in PAGES if "```toml" in page.read_text()], ids=lambda page: page.name)
def test_settings_on_pages_are_understood(page: Path, tmp_path: Path) -> None:
    for example in re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        path = tmp_path / "example.toml"
        path.write_text(re.sub(r"sha256:[0-9a-f]+\.\.\.", f"sha256:{'0f' * 32}", example))
        load_settings(path, {})
