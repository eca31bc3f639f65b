"""The dashboards of deploy/grafana, as what reads them sees them."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.project.tree import ROOT

GRAFANA = ROOT / "deploy" / "grafana"


class Query(NamedTuple):
    """One query of one panel."""

    dashboard: str
    panel: str
    expression: str

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel}"


def dashboards() -> dict[str, dict[str, Any]]:
    """Read all dashboards, by the names of their files."""
    paths = sorted((GRAFANA / "dashboards").glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def queries() -> list[Query]:
    """List every query of every panel."""
    return [
        Query(name, panel["title"], target["expr"])
        for name, dashboard in dashboards().items()
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def filled(expression: str, values: Mapping[str, str]) -> str:
    """Put values in the place of a query's variables, as Grafana does. Raises KeyError for one that has none."""
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)
