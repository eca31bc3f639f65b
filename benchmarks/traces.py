"""Request traces with prefix-chained block ids, for replaying against the cache.

A trace is a file ``NAME.b<B>.jsonl.gz``, one JSON object a line in the order of arrival: ``input_length`` in tokens and
``blocks``, a list of ``[first, count]`` runs of ids. An id stands for a block of B tokens *and* all that came before
it, and ids are numbered in the order in which they were first seen. In a ``NAME_io`` file the ids go on through the
output, and the prompt's own are the first ``input_length // B``. Routing also reads ``t`` (milliseconds),
``output_length`` in tokens and ``conv``, the number of the conversation; the rest can do without them.
"""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_FILE_NAME = re.compile(r"(?P<name>.+)\.b(?P<block>\d+)\.jsonl\.gz")

PUBLISHED_AT = {
    "mooncake_conversation": "kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl",
    "mooncake_synthetic": "kvcache-ai/Mooncake, FAST25-release/traces/synthetic_trace.jsonl",
    "ragpulse": "flashserve/RAGPulse, data",
    "claude_code_v6": "callanjfox/kv-cache-tester, traces",
    "tau_airline_io": "sierra-research/tau-bench, historical_trajectories/gpt-4o-airline.json",
    "lmcache_miniswe_io": "LMCache/lmcache-agent-trace, miniswe",
    "lmcache_magagent_io": "LMCache/lmcache-agent-trace, magagent",
}
"""Where on GitHub the traces that the documentation's figures come from are published."""


class TraceRequest(NamedTuple):
    """One call: its path through the tree of blocks."""

    prompt_tokens: int
    prompt_blocks: int
    """Leading ids that are looked up; the rest is output."""
    num_blocks: int
    runs: list[list[int]]
    """``[first id, count]`` in path order."""
    arrival_ms: float = 0.0
    output_tokens: int = 0
    conversation: int = 0

    def ids(self) -> list[int]:
        return [block for first, count in self.runs for block in range(first, first + count)]


@dataclass(frozen=True)
class Trace:
    """Requests in the order of arrival."""

    name: str
    block_size: int
    requests: list[TraceRequest]

    @property
    def unique_blocks(self) -> int:
        return max((first + count for request in self.requests for first, count in request.runs), default=0)


def load_traces(folder: Path) -> Iterator[Trace]:
    """Read every trace in a folder, one at a time. Raises FileNotFoundError where there is none."""
    found = [(path, match) for path in sorted(folder.iterdir()) if (match := _FILE_NAME.fullmatch(path.name))]
    if not found:
        raise FileNotFoundError(f"{folder}: no file is named like NAME.b16.jsonl.gz")
    for path, match in found:
        yield _load(path, match["name"], int(match["block"]))


def _load(path: Path, name: str, block_size: int) -> Trace:
    requests = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            num_blocks = sum(count for _, count in record["blocks"])
            own = record["input_length"] // block_size if name.endswith("_io") else num_blocks
            requests.append(
                TraceRequest(
                    record["input_length"],
                    own,
                    num_blocks,
                    record["blocks"],
                    record.get("t", 0.0),
                    record.get("output_length", 0),
                    record.get("conv", 0),
                )
            )
    return Trace(name, block_size, requests)
