"""Whether recorded decode steps of a model give what its steps give that are not recorded.

Tried before a worker serves. What fails then is not found by the first call, and a model that cannot be recorded is
served all the same.
"""

import logging

from prefixgate.cache.hashing import CacheScope
from prefixgate.worker.model_runner import Row
from prefixgate.worker.probe import TOLERANCE, probe_ids
from prefixgate.worker.transformers_runner import TransformersRunner

logger = logging.getLogger(__name__)

_ROWS = 3
"""Filled up to a graph of four."""


def check_graphs(runner: TransformersRunner) -> str:
    """Compare both ways over a runner's pool, in which nobody has anything yet. Where they differ, graphs are given up.

    Returns in a line how decode steps will run.
    """
    graphs, runner.graphs = runner.graphs, None
    if graphs is None:
        return "decode steps are launched kernel by kernel"
    layout = runner.storage.layout
    token_ids = probe_ids(runner.spec.vocabulary_size, runner.spec.context_length)
    blocks = -(-len(token_ids) // layout.block_size)
    scope = CacheScope("graph-check", runner.spec.name)
    rows: list[Row] = []
    for number in range(min(_ROWS, runner.storage.num_blocks // blocks)):
        table = [blocks * number + block for block in range(blocks)]
        length = len(token_ids) - number
        runner.forward([Row(token_ids[: length - 1], 0, table, scope, True)])
        rows.append(Row(token_ids[length - 1 : length], length - 1, table, scope, True))
    if not rows:
        runner.graphs = graphs
        return "decode steps are recorded when they first come up; the pool is too small to try it"
    expected = runner.forward(rows)
    runner.graphs = graphs
    found = runner.forward(rows)
    if graphs.failed:
        runner.graphs = None
        return "decode steps are launched kernel by kernel, since recording one failed; the log says why"
    difference = float((found - expected).abs().max())
    limit = TOLERANCE[layout.dtype] * float(expected.abs().max())
    if not difference <= limit:  # true for NaN too
        runner.graphs = None
        logger.error(
            "A recorded decode step differs by %g from one that is not; at most %g is rounding", difference, limit
        )
        return f"decode steps are launched kernel by kernel, since a recorded one differs by {difference:.3g}"
    return "decode steps are recorded as CUDA graphs"
