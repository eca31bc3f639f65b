"""Encoding: the ids that the model was trained on, and no control token from a client's text."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prefixgate.gateway.chat_template import ChatTemplate
from prefixgate.gateway.tokenizer import ControlTextError, ModelTokenizer, TokenizerRefusedError
from tests.gateway import sample_tokenizers
from tests.gateway.sample_tokenizers import CHATML, FAMILIES, SPECIALS, id_of

MODELS = {name: ModelTokenizer(build()) for name, build in FAMILIES.items()}
TEXTS = st.text(st.sampled_from(list("the fox<|im_end>/s_ \n你é👋\0")), max_size=30)


def library(tokenizer_json: bytes) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json.decode())


def chat_ids(model: ModelTokenizer, *messages: tuple[str, str]) -> list[int]:
    shielded = [{"role": model.shield(role), "content": model.shield(content)} for role, content in messages]
    return model.encode_rendered(ChatTemplate(CHATML, {}).render(shielded, max_characters=10_000))


def special_count(model: ModelTokenizer, ids: list[int]) -> int:
    return sum(token_id in model.special_ids for token_id in ids)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(content=TEXTS.filter(lambda text: not any(special in text for special in SPECIALS)))
def test_a_chat_without_special_texts_has_the_librarys_ids(family: str, content: str) -> None:
    model, reference = MODELS[family], library(FAMILIES[family]())
    rendered = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert chat_ids(model, ("user", content)) == reference.encode(rendered, add_special_tokens=False).ids


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(content=TEXTS.filter(lambda text: not any(special in text for special in SPECIALS)))
def test_a_prompt_without_special_texts_has_the_librarys_ids(family: str, content: str) -> None:
    assert MODELS[family].encode_prompt(content) == library(FAMILIES[family]()).encode(content).ids


@settings(max_examples=80, deadline=None)
@given(parts=st.lists(st.sampled_from([*SPECIALS, "a", " ", "<|", "|>", "im_end", "<s", "<tool call>"]), max_size=8))
@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_special_tokens_typed_by_a_client_stay_text(family: str, parts: list[str]) -> None:
    model, content = MODELS[family], "".join(parts)
    ids = chat_ids(model, ("user", content), ("user", content))
    assert special_count(model, ids) == special_count(model, chat_ids(model, ("user", "a"), ("user", "a"))) == 5
    prompt_ids = model.encode_prompt(content)
    assert special_count(model, prompt_ids) == special_count(model, model.encode_prompt("a"))
    assert content in model.tokenizer.decode(ids) or not content.strip()
    assert model.tokenizer.decode(prompt_ids) == content


def test_special_tokens_in_a_role_stay_text() -> None:
    model = MODELS["byte_level"]
    assert special_count(model, chat_ids(model, ("<|im_end|>", "a"))) == 3


def test_a_text_that_can_only_be_a_control_token_is_refused() -> None:
    """A Unigram model finds "<s>" among its own words, whatever the added tokens are called."""
    model = MODELS["metaspace"]
    with pytest.raises(ControlTextError):
        model.encode_prompt("the<s>fox")
    with pytest.raises(ControlTextError):
        chat_ids(model, ("user", "the<s>fox"))
    assert chat_ids(model, ("user", "the fox"))


def test_unknown_characters_are_no_control_tokens() -> None:
    assert 0 in MODELS["metaspace"].encode_prompt("the 🦊")


def test_a_raw_prompt_gets_what_the_tokenizer_adds_and_a_chat_does_not() -> None:
    model = ModelTokenizer(sample_tokenizers.byte_level(bos=True))
    bos = id_of(model.tokenizer, "<s>")
    assert model.encode_prompt("hi").count(bos) == 1
    assert model.encode_prompt("").count(bos) == 1
    assert chat_ids(model, ("user", "hi")).count(bos) == 0
    template = ChatTemplate("{{ bos_token }}" + CHATML, {"bos_token": "<s>"})
    rendered = template.render([{"role": "user", "content": model.shield("<s>hi")}], max_characters=1000)
    assert model.encode_rendered(rendered).count(bos) == 1


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_a_chat_has_the_ids_of_the_transformers_library(family: str) -> None:
    """So that callers who send ids of their own making share blocks with callers who send messages."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=library(FAMILIES[family]()), chat_template=CHATML)
    messages = [("system", "the  lazy dog"), ("user", " 👋🏽 hi\n"), ("assistant", ""), ("user", "a\0b the")]
    conversation = [{"role": role, "content": content} for role, content in messages]
    expected = reference.apply_chat_template(conversation, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert chat_ids(MODELS[family], *messages) == expected


def test_what_a_training_run_left_in_the_file_is_switched_off() -> None:
    limited = ModelTokenizer(sample_tokenizers.with_limits(sample_tokenizers.byte_level()))
    text = "the quick brown fox"
    assert limited.encode_prompt(text) == MODELS["byte_level"].encode_prompt(text)


def test_nul_bytes_and_what_follows_them_are_encoded() -> None:
    model = MODELS["byte_level"]
    assert model.tokenizer.decode(model.encode_prompt("A\0B")) == "A\0B"


def test_many_threads_get_the_same_ids() -> None:
    model = MODELS["byte_fallback"]
    texts = [f"the fox {SPECIALS[i % 4]} number {i}" for i in range(64)]
    expected = [model.encode_prompt(text) for text in texts]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(model.encode_prompt, texts * 4)) == expected * 4


def test_the_ids_of_a_whole_vocabulary_of_added_tokens_are_kept() -> None:
    """Special tokens that are words of the model too shift the ids of those that are not, unless they are put back."""
    document = json.loads(sample_tokenizers.byte_fallback())
    next_id = max(entry["id"] for entry in document["added_tokens"])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    document["added_tokens"] += [{"id": next_id + 1, "content": "<extra>", "special": False, **plain}]
    model = ModelTokenizer(json.dumps(document).encode())
    text = "<s><extra><|im_start|>a</s>"
    expected = Tokenizer.from_str(json.dumps(document)).encode(text, add_special_tokens=False).ids
    assert model.encode_rendered(text) == expected


@pytest.mark.parametrize("tokenizer_json", [b"", b"{}", b"[1]", b"\xff", b'{"added_tokens": [], "model": {}}'])
def test_what_is_no_tokenizer_is_refused(tokenizer_json: bytes) -> None:
    with pytest.raises(TokenizerRefusedError, match="tokenizer"):
        ModelTokenizer(tokenizer_json)


def test_reserved_tokens_by_the_thousand_do_not_slow_a_hostile_text() -> None:
    """Four million characters that each begin a special token are scanned in one pass, or this does not end."""
    document = json.loads(sample_tokenizers.byte_level())
    base = max(entry["id"] for entry in document["added_tokens"]) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document["added_tokens"] += [{"id": base + i, "content": f"<|reserved_{i}|>", **plain} for i in range(2000)]
    model = ModelTokenizer(json.dumps(document).encode())
    text = "<" * 4_000_000
    assert model.shield(text) == text
    assert model.unshield(model.shield("<|reserved_1999|>" * 1000)) == "<|reserved_1999|>" * 1000
