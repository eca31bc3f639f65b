"""The units: what systemd says of them, and their command lines as processes."""

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.caller import Caller, tokens_of
from tests.deploy.container import Container, Place
from tests.deploy.secrets import make_secrets
from tests.project.tree import ROOT

UNITS = ROOT / "deploy" / "systemd"
NAMES = ("prefixgate-worker", "prefixgate-gateway")


class Unit(configparser.RawConfigParser):
    """A unit file; of keys that stand several times only the last is kept."""

    def __init__(self, name: str) -> None:
        super().__init__(strict=False, interpolation=None, comment_prefixes=("#",))
        self.read(UNITS / f"{name}.service")

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_systemd_knows_every_key(name: str, tmp_path: Path) -> None:
    for unit in NAMES:
        text = (UNITS / f"{unit}.service").read_text()
        # The program is not installed here; that is the one thing which may be missing.
        (tmp_path / f"{unit}.service").write_text(text.replace("/opt/prefixgate/bin/prefixgate", "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / f"{name}.service")]
    said = subprocess.run(command, capture_output=True, text=True)
    assert [line for line in said.stderr.splitlines() if str(tmp_path) in line or "prefixgate" in line] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_has_the_time_to_drain(name: str) -> None:
    service = Unit(name)["Service"]
    assert float(service["TimeoutStopSec"]) > 30
    assert service["KillSignal"] == "SIGTERM"
    assert "KillMode" not in service


def test_the_gateway_is_started_after_the_worker_and_so_stopped_before_it() -> None:
    assert "prefixgate-worker.service" in Unit("prefixgate-gateway")["Unit"]["After"].split()


def test_the_command_lines_serve_and_drain(folder: Path) -> None:
    secrets = make_secrets(folder / "secrets")
    (folder / "run").mkdir(mode=0o700)
    places = {
        "/etc/prefixgate": secrets,
        "/run/prefixgate": folder / "run",
        "/var/cache/prefixgate": folder / "cache",
        "${CREDENTIALS_DIRECTORY}": secrets,
    }
    place = Place(places, {}, {"/opt/prefixgate/bin/prefixgate": "prefixgate"})
    containers = []
    for name in NAMES:
        service = Unit(name)["Service"]
        assert service["LoadCredential"] == "hash.key:/etc/prefixgate/hash.key"
        environment = dict(pair.split("=", 1) for pair in shlex.split(service.get("Environment", "")))
        argv = [place.text(part) for part in shlex.split(service["ExecStart"])]
        containers.append(Container(name, argv, environment, folder / f"{name}.log"))
    with containers[0] as worker, containers[1] as gateway:
        worker.start()
        gateway.start()
        worker.until(lambda: "Serving" in worker.log, "serving")
        gateway.until(lambda: "Serving on" in gateway.log, "serving")
        (port,) = re.findall(r"Serving on 127\.0\.0\.1:(\d+)", gateway.log)
        caller = Caller(int(port), secrets)
        gateway.until(lambda: bool(caller.is_served()), "a worker was found")
        stream = caller.stream(100)
        first = next(stream)
        for container in (gateway, worker):
            container.ask_to_end()
            assert container.end() == 0, container.log
        assert tokens_of([first, *stream]) == 100
        caller.close()
