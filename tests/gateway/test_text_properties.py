"""Text of any script, in and out: the library's ids, one BOS, whole characters, and ids that agree with the text."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prefixgate.gateway.chat_template import ChatTemplate
from prefixgate.gateway.detokenizer import TokenPieces
from prefixgate.gateway.output_text import OutputText, whole
from prefixgate.gateway.stop import StopStrings
from prefixgate.gateway.tokenizer import ModelTokenizer
from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2
from tests.counts import scaled
from tests.gateway import sample_tokenizers
from tests.gateway.sample_tokenizers import CHATML, SPECIALS, id_of

JSON = {"byte_level": sample_tokenizers.byte_level(bos=True), "byte_fallback": sample_tokenizers.byte_fallback()}
LIBRARY = {family: Tokenizer.from_str(json.decode()) for family, json in JSON.items()}
MODELS = {family: ModelTokenizer(json) for family, json in JSON.items()}
PIECES = {family: TokenPieces(model) for family, model in MODELS.items()}
LENGTH, STOP = generation_pb2.FINISH_REASON_LENGTH, generation_pb2.FINISH_REASON_STOP

TEMPLATES = {
    "turns": CHATML,
    "instructions": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[I] ' + m['content'] | trim + ' [/I]' }}{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}",
    "headers": "{{- bos_token }}\n{%- set ns = namespace(system='') %}\n{%- for m in messages if m.role == 'system' %}"
    "{% set ns.system = ns.system ~ m.content %}{% endfor %}\n"
    "{%- macro turn(role, content) %}"
    "{{ '<|im_start|>' ~ role ~ '\\n\\n' ~ content | trim ~ '<|im_end|>' }}{% endmacro %}\n"
    "{%- if ns.system %}{{ turn('system', ns.system) }}{% endif %}\n"
    "{%- for m in messages %}{% if m.role != 'system' %}{{ turn(m.role, m.content) }}{% endif %}{% endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}",
}
HARD = (
    *(
        "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3fd",
        "\U0001f44b\U0001f3fd",
        "\U0001f1e8\U0001f1ff",
        "e\u0301",
        "n\u0303\u0323",
    ),
    *(
        "\u05e9\u05dc\u05d5\u05dd",
        "\u0645\u0631\u062d\u0628\u0627",
        "\u202eabc\u202c",
        "\uc0bc\uaca9\uc0b4",
        "\u4f60\u597d",
    ),
    *(
        "\ufffd",
        "\0",
        "\ufeff",
        "\u00a0",
        "\u2028",
        "\ue000",
        "\U000f0000",
        "\U0010ffff",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
    ),
    *("the", " fox", "<|", "|>", "im_end", "\u2581", "<0x41>", "{{ x }}", "[I]"),
)
TEXT = st.lists(st.sampled_from(HARD) | st.characters(codec="utf-8"), max_size=12).map("".join)
PLAIN = TEXT.filter(lambda text: not any(special in text for special in SPECIALS))
ROLES = st.sampled_from(["system", "user", "assistant"])


def plain_chats(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, str]]]:
    return st.lists(st.fixed_dictionaries({"role": ROLES, "content": text}), min_size=1, max_size=4)


def chat_ids(family: str, template: str, chat: Sequence[dict[str, str]]) -> list[int]:
    model = MODELS[family]
    shielded = [{name: model.shield(text) for name, text in message.items()} for message in chat]
    source = ChatTemplate(TEMPLATES[template], {"bos_token": "<s>", "eos_token": "</s>"})
    return model.encode_rendered(source.render(shielded, max_characters=100_000))


@pytest.fixture(scope="module", params=JSON)
def reference(request: pytest.FixtureRequest) -> tuple[str, Any]:
    """The library that models are trained with, on one of the tokenizers."""
    transformers = pytest.importorskip("transformers")
    family: str = request.param
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(JSON[family].decode()), bos_token="<s>", eos_token="</s>"
    )
    return family, made


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=scaled(1000), deadline=None)
@given(chat=plain_chats(PLAIN))
def test_a_chat_has_the_ids_that_the_model_was_trained_on(
    reference: tuple[str, Any], template: str, chat: list[dict[str, str]]
) -> None:
    family, library = reference
    expected = library.apply_chat_template(
        chat, chat_template=TEMPLATES[template], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    # Pieces that are no special token each can come to one together.
    if not any(special in "".join(message["content"] for message in chat) for special in SPECIALS):
        assert chat_ids(family, template, chat) == expected


@pytest.mark.parametrize("family", JSON)
@pytest.mark.parametrize("template", ["instructions", "headers"])
@settings(max_examples=scaled(1000), deadline=None)
@given(chat=plain_chats(st.lists(st.sampled_from([*SPECIALS, *HARD]), max_size=5).map("".join)))
def test_a_chat_has_one_bos_and_no_special_token_but_the_templates(
    family: str, template: str, chat: list[dict[str, str]]
) -> None:
    model = MODELS[family]
    ids, empty = chat_ids(family, template, chat), [{**message, "content": "a"} for message in chat]
    bos = id_of(model.tokenizer, "<s>")
    assert ids[0] == bos
    assert ids.count(bos) == 1
    if template == "instructions":  # the other leaves out a system turn that says nothing
        wanted = [i for i in chat_ids(family, template, empty) if i in model.special_ids]
        assert [i for i in ids if i in model.special_ids] == wanted


@pytest.mark.parametrize("family", JSON)
@settings(max_examples=scaled(1000), deadline=None)
@given(text=TEXT, typed=st.sampled_from(["", *SPECIALS]))
def test_a_prompt_has_one_bos_and_the_text_that_was_typed(family: str, text: str, typed: str) -> None:
    model = MODELS[family]
    ids, bos = model.encode_prompt(typed + text), id_of(model.tokenizer, "<s>")
    assert ids[0] == bos
    assert ids.count(bos) == 1
    if family == "byte_level":
        assert model.tokenizer.decode(ids) == typed + text


def stream(family: str, ids: Sequence[int], stops: Sequence[str], cuts: Sequence[int]) -> list[gateway_pb2.OutputDelta]:
    """Send ids in messages cut anywhere, each with its log-probability, to the end of the output."""
    output, deltas = OutputText(0, PIECES[family], StopStrings(stops)), []
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    for number, (start, end) in enumerate(pairwise(bounds)):
        is_last = number == len(bounds) - 2
        news = worker_pb2.OutputTokens(index=0, token_ids=ids[start:end], finish_reason=LENGTH if is_last else None)
        news.logprobs.extend(
            generation_pb2.TokenLogprob(token_id=ids[at], logprob=-at, rank=1) for at in range(start, end)
        )
        delta = output.push(news)
        if delta is not None:
            deltas.append(delta)
    return deltas


CUTS = st.lists(st.integers(0, 1000), max_size=8)


@pytest.mark.parametrize("family", JSON)
@settings(max_examples=scaled(2000), deadline=None)
@given(text=TEXT, cuts=CUTS)
def test_no_delta_breaks_a_character_and_none_is_lost(family: str, text: str, cuts: list[int]) -> None:
    ids = LIBRARY[family].encode(text, add_special_tokens=False).ids
    deltas = stream(family, ids, [], cuts)
    expected = LIBRARY[family].decode(ids)
    assert "".join(delta.text for delta in deltas) == expected
    if family == "byte_level" and not any(special in text for special in SPECIALS):
        assert expected == text
    # A replacement character is there only where it was typed.
    assert sum(delta.text.count("\ufffd") for delta in deltas) == expected.count("\ufffd") <= text.count("\ufffd")


@pytest.mark.parametrize("family", JSON)
@settings(max_examples=scaled(2000), deadline=None)
@given(text=PLAIN, cuts=CUTS, data=st.data())
def test_text_ids_and_log_probabilities_agree_up_to_the_stop_string(
    family: str, text: str, cuts: list[int], data: st.DataObject
) -> None:
    library = LIBRARY[family]
    ids = library.encode(text, add_special_tokens=False).ids
    said = library.decode(ids)
    # Any part of what will be said, so that most are found, at any place in a character's or a token's run.
    spans = st.tuples(st.integers(0, max(0, len(said) - 1)), st.integers(1, 6)).map(lambda s: said[s[0] : s[0] + s[1]])
    stops = data.draw(st.lists(spans.filter(bool), max_size=3) if said else st.just([]))
    deltas = stream(family, ids, stops, cuts)
    for delta in deltas:
        assert [found.token_id for found in delta.logprobs] == list(delta.token_ids)
    output = whole(1, deltas)[0]
    assert list(output.token_ids) == ids[: len(output.token_ids)]
    assert [found.logprob for found in output.logprobs] == [-at for at in range(len(output.token_ids))]
    ends = {said.find(stop) + len(stop) for stop in stops}
    if not ends:
        assert (output.text, output.finish_reason, len(output.token_ids)) == (said, LENGTH, len(ids))
        return
    # The first stop string that is complete ends the output: its text and what follows are not sent, and the last id
    # is the one that completed it.
    end = min(ends)
    assert output.finish_reason == STOP
    assert output.text + output.matched_stop == said[:end]
    assert output.matched_stop == max((stop for stop in stops if said[:end].endswith(stop)), key=len)
    assert len(output.token_ids) == 0 or len(library.decode(output.token_ids[:-1]).rstrip("\ufffd")) < end
