"""Every call of `prefixgate` on a page names a command and flags that are there."""

import re
import shlex

import pytest

from prefixgate.gateway.cli import COMMANDS, main
from tests.project.page_commands import fenced, inline, pages
from tests.project.tree import ROOT

NAMES = [command.name for command in COMMANDS]


def calls() -> list[tuple[str, str]]:
    """List each page and what it calls `prefixgate` with."""
    found = []
    for path in pages():
        text = path.read_text()
        typed = [command.removeprefix(".venv/bin/") for command in fenced(text)]
        page = str(path.relative_to(ROOT))
        found += [(page, call) for call in [*inline(text), *typed] if call.startswith("prefixgate ")]
    return found


def flags_of(name: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out))


@pytest.mark.parametrize("name", NAMES)
def test_flags_on_pages_are_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = flags_of(name, capsys)
    for page, call in calls():
        _, command, *words = shlex.split(call)
        if command == name:
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= known, (page, call)


def test_commands_on_pages_are_there() -> None:
    # In capitals it stands for any of them.
    named = {(page, shlex.split(call)[1]) for page, call in calls()}
    assert {(page, name) for page, name in named if name not in {*NAMES, "--version", "--help", "COMMAND"}} == set()


def test_blocks_are_read_as_a_shell_would() -> None:
    text = "```sh\n# a comment\n$ one --a 'b c'   # why\ntwo \\\n  --flag\n\n```\n```toml\nkey = 1\n```\n"
    assert list(fenced(text)) == ["one --a 'b c'", "two --flag"]
    loop = "for a in b c; do\n  echo $a\ndone > d"
    assert list(fenced(f"```sh\none\n{loop}\ntwo\n```\n")) == ["one", loop, "two"]
    assert list(inline("Run `prefixgate key` or ``prefixgate x``.")) == ["prefixgate key"]
