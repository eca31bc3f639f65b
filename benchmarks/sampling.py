"""How long it takes to choose a step's tokens, for rows that ask for this or that.

    python -m benchmarks.sampling [--rows 64] [--json FILE]

Prints milliseconds for a whole batch, the median of many, on the vocabulary of the witness model and on one of the
embedded model's size. Under ``--json`` they stand as ``VOCABULARY/KIND``. Rows that ask for nothing must not pay for
those that do, so the first line is the one to watch.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from prefixgate.worker.request import SamplingParams
from prefixgate.worker.sampler import Sampler
from prefixgate.worker.sequence import Sequence
from prefixgate.worker.token_set import TokenSet

VOCABULARIES = {"witness": 259, "large": 49_152}
PROMPT, OUTPUT = 500, 100
SECONDS = 1.0

KINDS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(1000),
    "temperature": SamplingParams(1000, temperature=1.0),
    "min_p": SamplingParams(1000, temperature=1.0, min_p=0.05),
    "top_k": SamplingParams(1000, temperature=1.0, top_k=40),
    "top_p": SamplingParams(1000, temperature=1.0, top_p=0.9),
    "flat top_p": SamplingParams(1000, temperature=100.0, top_p=0.9),
    "repetition": SamplingParams(1000, repetition_penalty=1.1),
    "frequency": SamplingParams(1000, frequency_penalty=0.5),
    "bias": SamplingParams(1000, logit_bias=tuple((token, 1.0) for token in range(100))),
    "allowed": SamplingParams(1000, allowed_ids=TokenSet.of(range(100))),
    "min_tokens": SamplingParams(1000, min_tokens=500),
    "logprobs": SamplingParams(1000, logprobs=5),
}


def milliseconds(logits: torch.Tensor, params: SamplingParams) -> float:
    """Time one kind of rows, after a first run that counts for nothing."""
    vocabulary = logits.shape[1]
    tokens = [(7 * position) % vocabulary for position in range(PROMPT + OUTPUT)]
    rows = [(params, Sequence(0, token_ids=list(tokens), num_output=OUTPUT)) for _ in range(len(logits))]
    sampler = Sampler(frozenset({0}))
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        since = time.perf_counter()
        sampler.choose(logits, rows)
        times.append(time.perf_counter() - since)
    return 1e3 * statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    figures: dict[str, float] = {}
    for name, vocabulary in VOCABULARIES.items():
        logits = torch.randn(args.rows, vocabulary) * 3
        for kind, params in KINDS.items():
            figures[f"{name}/{kind}"] = milliseconds(logits, params)
            sys.stdout.write(f"{name:8} {kind:12} {figures[f'{name}/{kind}']:9.3f} ms\n")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
