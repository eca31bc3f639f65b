"""Which metrics an expression of PromQL names, and which of them nobody exports."""

import re
from collections.abc import Iterator

import yaml

from tests.project.metrics_page import read_page
from tests.project.tree import ROOT

OF_PROMETHEUS = frozenset({"up", "ALERTS"})
"""What Prometheus adds itself, about each target and each alert."""

_QUOTED = re.compile(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)')
_NAME = re.compile(r"\b[a-z_][a-z0-9_]*(?::[a-z0-9_:]+)?\b(?!\s*\()", re.IGNORECASE)
_WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan"})


def metric_names(expression: str) -> set[str]:
    """Name what an expression selects: what is neither a function, a keyword, a label nor a number."""
    bare = _QUOTED.sub(" ", expression)
    # A duration after `offset` is a number with a unit; names do not begin with digits.
    return {name for name in _NAME.findall(bare) if name.lower() not in _WORDS}


def unknown_names(expression: str) -> set[str]:
    """Of these, name what no page of metrics has and no rule records."""
    return metric_names(expression) - set(_known())


def _known() -> Iterator[str]:
    yield from OF_PROMETHEUS
    for lines in read_page().values():
        for line in lines:
            yield from (
                f"{line.name}{end}" for end in (("_bucket", "_sum", "_count") if line.kind == "histogram" else ("",))
            )
    recording = yaml.safe_load((ROOT / "deploy" / "prometheus" / "recording.yml").read_text())
    yield from (rule["record"] for group in recording["groups"] for rule in group["rules"])
