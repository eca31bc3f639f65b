"""The witness model: equal calls give equal outputs, and every number in every slot below the length counts."""

import json
import re
from collections.abc import Sequence

import jinja2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prefixgate.cache.hashing import BLOCK_SIZE, CacheScope
from prefixgate.cache.kv_storage import TorchKVStorage
from prefixgate.worker.model_runner import ModelRefusedError, Row
from prefixgate.worker.witness import WitnessModel, scope_tag, witness_layout
from prefixgate.worker.witness_options import WitnessOptions, parse_witness
from prefixgate.worker.witness_text import CHAT_TEMPLATE, EOS_ID, EOS_IDS, VOCABULARY_SIZE, witness_text

NUM_BLOCKS = 16
SCOPE = CacheScope("acme", "witness@fingerprint")
prompts = st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=60)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(witness_text().tokenizer.decode())


def witness(options: WitnessOptions | None = None) -> WitnessModel:
    storage = TorchKVStorage(NUM_BLOCKS, witness_layout())
    storage.poison(range(NUM_BLOCKS))
    return WitnessModel("witness", storage, options or WitnessOptions(context=NUM_BLOCKS * BLOCK_SIZE))


def prefill(
    model: WitnessModel, token_ids: Sequence[int], block_ids: Sequence[int] | None = None, scope: CacheScope = SCOPE
) -> torch.Tensor:
    return model.forward([Row(token_ids, 0, block_ids or range(NUM_BLOCKS), scope, True)])[0]


def greedy(model: WitnessModel, token_ids: list[int], count: int) -> list[int]:
    blocks = range(NUM_BLOCKS)
    sequence = [*token_ids, int(prefill(model, token_ids).argmax())]
    while len(sequence) < len(token_ids) + count:
        row = Row(sequence[-1:], len(sequence) - 1, blocks, SCOPE, True)
        sequence.append(int(model.forward([row])[0].argmax()))
    return sequence[len(token_ids) :]


def test_output_is_the_same_on_every_machine() -> None:
    output = greedy(witness(), list(b"The quick brown fox jumps over the lazy dog"), 24)
    assert bytes(output) == b"%E`SC24 ll'B];A[C}7ri8S{"


@given(prompts, st.data())
def test_chunks_of_any_size_give_the_logits_of_the_whole(token_ids: list[int], data: st.DataObject) -> None:
    whole = prefill(witness(), token_ids)
    model, start = witness(), 0
    logits = torch.empty(0)
    while start < len(token_ids):
        chunk = token_ids[start : start + data.draw(st.integers(1, 40))]
        logits = model.forward([Row(chunk, start, range(NUM_BLOCKS), SCOPE, True)])[0]
        start += len(chunk)
    assert torch.equal(logits, whole)


@given(prompts, st.permutations(range(NUM_BLOCKS)))
def test_where_the_blocks_lie_does_not_matter(token_ids: list[int], block_ids: list[int]) -> None:
    assert torch.equal(prefill(witness(), token_ids, block_ids), prefill(witness(), token_ids))


def test_rows_of_one_step_do_not_touch_each_other() -> None:
    decoding, fresh, chunked = list(range(20)), list(range(50, 57)), list(range(100, 140))
    model = witness()
    prefill(model, decoding[:-1], [3, 1])
    rows = [
        Row(chunked[:25], 0, [5, 0, 9], SCOPE, False),
        Row(decoding[-1:], 19, [3, 1], SCOPE, True),
        Row(fresh, 0, [7], CacheScope("other", "witness@fingerprint"), True),
    ]
    logits = model.forward(rows)
    rest = model.forward([Row(chunked[25:], 25, [5, 0, 9], SCOPE, True)])
    assert torch.equal(logits[0], prefill(witness(), decoding))
    assert torch.equal(logits[1], prefill(witness(), fresh, scope=rows[2].scope))
    assert torch.equal(rest[0], prefill(witness(), chunked))


def test_all_logits_of_a_row_are_those_of_its_prefixes() -> None:
    token_ids, model = list(range(40)), witness()
    model.forward([Row(token_ids[:9], 0, [4, 2, 6], SCOPE, False)])
    rows = [
        Row(token_ids[9:], 9, [4, 2, 6], SCOPE, True, needs_all_logits=True),
        Row([50, 51], 0, [0], SCOPE, True),
    ]
    logits = model.forward(rows)
    expected = [prefill(witness(), token_ids[:length]) for length in range(10, 41)]
    assert torch.equal(logits, torch.stack([*expected, prefill(witness(), [50, 51])]))


def test_logits_are_one_line_for_each_row_that_wants_them() -> None:
    logits = witness().forward([Row([1, 2, 3], 0, [0], SCOPE, False)])
    assert logits.shape == (0, VOCABULARY_SIZE)
    assert logits.dtype == torch.float32


@given(st.integers(1, 40), st.data())
@settings(max_examples=200)
def test_every_number_below_the_length_counts_and_none_beyond(length: int, data: st.DataObject) -> None:
    model, block_ids = witness(), [4, 2, 6]
    token_ids = list(range(100, 100 + length))
    logits = prefill(model, token_ids, block_ids)
    position = data.draw(st.integers(0, 3 * BLOCK_SIZE - 1))
    place = data.draw(st.tuples(*(st.integers(0, size - 1) for size in (2, 2, 2, 4))))
    layer, kv, head, field = place
    bit = data.draw(st.integers(0, 63))
    slot = model.storage.data[block_ids[position // BLOCK_SIZE], layer, kv, position % BLOCK_SIZE, head]
    slot[field] ^= (1 << bit) - (1 << 64 if bit == 63 else 0)
    again = model.forward([Row(token_ids[-1:], length - 1, block_ids, SCOPE, True)])[0]
    # The last token is computed anew here, so what stood in its own slot is overwritten.
    assert torch.equal(again, logits) == (position >= length - 1)


@given(st.integers(2, 40), st.tuples(*(st.integers(0, 1),) * 3))
def test_the_digest_continues_the_slot_before_in_all_its_places(length: int, place: tuple[int, int, int]) -> None:
    token_ids = list(range(length))
    model = witness()
    prefill(model, token_ids)
    last, before = divmod(length - 1, BLOCK_SIZE), divmod(length - 2, BLOCK_SIZE)
    right = model.storage.data[last[0], :, :, last[1]].clone()
    layer, kv, head = place
    model.storage.data[before[0], layer, kv, before[1], head, 3] += 1
    model.forward([Row(token_ids[-1:], length - 1, range(NUM_BLOCKS), SCOPE, False)])
    wrong = model.storage.data[last[0], :, :, last[1]]
    assert (wrong != right).sum() == 8, "the digest in each of the eight places, and nothing else"


def test_no_two_places_of_a_slot_look_alike() -> None:
    model = witness()
    prefill(model, [65])
    assert len(set(model.storage.data[0, :, :, 0].flatten().tolist())) == 2 * 2 * 2 * 4


@pytest.mark.parametrize(
    "other", [CacheScope("other", "w@1"), CacheScope("a", "w@1", "x"), CacheScope("a", "w@1", "", "x")]
)
def test_tenant_adapter_and_salt_each_change_the_output(other: CacheScope) -> None:
    scope = CacheScope("a", "w@1")
    assert not torch.equal(prefill(witness(), [1, 2, 3], scope=scope), prefill(witness(), [1, 2, 3], scope=other))


def test_tags_know_the_name_of_the_model_and_not_its_fingerprint() -> None:
    assert scope_tag(CacheScope("a", "w@1"), "w") == scope_tag(CacheScope("a", "w@2"), "w")
    assert scope_tag(CacheScope("a", "w@1"), "w") != scope_tag(CacheScope("a", "w@1"), "v")
    assert scope_tag(CacheScope("acme", "witness@1"), "witness") == 682455757474446002


def test_greedy_output_is_printable_and_does_not_end() -> None:
    output = greedy(witness(), [0], 150)
    assert all(0x20 <= token < 0x7F for token in output)
    assert len(set(output)) > 50


@pytest.mark.parametrize("every", [1, 8])
def test_eos_every_ends_outputs_that_often(every: int) -> None:
    model = witness(WitnessOptions(eos_every=every, context=NUM_BLOCKS * BLOCK_SIZE))
    ended = sum(int(prefill(model, [first, second]).argmax()) == EOS_ID for first in range(20) for second in range(20))
    assert 400 / every * 0.6 < ended <= 400 / every * 1.4


def test_options_are_read() -> None:
    assert parse_witness("witness") == WitnessOptions()
    assert parse_witness("witness:eos_every=8,step_ms=5") == WitnessOptions(eos_every=8, step_ms=5.0)
    assert parse_witness("witness: prefill_us_per_token=1.5, context=64") == WitnessOptions(
        prefill_us_per_token=1.5, context=64
    )


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("witness:speed=1", "no option 'speed'; there are eos_every"),
        ("witness:eos_every=2,eos_every=3", "'eos_every' is given twice"),
        ("witness:eos_every=1.5", "eos_every = '1.5' must be a whole number from 0"),
        ("witness:step_ms=nan", "step_ms = 'nan' must be a number from 0 to 60000"),
        ("witness:step_ms=-1", "step_ms = '-1'"),
        ("witness:context=1", "context = '1' must be a whole number from 2"),
        ("witness:context", "context = ''"),
    ],
)
def test_wrong_options_are_refused_by_name(model: str, named: str) -> None:
    with pytest.raises(ModelRefusedError, match=re.escape(named)):
        parse_witness(model)


@given(st.text())
def test_any_text_goes_to_bytes_and_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    if not any(special in text for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
        assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_tokenizer_covers_the_vocabulary_and_nothing_more(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE
    assert [tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>")] == list(EOS_IDS)
    assert json.loads(witness_text().tokenizer)["added_tokens"][1]["special"] is True


def test_the_template_is_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = jinja2.Template(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
