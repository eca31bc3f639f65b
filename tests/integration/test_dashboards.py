"""Every query of every dashboard and of docs/metrics.md, asked of a real Prometheus over real processes under load."""

import re
from collections.abc import Iterator

import pytest

from tests.integration.fleet import RunningFleet
from tests.integration.prometheus import MISSING, Prometheus, faster, is_installed
from tests.integration.sidecar import KEYS
from tests.integration.traffic import mixed_traffic
from tests.integration.waiting import HANG_SECONDS, until
from tests.project.dashboards import Query, filled, queries
from tests.project.metrics_page import documented_queries

pytestmark = [pytest.mark.skipif(not is_installed(), reason=MISSING), pytest.mark.timeout(600)]

VARIABLES = {"__rate_interval": "5s", "__range": "1h", "tenant": "|".join(KEYS), "worker": ".*"}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("dashboards")
    with (
        RunningFleet(folder, ["witness", "witness"], "--blocks=48") as fleet,
        Prometheus(folder, [fleet.metrics_url], [worker.metrics_url for worker in fleet.workers]) as server,
        mixed_traffic(fleet.address, clients=6),
    ):
        yield server


@pytest.mark.parametrize("query", queries(), ids=str)
def test_no_panel_is_empty(query: Query, prometheus: Prometheus) -> None:
    expression = filled(query.expression, VARIABLES)
    until(lambda: prometheus.numbers(expression), f"{expression} has an answer", 2 * HANG_SECONDS)


@pytest.mark.parametrize("expression", documented_queries())
def test_queries_of_the_page_about_metrics_are_answered(expression: str, prometheus: Prometheus) -> None:
    # A comparison is there to find what should not be.
    if re.search(r"[=<>]=? \d+$", expression):
        prometheus.query(expression)
    else:
        until(lambda: prometheus.numbers(faster(expression)), f"{expression} has an answer", 2 * HANG_SECONDS)
