"""What a call does to the model's logits before a token is chosen from them.

In this order: penalties, biases, the ids that are allowed, the ids that are banned. Rows whose calls ask for none of
it never come here. Edited logits are float64, in which nothing that the fields allow overflows, and a token that
cannot be chosen has -inf.
"""

from collections.abc import Sequence

import numpy as np
import torch

from prefixgate.worker.penalties import flat_places, penalise
from prefixgate.worker.request import SamplingParams
from prefixgate.worker.sequence import Sequence as Output
from prefixgate.worker.transfers import upload


def needs_edits(params: SamplingParams, output: Output, ahead: int = 0) -> bool:
    """Tell whether an output's next logits are to be edited; ``ahead`` of its tokens are not known yet."""
    return params.edits_logits or output.num_output + ahead < params.min_tokens


def edited(
    logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, Output]], eos_ids: frozenset[int], ahead: int = 0
) -> torch.Tensor:
    """Return the edited float64 copy of finite ``[R, V]`` logits, a line for each row.

    A line of which nothing is left holds -inf alone. ``ahead`` tokens of each output are not known yet: then no row
    may have penalties.
    """
    copy = logits.double()
    penalise(copy, rows)
    _add_biases(copy, rows)
    copy = _keep_allowed(copy, rows)
    _ban(copy, rows, eos_ids, ahead)
    return copy


def leaves_choice(logits: torch.Tensor) -> torch.Tensor:
    """Tell for each line of edited logits whether any token can be chosen, bool ``[R]``."""
    return logits.amax(dim=1) > float("-inf")


def _add_biases(logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, Output]]) -> None:
    biased = [(line, params.logit_bias) for line, (params, _) in enumerate(rows) if params.logit_bias]
    if biased:
        places = flat_places(logits, [(line, np.array([i for i, _ in bias])) for line, bias in biased])
        values = np.array([value for _, bias in biased for _, value in bias], dtype=np.float64)
        logits.view(-1)[places] += upload(values, logits.device)


def _keep_allowed(logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, Output]]) -> torch.Tensor:
    limited = [(line, params.allowed_ids.ids) for line, (params, _) in enumerate(rows) if params.allowed_ids]
    if not limited:
        return logits
    places = flat_places(logits, limited)
    kept = logits.clone()
    kept.index_fill_(0, upload(np.array([line for line, _ in limited]), logits.device), float("-inf"))
    kept.view(-1)[places] = logits.view(-1)[places]
    return kept


def _ban(
    logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, Output]], eos_ids: frozenset[int], ahead: int
) -> None:
    banned = []
    for line, (params, output) in enumerate(rows):
        if params.banned_ids:
            banned.append((line, params.banned_ids.ids))
        if output.num_output + ahead < params.min_tokens and (ends := params.ending_ids(eos_ids)):
            banned.append((line, np.array(sorted(ends), dtype=np.uint32)))
    if banned:
        logits.view(-1).index_fill_(0, flat_places(logits, banned), float("-inf"))
