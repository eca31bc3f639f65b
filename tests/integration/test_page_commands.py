"""The commands on pages run as they stand there, but for addresses, a smaller model and folders of the test's own."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from packaging.requirements import Requirement

from tests.counts import SOAK_VARIABLE
from tests.project.page_commands import PageCommand, commands
from tests.project.tree import ROOT, project_settings
from tests.served import STOP_SECONDS, Served

HANG_SECONDS = 120
DEMO_SECONDS = 3600

NOT_RUN: Mapping[str, str] = {
    "make venv": "made the environment that this runs in",
    "make check": "`make test` runs it before this",
    "make test": "runs this",
    "make soak": "runs this, with full counts",
    "make demo": "`make soak` runs its program, below",
    "docker ": "needs Docker; tests/deploy checks the files, and starts what they start without it",
    "kubectl ": "needs a cluster; tests/deploy checks the manifests, and starts what they start without one",
    "sudo ": "changes the machine",
    "install -D ": "changes the machine; tests/deploy checks the units",
    "systemd-sysusers": "changes the machine; tests/deploy checks the units",
    "cp -r deploy/grafana": "changes the machine; tests/deploy checks the dashboards",
    "mkdir -p /var/lib/grafana": "changes the machine; tests/deploy checks the dashboards",
    "prometheus ": "tests/integration/test_prometheus.py starts it with that file, and its own ports",
}
"""Beginnings of commands that are not run here, and why."""

FREE_PORTS = ("--gateway-listen", "127.0.0.1:0", "--gateway-http", "127.0.0.1:0", "--worker-http", "127.0.0.1:0")
CLIENTS = ("generate", "chat", "explain", "warm", "pin", "stats")
"""Commands that call a gateway."""


def reason(text: str) -> str | None:
    """Tell why a command is not run here; None where it is."""
    return next((why for beginning, why in NOT_RUN.items() if text.startswith(beginning)), None)


def how(text: str) -> str:
    """Tell in which way a command is run; empty where nobody has said."""
    program = text.removeprefix(".venv/bin/")
    if re.match(rf"prefixgate (?:{'|'.join(CLIENTS)})\b", program):
        return "client"
    for beginning, way in {
        "prefixgate serve": "server",
        "prefixgate doctor": "doctor",
        "pip install 'prefixgate[": "extra",
        "deploy/secrets.sh ": "secrets",
        "curl -s http://127.0.0.1:8051/": "page",
        "for rules in recording alerts; do": "rules",
    }.items():
        if program.startswith(beginning):
            return way
    return ""


ALL = commands()
RUN = [command for command in ALL if reason(command.text) is None]


def of(way: str) -> pytest.MarkDecorator:
    chosen = [
        pytest.param(command, id=f"{command.page}: {command.text}") for command in RUN if how(command.text) == way
    ]
    return pytest.mark.parametrize("command", chosen)


def words(command: PageCommand) -> list[str]:
    """Split a command, with this environment's program."""
    _, *arguments = shlex.split(command.text)
    return [sys.executable, "-m", "prefixgate.gateway", *arguments]


def run(*command: str, cwd: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("served"), "--model", "witness", "--blocks", "128") as served:
        served.wait_until_ready()
        yield served
        assert served.stop() == 0


def test_every_command_on_a_page_is_run_or_it_is_said_why_not() -> None:
    assert [command for command in RUN if not how(command.text)] == []


def test_what_is_not_run_is_on_a_page() -> None:
    assert [key for key in NOT_RUN if not any(command.text.startswith(key) for command in ALL)] == []


@of("client")
def test_commands_that_call_a_gateway(command: PageCommand, served: Served, tmp_path: Path) -> None:
    assert run(*words(command), "--address", served.address, cwd=tmp_path)


@of("server")
def test_commands_that_serve(command: PageCommand, tmp_path: Path) -> None:
    # Later flags win, and the embedded model is served by tests of its own.
    process = subprocess.Popen(
        [*words(command), *FREE_PORTS, "--model", "witness", "--blocks", "64"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            assert any(line.startswith("ready;") for line in process.stdout)
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            assert process.wait(STOP_SECONDS) == 0
        finally:
            process.kill()


@of("doctor")
def test_doctor_finds_this_machine_well(command: PageCommand, tmp_path: Path) -> None:
    # Whatever listens on the usual ports meanwhile is no problem of the tree's.
    assert "no problems" in run(*words(command), *FREE_PORTS, "--model", "witness", "--device", "cpu", cwd=tmp_path)


@of("extra")
def test_extras_that_are_installed_are_there(command: PageCommand) -> None:
    (requirement,) = (Requirement(word) for word in shlex.split(command.text)[2:] if word.startswith("prefixgate"))
    assert requirement.extras <= set(project_settings()["project"]["optional-dependencies"])


@of("secrets")
def test_secrets_are_made(command: PageCommand, tmp_path: Path) -> None:
    script, folder, *arguments = shlex.split(command.text)
    run(str(ROOT / script), str(tmp_path / folder), *arguments, cwd=tmp_path)
    assert (tmp_path / folder / "hash.key").is_file()


@of("page")
def test_pages_over_http_are_there(command: PageCommand, served: Served) -> None:
    _, _, path = command.text.partition("127.0.0.1:8051")
    with urlopen(served.metrics_url("gateway").removesuffix("/metrics") + path, timeout=HANG_SECONDS) as response:
        assert response.status == 200


@of("rules")
def test_rules_become_resources(command: PageCommand, tmp_path: Path) -> None:
    run("bash", "-euc", command.text.replace("/tmp/", f"{tmp_path}/"), cwd=ROOT)
    (made,) = tmp_path.iterdir()
    resources = [resource for resource in yaml.safe_load_all(made.read_text()) if resource]
    assert [resource["kind"] for resource in resources] == ["PrometheusRule"] * 2
    assert all(resource["spec"]["groups"] for resource in resources)


@pytest.mark.skipif(not os.environ.get(SOAK_VARIABLE), reason="generates for a while: make soak")
@pytest.mark.timeout(DEMO_SECONDS)
def test_the_demonstration_shows_what_it_says(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "demo" / "demo.py")], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.rstrip().endswith("all as expected")
