"""The next tokens of a batch of outputs, and how likely the model found them.

What a call does not ask for costs it nothing: rows are grouped by what they need, and every group is computed at once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from prefixgate.worker.logit_edits import edited, leaves_choice, needs_edits
from prefixgate.worker.logprobs import TokenLogprob, logprobs_of
from prefixgate.worker.request import SamplingParams
from prefixgate.worker.sampling import GREEDY_BELOW, Draw, sample, uniform
from prefixgate.worker.sequence import Sequence as Output

_GREEDY = Draw()

NO_CHOICE = "allowed and banned ids leave a row no token to choose"


class Choice(NamedTuple):
    """The next token of an output."""

    token_id: int
    logprob: TokenLogprob | None
    """Where the call asked for it."""


class Sampler:
    """Chooses tokens. Keeps nothing from step to step: a choice follows from an output, its call and its logits."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids

    def choose(self, logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, Output]]) -> list[Choice]:
        """Choose for each line of finite float32 ``[R, V]`` logits, which stay as they are.

        Raises ValueError where a row's allowed and banned ids leave it nothing.
        """
        token_ids = self._sample(logits, rows)
        choices = [Choice(token_id, None) for token_id in token_ids]
        wanted = [line for line, (params, _) in enumerate(rows) if params.logprobs is not None]
        if wanted:
            counts = [rows[line][0].logprobs or 0 for line in wanted]
            for found, line in zip(
                logprobs_of(logits[wanted], [token_ids[line] for line in wanted], counts), wanted, strict=True
            ):
                choices[line] = Choice(found.token_id, found)
        return choices

    def _sample(self, logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, Output]]) -> list[int]:
        draws = [draw_of(params, output) for params, output in rows]
        changed = [line for line, (params, output) in enumerate(rows) if needs_edits(params, output)]
        if not changed:
            return sample(logits, draws)
        chosen = [0] * len(rows)
        plain = sorted(set(range(len(rows))).difference(changed))
        edits = edited(logits[changed], [rows[line] for line in changed], self._eos_ids)
        if not leaves_choice(edits).all():
            raise ValueError(NO_CHOICE)
        for lines, values in ((plain, logits[plain]), (changed, edits)):
            for line, token_id in zip(lines, sample(values, [draws[line] for line in lines]), strict=True):
                chosen[line] = token_id
        return chosen


def draw_of(params: SamplingParams, output: Output, ahead: int = 0) -> Draw:
    """Tell how an output's next token is chosen; ``ahead`` of those before it are not known yet."""
    if params.temperature < GREEDY_BELOW:
        return _GREEDY
    return Draw(
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        uniform(params.seed, output.index, output.num_output + ahead),
    )
