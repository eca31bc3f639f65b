"""The next tokens of a step's outputs, chosen on the device while the host goes on.

The host learns of them, of the lines that are not finite and of log-probabilities by one copy at the end of the step.
Until then the tokens stand on the device, where the next step can take them from.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from prefixgate.worker.device_sampling import finite_lines, sample_in_place
from prefixgate.worker.logit_edits import edited, leaves_choice, needs_edits
from prefixgate.worker.logprobs import assemble, measure_in_place
from prefixgate.worker.request import SamplingParams
from prefixgate.worker.sampler import Choice, draw_of
from prefixgate.worker.sequence import Sequence as Output
from prefixgate.worker.transfers import Readback, upload


class Outcome(NamedTuple):
    """What a step gave, on the host."""

    finite: list[bool]
    """Of each line of logits, whether it is finite."""
    choices: list[Choice | None]
    """The next token of each row; None where nothing was left to choose. Of lines that are not finite it is made up."""


class Awaited:
    """An outcome on its way to the host."""

    def __init__(self, token_ids: torch.Tensor, readback: Readback, counts: Sequence[int | None]) -> None:
        self.token_ids = token_ids
        """int64 ``[R]`` on the device: the next token of each row, one of the vocabulary in any case."""
        self._readback = readback
        self._counts = counts

    def wait(self) -> Outcome:
        """Return the outcome once the step is done."""
        finite, ids, possible, *parts = self._readback.wait()
        token_ids: list[int] = ids.tolist()
        choices: list[Choice | None] = [
            Choice(token_id, None) if is_possible else None
            for token_id, is_possible in zip(token_ids, possible.tolist(), strict=True)
        ]
        wanted = [row for row, count in enumerate(self._counts) if count is not None]
        if wanted:
            counts = [self._counts[row] or 0 for row in wanted]
            found = assemble([token_ids[row] for row in wanted], counts, *(part.tolist() for part in parts))
            for row, logprob in zip(wanted, found, strict=True):
                if choices[row] is not None:
                    choices[row] = Choice(logprob.token_id, logprob)
        return Outcome(finite.tolist(), choices)


class DeviceSampler:
    """Chooses tokens where the logits are. Keeps nothing from step to step, like the host's ``Sampler``."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids

    def choose(
        self,
        logits: torch.Tensor,
        lines: Sequence[int],
        rows: Sequence[tuple[SamplingParams, Output]],
        ahead: int = 0,
    ) -> Awaited:
        """Choose for each row from its line of float32 ``[L, V]`` logits, whatever these hold.

        ``ahead`` tokens of each output are not known to the host yet; none of these rows may have penalties.
        """
        device = logits.device
        finite = finite_lines(logits)
        if list(lines) != list(range(len(logits))):
            logits = logits.index_select(0, upload(np.array(lines, dtype=np.int64), device))
        token_ids, possible = self._sample(logits, rows, ahead)
        parts = [finite, token_ids, possible]
        counts = [params.logprobs for params, _ in rows]
        wanted = [row for row, count in enumerate(counts) if count is not None]
        if wanted:
            index = upload(np.array(wanted), device)
            parts += measure_in_place(
                logits.index_select(0, index), token_ids.index_select(0, index), max(counts[row] or 0 for row in wanted)
            )
        return Awaited(token_ids, Readback(parts), counts)

    def _sample(
        self, logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, Output]], ahead: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows' tokens, int64 ``[R]``, and which of them had one to choose, bool ``[R]``."""
        draws = [draw_of(params, output, ahead) for params, output in rows]
        changed = [row for row, (params, output) in enumerate(rows) if needs_edits(params, output, ahead)]
        possible = torch.ones(len(rows), dtype=torch.bool, device=logits.device)
        if not changed:
            return sample_in_place(logits, draws), possible
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        plain = sorted(set(range(len(rows))).difference(changed))
        if plain:
            index = upload(np.array(plain), logits.device)
            token_ids.index_copy_(
                0, index, sample_in_place(logits.index_select(0, index), [draws[row] for row in plain])
            )
        index = upload(np.array(changed), logits.device)
        edits = edited(logits.index_select(0, index), [rows[row] for row in changed], self._eos_ids, ahead)
        possible.index_copy_(0, index, leaves_choice(edits))
        token_ids.index_copy_(0, index, sample_in_place(edits, [draws[row] for row in changed]))
        return token_ids, possible
