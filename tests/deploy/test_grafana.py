"""The dashboards and what provisions them: complete, of names that exist, and where Grafana looks for them."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.project.dashboards import GRAFANA, Query, dashboards, queries
from tests.project.promql import metric_names, unknown_names

DASHBOARDS = dashboards()
GIVEN = {"__rate_interval", "__range"}
"""Variables that every dashboard has."""

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@pytest.fixture(params=DASHBOARDS)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return DASHBOARDS[request.param]


def test_there_are_three() -> None:
    assert DASHBOARDS.keys() == {"overview", "cache", "tenants"}
    assert {name: dashboard["uid"] for name, dashboard in DASHBOARDS.items()} == {
        name: f"prefixgate-{name}" for name in DASHBOARDS
    }


def test_grafana_has_a_meaning_for_every_field(dashboard: dict[str, Any]) -> None:
    register_default_plugins()  # the kinds of panels that come with Grafana
    understood = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    # Fields that Grafana writes itself and its models leave out.
    assert set(_lost(dashboard, understood)) <= {"builtIn", "definition"}


def test_panels_have_a_place_each(dashboard: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_panels_say_what_they_show(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"] == SOURCE, panel["title"]
        if panel["type"] != "alertlist":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert [target["datasource"] for target in panel["targets"]] == [SOURCE] * len(panel["targets"])
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_variables_are_those_that_queries_use(dashboard: dict[str, Any]) -> None:
    declared = {variable["name"] for variable in dashboard["templating"]["list"]}
    text = str(dashboard["panels"])
    assert set(re.findall(r"\$\{?(\w+)", text)) - GIVEN == declared
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
            assert found is not None
            assert unknown_names(found[1]) == set()


@pytest.mark.parametrize("query", queries(), ids=str)
def test_queries_use_only_names_that_exist(query: Query) -> None:
    assert metric_names(query.expression)
    assert unknown_names(query.expression) == set()


def test_grafana_finds_its_data_and_the_dashboards_where_the_page_says() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prefixgate.yaml").read_text())
    assert [(source["type"], source["url"]) for source in sources["datasources"]] == [("prometheus", "$PROMETHEUS_URL")]
    providers = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "prefixgate.yaml").read_text())["providers"]
    page = (GRAFANA.parents[1] / "docs" / "monitoring.md").read_text()
    assert f"cp deploy/grafana/dashboards/*.json {providers[0]['options']['path']}/" in page
    assert "PROMETHEUS_URL" in page


def _lost(given: Any, understood: Any) -> Iterator[str]:
    """Name the fields that are not understood as they were given."""
    if isinstance(given, dict):
        for name, value in given.items():
            if name in understood:
                yield from _lost(value, understood[name])
            else:
                yield name
    elif isinstance(given, list):
        for one, other in zip(given, understood, strict=True):
            yield from _lost(one, other)
    elif given != understood:
        yield f"{given!r} became {understood!r}"
