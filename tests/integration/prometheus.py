"""A real Prometheus over real processes, with the configuration and the rules that are shipped."""

import json
import math
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.integration.waiting import HANG_SECONDS, until
from tests.project.tree import ROOT

SHIPPED = ROOT / "deploy" / "prometheus"
MISSING = "Debian's package prometheus is not installed: make programs, as root"

FASTER = 60
"""How much faster time passes in the rules that tests run: five minutes are five seconds."""

_DURATION = re.compile(r"\b(\d+)(s|m|h)\b")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def is_installed() -> bool:
    return bool(shutil.which("prometheus") and shutil.which("promtool"))


def faster(text: str, factor: int = FASTER) -> str:
    """Divide each duration of a configuration or a file of rules: intervals, windows of rates, and what `for` says.

    Nothing else changes: a number without a unit, such as the seconds that an alert compares with, stays as it is, and
    so do the names of recorded series, in which no duration stands alone.
    """
    return _DURATION.sub(lambda found: f"{int(found[1]) * _SECONDS[found[2]] * 1000 // factor}ms", text)


class Series(NamedTuple):
    """One element of an answer."""

    labels: Mapping[str, str]
    value: float


class Alert(NamedTuple):
    """One element of an alert."""

    labels: Mapping[str, str]
    fires: bool
    """Or is pending, that is has yet to last for some time."""


class Prometheus:
    """One server; a context manager that ends it."""

    def __init__(self, folder: Path, gateways: Iterable[str], workers: Iterable[str]) -> None:
        """Take the addresses of the pages, as host:port. What it keeps lies in ``folder``."""
        self._folder = folder
        for name in ("recording.yml", "alerts.yml"):
            (folder / name).write_text(faster((SHIPPED / name).read_text()))
        config = faster((SHIPPED / "prometheus.yml").read_text())
        for default, targets in (("127.0.0.1:8051", gateways), ("127.0.0.1:8052", workers)):
            assert config.count(f'["{default}"]') == 1, f"{default} is not the one target of its job"
            config = config.replace(f'["{default}"]', json.dumps([_host(target) for target in targets]))
        (folder / "prometheus.yml").write_text(config)

    def __enter__(self) -> Self:
        log = self._folder / "prometheus.log"
        command = (
            "prometheus",
            f"--config.file={self._folder}/prometheus.yml",
            f"--storage.tsdb.path={self._folder}/data",
            "--web.listen-address=127.0.0.1:0",
        )
        with log.open("w") as file:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file)
        try:
            self._url = ready(self._process, log)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def query(self, promql: str) -> list[Series]:
        """Ask for what is so now. Raises what a wrong query is answered with."""
        result = self._get("query", query=promql)["result"]
        return [Series(element["metric"], float(element["value"][1])) for element in result]

    def numbers(self, promql: str) -> list[float]:
        """Ask for what is so now, without what is no number since there was nothing to divide."""
        return [series.value for series in self.query(promql) if math.isfinite(series.value)]

    def by(self, label: str, promql: str) -> dict[str, float]:
        """Ask for the values of one label."""
        return {series.labels.get(label, ""): series.value for series in self.query(promql)}

    def until(self, promql: str, condition: Callable[[float], bool] = lambda value: True) -> float:
        """Wait until the answer is one number, of which the condition is true."""

        def answer() -> list[float]:
            numbers = self.numbers(promql)
            return numbers if len(numbers) == 1 and condition(numbers[0]) else []

        return until(answer, f"{promql} has such a value", 2 * HANG_SECONDS)[0]

    def alerts(self) -> list[Alert]:
        """List what fires, and what would before long."""
        return [Alert(alert["labels"], alert["state"] == "firing") for alert in self._get("alerts")["alerts"]]

    def firing(self) -> set[str]:
        """Name the alerts that fire now."""
        return {alert.labels["alertname"] for alert in self.alerts() if alert.fires}

    def wait_for_evaluations(self, count: int) -> None:
        """Wait until the alerts have been evaluated so many times more."""
        for _ in range(count):
            last = self._last_evaluation()
            until(lambda last=last: self._last_evaluation() != last, "the alerts are evaluated")  # type: ignore[misc]

    def rules(self) -> list[Mapping[str, Any]]:
        """List the rules that are loaded, with their health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _last_evaluation(self) -> str:
        groups = {group["name"]: group["lastEvaluation"] for group in self._get("rules")["groups"]}
        return str(groups["prefixgate-alerts"])

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=HANG_SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None


def ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until a Prometheus that logs to a file answers, and return its address."""
    found = until(
        lambda: re.search(r'msg="Listening on" address=(\S+)', log.read_text()) or process.poll() is not None,
        "Prometheus listens",
    )
    assert isinstance(found, re.Match), log.read_text()
    url = f"http://{found[1]}"
    until(lambda: _is_ready(url), "Prometheus is ready")
    return url


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=HANG_SECONDS) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


def _host(page: str) -> str:
    """Take the host and port of a page's address."""
    return urllib.parse.urlsplit(page).netloc or page


def promtool(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool, and return what it said, however that went."""
    return subprocess.run(
        ("promtool", *arguments), input=stdin, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
