"""The reference backend, where a segment has more scores than are held at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.worker.attention import Scoring
from prefixgate.worker.model_runner import Row
from prefixgate.worker.sdpa_attention import SdpaBackend
from tests.worker.attention_cases import SCOPE, Case, attend_by_hand, cases


@given(case=cases(), most_scores=st.sampled_from([1, 16, 40, 300]), share=st.booleans())
@settings(deadline=None, max_examples=25)
def test_slots_that_are_taken_in_turn_come_out_as_all_at_once(case: Case, most_scores: int, share: bool) -> None:
    backend = SdpaBackend(most_scores)
    backend.begin(case.step(share=share))
    outputs, sums = backend.attend_with_lse(case.query, case.layer, case.scoring)
    expected, expected_sums = attend_by_hand(case)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(sums, expected_sums)


@pytest.mark.parametrize("most_scores", [1, 64, 1 << 20])
def test_no_more_scores_are_held_than_allowed_but_for_one_block(
    most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.randn(16, 2, 4, 2, 8)
    case = Case([Row([0] * 5, 50, list(range(14)), SCOPE, True)], layer, torch.randn(5, 4, 8), 4, Scoring(0.3))
    held: list[int] = []
    original = torch.Tensor.logsumexp

    def watched(scores: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        held.append(scores.numel() // case.query.shape[1])
        return original(scores, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "logsumexp", watched)
    backend = SdpaBackend(most_scores)
    backend.begin(case.step(share=False))
    backend.attend_with_lse(case.query, case.layer, case.scoring)
    tokens = len(case.query)
    assert max(held) <= max(most_scores, tokens * case.block_size)
    assert sum(held) == tokens * (case.rows[0].start + tokens)
