"""The programs on pages run as they stand there."""

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.project.page_commands import pages
from tests.project.tree import ROOT
from tests.served import Served

ADDRESS = '"127.0.0.1:8050"'
PAGES = [str(path.relative_to(ROOT)) for path in pages() if "```python" in path.read_text()]
ANSWER = re.compile(r"^(.{10,})\n\[(\d+) of (\d+) prompt tokens came from the cache\]$", re.MULTILINE)


def programs(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


PROGRAMS = [pytest.param(program, id=f"{page}-{i}") for page in PAGES for i, program in enumerate(programs(page))]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("pages"), "--model", "witness", "--blocks", "128") as served:
        served.wait_until_ready()
        yield served
        assert served.stop() == 0


def output(program: str, served: Served) -> str:
    """Run a program, and give what it prints."""
    command = [sys.executable, "-c", program.replace(ADDRESS, repr(served.address))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.stderr == ""
    return result.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_on_pages_run_as_they_stand(program: str, served: Served) -> None:
    assert ADDRESS in program
    assert ANSWER.search(output(program, served)) is not None


def test_the_readmes_client_is_short_and_shows_what_the_cache_saved(served: Served) -> None:
    (program,) = programs("README.md")
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
    assert set(re.findall(r"^(?:import|from) (\S+)", program, re.MULTILINE)) == {"prefixgate.gateway.client"}
    # A system prompt of its own, so that nothing of it is cached.
    answers = ANSWER.findall(output(program.replace("You are", "You were"), served))
    assert len(answers) == 2
    (_, cold, _), (_, warm, prompt) = answers
    # The second question shares the system prompt with the first, one token for each byte in this model.
    assert int(cold) < 32
    assert 100 < int(warm) < int(prompt)
