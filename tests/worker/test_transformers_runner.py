"""The runner's logits are the model's own, however prompts are cut, mixed and placed."""

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.cache.copy_plan import Copy
from prefixgate.worker.model_runner import Row
from prefixgate.worker.probe import stock_logits
from tests.worker.tiny_models import SCOPE, VOCABULARY, llama_config, make_model, make_runner, row

PROMPT = [(7 * i + 3) % VOCABULARY for i in range(45)]


def assert_same(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def llama() -> Any:
    return make_model(llama_config())


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Logits of every prompt position by the model's own attention, from a copy that no runner has touched."""
    return stock_logits(make_model(llama_config()), PROMPT)


@given(cuts=st.sets(st.integers(1, len(PROMPT) - 1)), block_ids=st.permutations(range(16)))
@settings(max_examples=25)
def test_a_prompt_in_chunks_over_scattered_blocks(
    llama: Any, expected: torch.Tensor, cuts: set[int], block_ids: list[int]
) -> None:
    runner = make_runner(llama)
    start = 0
    for stop in [*sorted(cuts), len(PROMPT)]:
        logits = runner.forward([row(PROMPT[start:stop], start, block_ids)])
        assert_same(logits[0], expected[stop - 1])
        start = stop


def test_prefill_and_decode_share_a_step(llama: Any, expected: torch.Tensor) -> None:
    runner = make_runner(llama)
    runner.forward([row(PROMPT[:20], 0, [0, 1], needs_logits=False)])
    logits = runner.forward(
        [
            row(PROMPT[:9], 0, [5], needs_logits=False),
            row(PROMPT[20:21], 20, [0, 1]),
            row(PROMPT[:33], 0, [9, 8, 7]),
        ]
    )
    assert logits.shape == (2, VOCABULARY)
    assert logits.dtype == torch.float32
    assert_same(logits, expected[[20, 32]])
    assert_same(runner.forward([row(PROMPT[9:12], 9, [5])])[0], expected[11])


def test_all_logits_of_a_row_are_those_of_its_tokens(llama: Any, expected: torch.Tensor) -> None:
    runner = make_runner(llama)
    rows = [
        row(PROMPT[:9], 0, [5]),
        Row(PROMPT[:33], 0, [9, 8, 7], SCOPE, needs_logits=True, needs_all_logits=True),
        row(PROMPT[:20], 0, [0, 1], needs_logits=False),
    ]
    assert_same(runner.forward(rows), expected[[8, *range(33)]])


def test_no_logits_are_computed_where_none_are_wanted(llama: Any) -> None:
    assert make_runner(llama).forward([row(PROMPT, 0, [1, 2, 3], needs_logits=False)]).shape == (0, VOCABULARY)


def test_a_copied_block_continues_like_the_original(llama: Any, expected: torch.Tensor) -> None:
    runner = make_runner(llama)
    runner.forward([row(PROMPT[:30], 0, [0, 1], needs_logits=False)])
    runner.storage.copy_blocks([Copy(1, 4, 14)])
    assert_same(runner.forward([row(PROMPT[30:], 30, [0, 4, 2])])[0], expected[-1])


def test_slots_beyond_the_length_are_never_read(llama: Any, expected: torch.Tensor) -> None:
    runner = make_runner(llama)
    runner.forward([row(PROMPT[:40], 0, [0, 1, 2], needs_logits=False)])
    assert runner.storage.data[2, :, :, 8:].isnan().all(), "what was not computed was not written"
    assert_same(runner.forward([row(PROMPT[19:20], 19, [0, 1, 2])])[0], expected[19])


def test_two_runners_of_one_process_do_not_meet(llama: Any, expected: torch.Tensor) -> None:
    other_model = make_model(llama_config(num_hidden_layers=3), seed=1)
    other_expected = stock_logits(other_model, PROMPT)
    runner, other = make_runner(llama), make_runner(other_model)
    runner.forward([row(PROMPT[:20], 0, [0, 1], needs_logits=False)])
    other.forward([row(PROMPT[:20], 0, [0, 1], needs_logits=False)])
    assert_same(runner.forward([row(PROMPT[20:], 20, [0, 1, 2])])[0], expected[-1])
    assert_same(other.forward([row(PROMPT[20:], 20, [0, 1, 2])])[0], other_expected[-1])


def test_a_runner_that_is_gone_has_let_go_of_its_pool(llama: Any) -> None:
    # The library keeps every attention function that it was ever given.
    runner = make_runner(llama)
    runner.forward([row(PROMPT[:20], 0, [0, 1])])
    pool = weakref.ref(runner.storage.data)
    del runner
    gc.collect()
    assert pool() is None
    with pytest.raises(RuntimeError, match="a pool that is gone"):
        llama(input_ids=torch.tensor([[1, 2]]), use_cache=False)
