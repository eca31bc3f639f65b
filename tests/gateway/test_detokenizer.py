"""Incremental text: append-only, whole characters, and the same as decoding everything at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prefixgate.gateway.detokenizer import Detokenizer, TokenPieces
from prefixgate.gateway.tokenizer import ModelTokenizer, TokenizerRefusedError
from tests.counts import scaled
from tests.gateway import sample_tokenizers
from tests.gateway.sample_tokenizers import FAMILIES, id_of

LIBRARY = {name: Tokenizer.from_str(build().decode()) for name, build in FAMILIES.items()}
PIECES = {name: TokenPieces(ModelTokenizer(build())) for name, build in FAMILIES.items()}
HARD_TEXTS = [
    "ďábelské",
    "👋🏽",
    "삼겹살",
    "the  quick\n brown",
    " the",
    "  a",
    "你好你好",
    "👋🏽👋🏽 fox",
    "e\u0301 \u200d",
]


def stream(family: str, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(PIECES[family])
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_pieces_of_characters_wait_for_their_rest(family: str, text: str) -> None:
    ids = LIBRARY[family].encode(text, add_special_tokens=False).ids
    deltas = stream(family, ids)
    assert "".join(deltas) == LIBRARY[family].decode(ids)
    assert "\ufffd" not in "".join(deltas)


@settings(max_examples=scaled(4000), deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("family", ["byte_level", "metaspace"])
def test_random_ids_come_to_what_the_library_decodes(family: str, data: st.DataObject) -> None:
    """Stray bytes, special and added tokens, and ids beyond the tokenizer included."""
    size = LIBRARY[family].get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 2), max_size=40))
    assert "".join(stream(family, ids)) == LIBRARY[family].decode(ids)


@settings(max_examples=scaled(4000), deadline=None)
@given(data=st.data())
def test_random_ids_with_byte_tokens_come_to_their_bytes(data: st.DataObject) -> None:
    """The library turns a whole run of byte tokens into U+FFFD for one stray byte in it; what it does where all
    runs are good UTF-8 must be met exactly."""
    library, size = LIBRARY["byte_fallback"], LIBRARY["byte_fallback"].get_vocab_size()
    words = st.integers(0, size + 2).filter(lambda token_id: not 3 <= token_id < 259).map(lambda i: [i])
    characters = st.characters(codec="utf-8").map(lambda c: [3 + byte for byte in c.encode()])
    ids = [i for part in data.draw(st.lists(words | characters, max_size=20)) for i in part]
    assert "".join(stream("byte_fallback", ids)) == library.decode(ids)


@settings(max_examples=scaled(2000), deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("family", FAMILIES)
def test_no_ids_raise_and_no_character_is_broken_before_the_end(family: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 400), max_size=30))
    detokenizer = Detokenizer(PIECES[family])
    text = "".join(detokenizer.push(token_id) for token_id in ids)
    text.encode()  # no lone surrogates
    assert len(detokenizer.flush()) <= 1


def test_characters_are_sent_as_soon_as_they_are_whole() -> None:
    ids = [3 + byte for byte in "👋é".encode()]
    assert stream("byte_fallback", ids) == ["", "", "", "👋", "", "é", ""]


def test_an_unfinished_character_at_the_end_is_marked_once() -> None:
    ids = [3 + byte for byte in "a👋".encode()[:-1]]
    assert "".join(stream("byte_fallback", ids)) == "a\ufffd"


def test_a_stray_byte_does_not_hurt_its_neighbours() -> None:
    ids = [3 + byte for byte in "é".encode() + b"\xff" + "你".encode()]
    assert "".join(stream("byte_fallback", ids)) == "é\ufffd你"


def test_the_first_space_is_treated_as_the_decoder_does_and_others_are_kept() -> None:
    library = LIBRARY["byte_fallback"]
    the, space, eos = (id_of(library, token) for token in ("▁the", "▁", "</s>"))
    assert stream("byte_fallback", [the, the]) == ["the", " the", ""]
    assert stream("byte_fallback", [eos, the]) == ["", "the", ""]
    assert stream("byte_fallback", [space, the]) == ["", " the", ""]
    assert stream("byte_fallback", [3 + 0x20, the]) == ["", " the", ""]


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
    ],
)
def test_decoders_without_a_text_for_each_token_are_refused_by_name(decoder: dict[str, object]) -> None:
    tokenizer = ModelTokenizer(sample_tokenizers.with_decoder(sample_tokenizers.byte_level(), decoder))
    with pytest.raises(TokenizerRefusedError, match=str(decoder["type"])):
        TokenPieces(tokenizer)
