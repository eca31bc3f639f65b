"""Penalties for tokens that a sequence holds already, so that it repeats itself less.

They are worked out anew from a sequence's tokens in every step and kept nowhere: a sequence that is computed again
after a preemption, or that was forked, is penalised as if nothing had happened.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from prefixgate.worker.request import SamplingParams
from prefixgate.worker.sequence import Sequence as Output
from prefixgate.worker.transfers import upload


def penalise(logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, Output]]) -> None:
    """Penalise each line of float64 ``[R, V]`` logits, in place, by its row's parameters and tokens.

    First repetition: logits of tokens in prompt or output are divided by it where positive, else multiplied. Then
    presence, once for each token that the output holds, and frequency, for each time that it does.
    """
    _penalise_repetition(logits, rows)
    _penalise_output(logits, rows)


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, Output]]) -> None:
    repeating = [
        (line, params.repetition_penalty, np.array(output.token_ids))
        for line, (params, output) in enumerate(rows)
        if params.repetition_penalty != 1.0
    ]
    if not repeating:
        return
    places = flat_places(logits, [(line, ids) for line, _, ids in repeating])
    lengths = [len(ids) for _, _, ids in repeating]
    penalty = upload(np.repeat([penalty for _, penalty, _ in repeating], lengths), logits.device)
    seen = logits.view(-1)[places]
    # A token that stands several times in a sequence gets the same new logit as often.
    logits.view(-1)[places] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _penalise_output(logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, Output]]) -> None:
    lines, penalties = [], []
    for line, (params, output) in enumerate(rows):
        if (params.presence_penalty or params.frequency_penalty) and output.num_output:
            ids, times = np.unique(output.token_ids[-output.num_output :], return_counts=True)
            lines.append((line, ids))
            penalties.append(params.presence_penalty + params.frequency_penalty * times)
    if lines:
        places = flat_places(logits, lines)
        logits.view(-1)[places] -= upload(np.concatenate(penalties), logits.device)


def flat_places(logits: torch.Tensor, lines: Sequence[tuple[int, npt.NDArray[np.integer]]]) -> torch.Tensor:
    """Return the indexes, into ``[R, V]`` logits laid out flat, of some ids in some lines."""
    vocabulary = logits.shape[1]
    places = [line * vocabulary + ids.astype(np.int64) for line, ids in lines]
    return upload(np.concatenate(places), logits.device)
