"""The commands of docs/monitoring.md, run as they stand but for folders and ports of this test's own."""

import json
import re
import shlex
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.integration.prometheus import MISSING, SHIPPED, is_installed, ready
from tests.project.tree import ROOT


def commands(heading: str) -> list[str]:
    """Read the blocks of commands of one section, in order."""
    section = (ROOT / "docs" / "monitoring.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


@pytest.mark.skipif(not is_installed(), reason=MISSING)
def test_prometheus_starts_with_the_shipped_files_and_is_reached_from_this_machine_only(tmp_path: Path) -> None:
    command = commands("Prometheus")[0]
    assert "--web.listen-address=127.0.0.1:9090" in command
    command = command.replace("127.0.0.1:9090", "127.0.0.1:0").replace("/var/tmp/prometheus", str(tmp_path / "data"))
    with (
        (tmp_path / "prometheus.log").open("w") as log,
        subprocess.Popen(shlex.split(command), cwd=ROOT, stderr=log) as process,
    ):
        try:
            url = ready(process, tmp_path / "prometheus.log")
            with urllib.request.urlopen(f"{url}/api/v1/status/config", timeout=60) as answer:
                config = json.load(answer)["data"]["yaml"]
        finally:
            process.kill()
    assert {"alerts.yml", "recording.yml"} <= {Path(name).name for name in re.findall(r"- (\S+\.yml)$", config, re.M)}
    assert {"127.0.0.1:8051", "127.0.0.1:8052"} <= set(re.findall(r"- (127\S+)$", config, re.M))


def test_files_are_copied_to_where_grafana_looks(tmp_path: Path) -> None:
    (script,) = commands("Grafana")
    for folder in ("/etc/grafana", "/var/lib/grafana"):
        assert folder in script
        script = script.replace(folder, f"{tmp_path}{folder}")
    (tmp_path / "etc/grafana/provisioning").mkdir(parents=True)
    subprocess.run(["bash", "-euc", script], cwd=ROOT, check=True)
    copied = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert copied == [
        "etc/grafana/provisioning/dashboards/prefixgate.yaml",
        "etc/grafana/provisioning/datasources/prefixgate.yaml",
        "var/lib/grafana/dashboards/cache.json",
        "var/lib/grafana/dashboards/overview.json",
        "var/lib/grafana/dashboards/tenants.json",
    ]


def test_the_operator_of_prometheus_gets_the_same_rules(tmp_path: Path) -> None:
    script = commands("Prometheus")[1]
    assert script.count("/tmp/") == 1
    subprocess.run(["bash", "-euc", script.replace("/tmp/", f"{tmp_path}/")], cwd=ROOT, check=True)
    made = yaml.safe_load_all((tmp_path / "prefixgate-rules.yaml").read_text())
    resources = {resource["metadata"]["name"]: resource for resource in made if resource is not None}
    assert {resource["kind"] for resource in resources.values()} == {"PrometheusRule"}
    for name in ("recording", "alerts"):
        shipped = yaml.safe_load((SHIPPED / f"{name}.yml").read_text())
        assert resources.pop(f"prefixgate-{name}")["spec"] == shipped
    assert resources == {}
