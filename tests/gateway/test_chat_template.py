"""Chat templates: what Hugging Face's do, in a sandbox and within limits."""

import pytest

from prefixgate.gateway.chat_template import ChatTemplate, ChatTemplateError, TemplateRefusedError
from tests.gateway.sample_tokenizers import CHATML

USER = {"role": "user", "content": "hi"}
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


def render(source: str, *messages: dict[str, str], limit: int = 1000, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(messages or [USER], max_characters=limit)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (CHATML, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", ""),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% if tools %}tools{% endif %}{% if documents is none %}none{% endif %}", "none"),
        ("a\n  {% if true %}\nb\n  {% endif %}\n", "a\nb\n"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ messages[0].content | trim | upper }}", "HI"),
    ],
)
def test_templates_find_what_they_are_written_for(source: str, text: str) -> None:
    assert render(source, bos_token="<s>") == text


def test_messages_that_the_template_refuses_are_refused_in_its_words() -> None:
    with pytest.raises(ChatTemplateError, match="must alternate"):
        render(ALTERNATING, USER, USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined_macro() }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
        "{{ range(10**9) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_one_error(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_output_is_bounded_while_it_grows() -> None:
    with pytest.raises(ChatTemplateError, match="1000 characters"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaa{% endfor %}{% endfor %}")


def test_a_long_reason_is_cut() -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render("{{ raise_exception('x' * 100000) }}")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("source", ["{% for %}", "{{ a", "{% unknown_tag %}"])
def test_what_does_not_compile_is_refused_at_once(source: str) -> None:
    with pytest.raises(TemplateRefusedError, match="chat_template"):
        ChatTemplate(source, {})
