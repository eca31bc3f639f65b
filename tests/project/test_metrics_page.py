import re
from collections.abc import Mapping, Sequence

import pytest

from prefixgate.gateway import metrics as gateway
from prefixgate.worker import metrics as worker
from tests.project.metrics_page import Line, read_page
from tests.project.tree import ROOT

TEXTS = [(ROOT / name).read_text() for name in ("docs/metrics.md", "README.md")]
PAGE = read_page()
UNITS = {
    *("blocks", "calls", "checks", "collisions", "ejections", "errors", "misses", "outputs"),
    *("pins", "preemptions", "refusals", "resyncs", "seconds", "sequences", "steps", "tokens", "violations"),
}
NAMED_OTHERWISE = {
    "prefixgate_gateway_worker_ready": "flag",
    "prefixgate_gateway_worker_up": "flag",
    "prefixgate_worker_info": "flag",
    "vllm:cache_config_info": "flag",
    "vllm:kv_cache_usage_perc": "share",
    "vllm:num_requests_running": "outputs",
    "vllm:num_requests_waiting": "outputs",
    "vllm:request_success_total": "outputs",
    "vllm:prefix_cache_queries_total": "tokens",
    "vllm:prefix_cache_hits_total": "tokens",
    "vllm:inter_token_latency_seconds": "seconds",
}


def unit_of(name: str) -> str:
    """Tell the unit that a metric's name carries: the last of its words that is one."""
    words = [word for word in re.split(r"[_:]", name) if word in UNITS]
    return NAMED_OTHERWISE.get(name) or words[-1]


TABLES: Mapping[str, Sequence[Line]] = {
    "gateway": [Line(m.name, m.kind, m.labels, m.unit, m.help) for m in gateway.METRICS],
    "worker": [Line(m.name, m.kind, m.labels, unit_of(m.name), m.help) for m in worker.METRICS],
}


@pytest.mark.parametrize("process", TABLES)
def test_each_process_has_the_metrics_that_the_page_lists_in_its_order(process: str) -> None:
    lines, wanted = [[str(line) for line in table[process]] for table in (PAGE, TABLES)]
    assert [line for line in wanted if line not in lines] == [], "lines that the page lacks"
    assert [line for line in lines if line not in wanted] == [], "lines of the page that are not so"
    assert lines == wanted


def test_the_gateways_units_are_in_its_names_too() -> None:
    assert {m.name: unit_of(m.name) for m in gateway.METRICS} == {m.name: m.unit for m in gateway.METRICS}


def test_pages_name_metrics_that_are_there() -> None:
    asked = {name for text in TEXTS for name in re.findall(r"\b(?:prefixgate_(?:gateway|worker)_|vllm:)\w+", text)}
    assert len(asked) > 20
    there = {name for table in TABLES.values() for line in table for name in series_names(line)}
    assert sorted(asked - there) == []


def series_names(line: Line) -> list[str]:
    return [line.name, *(f"{line.name}{part}" for part in ("_bucket", "_sum", "_count") if line.kind == "histogram")]


def test_a_table_is_read_as_it_is_written() -> None:
    line = Line("prefixgate_worker_steps_total", "counter", ("a", "b"), "steps", "Steps.")
    bare = line._replace(labels=())
    page = f"## The worker's metrics\n\n| name |\n|---|\n{line}\n{bare}\n\n## Else\n\n{line}\n"
    assert read_page(page) == {"gateway": [], "worker": [line, bare]}
