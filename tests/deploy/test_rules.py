"""The configuration and the rules of Prometheus: well-formed, tested one by one, explained, and of names that exist."""

import re
from typing import Any

import pytest
import yaml

from tests.integration.prometheus import MISSING, SHIPPED, faster, is_installed, promtool
from tests.project.promql import metric_names, unknown_names
from tests.project.tree import ROOT

UNIT_TESTS = ROOT / "tests" / "deploy" / "alerts_test.yml"
PAGE = ROOT / "docs" / "monitoring.md"

with_promtool = pytest.mark.skipif(not is_installed(), reason=MISSING)


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((SHIPPED / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}


@with_promtool
@pytest.mark.parametrize(
    ("check", "name"),
    [
        *(("config", path.name) for path in sorted(SHIPPED.glob("prometheus*.yml"))),
        ("rules", "recording.yml"),
        ("rules", "alerts.yml"),
    ],
)
def test_promtool_finds_no_fault(check: str, name: str) -> None:
    checked = promtool("check", check, "--lint=all", "--lint-fatal", str(SHIPPED / name))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@with_promtool
def test_each_alert_fires_when_it_should_and_not_otherwise() -> None:
    tested = promtool("test", "rules", str(UNIT_TESTS))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_of_each_alert_the_firing_is_tested() -> None:
    tests = yaml.safe_load(UNIT_TESTS.read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == ALERTS.keys()


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_says_how_bad_it_is_and_where_to_read_on(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


def test_the_page_explains_every_alert_and_every_recorded_series() -> None:
    text = PAGE.read_text()
    recorded = {rule["record"] for rule in rules("recording.yml")}
    assert sorted(name for name in (*ALERTS, *recorded) if f"`{name}`" not in text) == []


@pytest.mark.parametrize(
    "expression", [rule["expr"] for name in ("recording.yml", "alerts.yml") for rule in rules(name)]
)
def test_rules_use_only_names_that_exist(expression: str) -> None:
    assert metric_names(expression)
    assert unknown_names(expression) == set()


def test_a_name_that_nobody_exports_is_found() -> None:
    expression = 'sum by (tenant) (rate(prefixgate_worker_steps_total{job="a"}[5m] offset 1h)) / on (b) gone_total > 2'
    assert metric_names(expression) == {"prefixgate_worker_steps_total", "gone_total"}
    assert unknown_names(expression) == {"gone_total"}


def test_time_that_passes_faster_changes_durations_alone() -> None:
    text = 'record: a:b:rate10m\nexpr: rate(x{le="2.5"}[10m] offset 5m) < 600 and y_30s > 0.05\nfor: 1h'
    assert faster(text, 60) == (
        'record: a:b:rate10m\nexpr: rate(x{le="2.5"}[10000ms] offset 5000ms) < 600 and y_30s > 0.05\nfor: 60000ms'
    )
