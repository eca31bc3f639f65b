"""The tables of docs/metrics.md."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.project.tree import ROOT

HEADINGS: Mapping[str, str] = {"## The gateway's metrics": "gateway", "## The worker's metrics": "worker"}


PAGE = ROOT / "docs" / "metrics.md"


class Line(NamedTuple):
    """One metric, as the page has it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    meaning: str

    def __str__(self) -> str:
        labels = ", ".join(f"`{label}`" for label in self.labels)
        return f"| `{self.name}` | {self.kind} | {labels} | {self.unit} | {self.meaning} |".replace("|  |", "| |")


def documented_queries() -> list[str]:
    """List the examples of PromQL: those that stand in blocks, and those of the table of questions."""
    text = PAGE.read_text()
    blocks = re.findall(r"^```promql\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    answers = [line.split(" | ")[1] for line in _section(text, "## Other questions") if line.startswith("| ")]
    return blocks + [query for answer in answers for query in re.findall(r"`([^`]*_[^`]*)`", answer)]


def read_page(text: str | None = None) -> Mapping[str, Sequence[Line]]:
    """Read the lines of each process's table, in order."""
    tables: dict[str, list[Line]] = {process: [] for process in HEADINGS.values()}
    process = ""
    for line in PAGE.read_text().splitlines() if text is None else text.splitlines():
        if line.startswith("## "):
            process = HEADINGS.get(line, "")
        elif process and line.startswith("| `"):
            tables[process].append(_line(line))
    return tables


def _section(text: str, heading: str) -> list[str]:
    return text.partition(f"\n{heading}\n")[2].partition("\n## ")[0].splitlines()


def _line(text: str) -> Line:
    name, kind, labels, unit, meaning = (cell.strip() for cell in text.strip("|").split("|"))
    return Line(name.strip("`"), kind, tuple(_labels(labels)), unit, meaning)


def _labels(cell: str) -> Iterator[str]:
    return (label.strip(" `") for label in cell.split(",") if label.strip())
