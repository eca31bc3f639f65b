import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prefixgate.config.version import VERSION
from prefixgate.gateway.cli import COMMANDS, main
from prefixgate.gateway.tenants import digest_api_key

NAMES = [command.name for command in COMMANDS]


def ended(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--version"]) == 0
    assert capsys.readouterr().out == f"prefixgate {VERSION}\n"


def test_the_help_names_every_command_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name in NAMES if f"    {name}" not in text] == []
    # Each example must be a command line that is understood.
    examples = re.findall(r"^  prefixgate (.*?)(?:   .*)?$", text, re.MULTILINE)
    assert {example.split()[0] for example in examples} >= {"serve", "generate", "key"}


@pytest.mark.parametrize(("name", "description"), [(command.name, command.description) for command in COMMANDS])
def test_every_command_explains_itself(name: str, description: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: prefixgate {name}" in text
    assert description in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND"]),
        (["serv"], ["invalid choice: 'serv'", "serve"]),
        (["serve", "--bloks", "4"], ["prefixgate serve", "--bloks", "did you mean --blocks?"]),
        (["serve", "--max-run", "4"], ["--max-run:"]),
        (["serve", "--workers", "unix:/a"], ["--workers:"]),
        (["gateway", "--blocks", "4"], ["prefixgate gateway", "--blocks"]),
        (["key", "extra"], ["prefixgate key", "extra"]),
    ],
)
def test_unknown_arguments_are_refused_by_name(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(arguments) == 2
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == []


@pytest.mark.parametrize("command", ["serve", "worker", "gateway"])
def test_wrong_settings_are_refused_before_anything_starts(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prefixgate.toml"
    path.write_text("[worker]\nmax_running = 0")
    assert main([command, "--config", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"prefixgate {command}: worker.max_running: 0 is not allowed; it must be an integer from 1 to 4,096\n"
    )
    assert main([command, "--config", str(tmp_path / "missing")]) == 2
    assert "missing: cannot be read" in capsys.readouterr().err


def test_a_gateway_needs_to_know_its_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway"]) == 2
    assert "gateway.workers is not set" in capsys.readouterr().err


def test_the_worker_becomes_another_program_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    class Replaced(Exception):  # exec does not return
        pass

    def execv(path: str, arguments: list[str]) -> None:
        raise Replaced(path, arguments)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(Replaced) as replaced:
        main(["worker", "--model", "witness", "--blocks=64"])
    program = [sys.executable, "-P", "-m", "prefixgate.worker", "--model", "witness", "--blocks=64"]
    assert replaced.value.args == (sys.executable, program)


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_missing_worker_install_is_told_with_its_remedy(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    assert main([command]) == 2
    assert "pip install 'prefixgate[worker]'" in capsys.readouterr().err


def test_a_new_key_comes_with_the_digest_that_configures_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key"]) == 0
    text = capsys.readouterr().out
    key = re.search(r"pg-\S+", text)
    assert key is not None
    digest = digest_api_key(key[0].encode())
    assert f'[tenants.NAME]\n  api_keys = ["{digest}"]' in text
    assert f'[gateway]\n  operator_keys = ["{digest}"]' in text


def test_no_module_of_the_gateway_loads_torch() -> None:
    program = """
import importlib, pkgutil, sys
import prefixgate.gateway as gateway
names = [module.name for module in pkgutil.walk_packages(gateway.__path__, "prefixgate.gateway.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names), sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers"}))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    count, _, loaded = result.stdout.strip().partition(" ")
    assert int(count) > 10
    assert loaded == "[]"
