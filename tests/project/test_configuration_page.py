import re

import pytest

from prefixgate.gateway.cli import COMMANDS, main
from prefixgate.gateway.reference import page
from tests.project.tree import ROOT

KEPT = (ROOT / "docs" / "configuration.md").read_text()


def test_the_page_is_what_the_settings_say() -> None:
    assert page() == KEPT, "run `make reference`"


@pytest.mark.parametrize("command", [name for name, *_ in COMMANDS])
def test_every_flag_of_every_command_is_on_the_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}
    # The other form of a flag that is either on or off.
    flags = {flag for flag in flags if not flag.startswith("--no-")}
    assert [flag for flag in sorted(flags) if f"`{flag}" not in KEPT] == []
