"""`prefixgate doctor`: what it prints, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from prefixgate.config.hash_key import HASH_KEY_VARIABLE
from prefixgate.config.version import VERSION
from prefixgate.gateway.cli import main

FREE = ("--gateway-listen", "127.0.0.1:0", "--gateway-http", "127.0.0.1:0")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HASH_KEY_VARIABLE, "5c" * 32)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = as_json(capsys, "gateway", *FREE, "--workers", f"unix:{tmp_path}/worker.sock")
    assert (code, report["ok"], report["version"], report["process"]) == (0, True, VERSION, "gateway")
    assert {finding["level"] for finding in report["findings"]} == {"ok", "warning"}
    assert all(bool(finding["remedy"]) is (finding["level"] != "ok") for finding in report["findings"])


def test_a_problem_is_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = as_json(capsys, "gateway", *FREE)
    assert (code, report["ok"]) == (1, False)
    (problem,) = [finding for finding in report["findings"] if finding["level"] == "problem"]
    assert problem["message"] == "gateway.workers is not set"


def test_wrong_settings_are_a_problem_among_others(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = as_json(capsys, "gateway", "--default-max-tokens", "none")
    assert code == 1
    assert [finding["check"] for finding in report["findings"] if finding["level"] == "problem"] == ["settings"]


def test_people_read_a_table_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "gateway", *FREE]) == 1
    text = capsys.readouterr().out
    assert "→ set gateway.workers" in text
    assert text.rstrip().endswith("1 problem, no warnings: correct what is a problem before you start it")


def test_an_unknown_process_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "everything"])
    assert "everything" in capsys.readouterr().err
