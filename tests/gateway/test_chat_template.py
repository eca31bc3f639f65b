"""Chat templates: what Hugging Face's do, in a sandbox and within limits."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixgate.gateway import template_sandbox
from prefixgate.gateway.chat_template import ChatTemplate, ChatTemplateError, TemplateRefusedError
from tests.gateway.sample_tokenizers import CHATML

USER = {"role": "user", "content": "hi"}
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are reached sooner, and else the same."""
    monkeypatch.setattr(template_sandbox, "MAX_STEPS", 50_000)
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(template_sandbox, "MIN_SIZE", 1 << 16)


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


@pytest.mark.usefixtures("small_bounds")
def test_output_is_bounded_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 60.0)
    with pytest.raises(ChatTemplateError, match="1000 characters"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}")


ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over nothing": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls": "{% macro f() %}{{ caller() }}{% endmacro %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% call f() %}{% endcall %}{% endfor %}{% endfor %}",
    "recursion": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "sorting": "{% set l = range(3000) | list %}{% for i in range(99999) %}{% set x = l | sort | list %}{% endfor %}",
}
_GROWING = (
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = FORMULA %}{% endfor %}{{ ns.x }}"
)
HUGE = {
    "product": "{{ 'a' * 10 ** 10 }}",
    "product of a list": "{{ ([1] * 10 ** 10) | length }}",
    "power": "{{ (10 ** (10 ** 9)) > 1 }}",
    "numbers": _GROWING.replace("'aaaaaaaa'", "99").replace("FORMULA", "ns.x * ns.x"),
    "sum": _GROWING.replace("FORMULA", "ns.x + ns.x"),
    "joined": _GROWING.replace("FORMULA", "ns.x ~ ns.x"),
    "list of lists": _GROWING.replace("FORMULA", "[ns.x, ns.x]"),
    "tuple of tuples": _GROWING.replace("FORMULA", "(ns.x, ns.x)"),
    "dict of dicts": _GROWING.replace("FORMULA", "{'a': ns.x, 'b': ns.x}"),
    "dicts by a call": _GROWING.replace("FORMULA", "dict(a=ns.x, b=ns.x)"),
    "namespaces": _GROWING.replace("FORMULA", "namespace(a=ns.x, b=ns.x)"),
    "a namespace in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns | string }}",
    "replaced": _GROWING.replace("FORMULA", "ns.x.replace('a', 'aaaaaaaa')"),
    "replaced by a filter": _GROWING.replace("FORMULA", "ns.x | replace('a', 'aaaaaaaa')"),
    "many replaced": "{% set b = 'a' * 50000 %}{{ (['a' * 100] * 400) | map('replace', 'a', b) | list | length }}",
    "joined by a method": _GROWING.replace("FORMULA", "ns.x.join(['a'] * 900)"),
    "joined by a filter": _GROWING.replace("FORMULA", "(['a'] * 900) | join(ns.x)"),
    "padded": "{{ 'a'.ljust(10 ** 10) }}",
    "centered": "{{ 'a' | center(10 ** 10) }}",
    "tabs": "{{ ('\t' * 9999).expandtabs(10 ** 9) }}",
    "translated": "{{ ('a' * 9999).translate({97: 'a' * 9999}) | length }}",
    "indented": "{% set ns = namespace(x='a\\n' * 999) %}{% for i in range(999) %}"
    "{% set ns.x = ns.x | indent(10 ** 9) %}{% endfor %}",
    "indented JSON": "{% set ns = namespace(x=[1] * 999) %}{% for i in range(400) %}{% set ns.x = [ns.x] %}{% endfor %}"
    "{{ ns.x | tojson(indent=10 ** 9) | length }}",
    "formatted": "{{ '%1000000000d' % 1 }}",
    "formatted by a value": "{{ '%*d' % (10 ** 9, 1) }}",
    "formatted by a method": "{{ '{:1000000000}'.format(1) }}",
    "formatted by a nested value": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "formatted often": "{{ ('{0}' * 99999).format('a' * 50000) | length }}",
    "rounded": "{{ 5 | round(-10 ** 9) }}",
    "words": "{{ lipsum(n=10 ** 8) }}",
    "into a variable": "{% set x %}{% for i in range(999) %}{% for j in range(9) %}TEXT{% endfor %}{% endfor %}"
    "{% endset %}{{ x | length }}".replace("TEXT", "a" * 999),
    "into a variable by value": "{% set b = 'a' * 50000 %}{% set x %}{% for i in range(9999) %}{{ b }}{% endfor %}"
    "{% endset %}{{ x | length }}",
    "by macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% else %}aaaaaaaa{% endif %}{% endmacro %}"
    "{{ f(40) }}",
    "batches": "{{ [1] | batch(10 ** 10, 0) | list | length }}",
    "slices": "{{ [1] | slice(10 ** 10) | list | length }}",
}


@pytest.mark.usefixtures("small_bounds")
@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_end_is_ended(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"steps|seconds|cannot be rendered"):
        render(source)


@pytest.mark.usefixtures("small_bounds")
@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_a_template_that_makes_gigabytes_is_ended_before_it_has(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError, match=r"characters in|seconds|bits|not offer|digits|undefined"):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% set ns = namespace(a=1, l=[]) %}{% set ns.l = ns.l + [ns.a] %}{{ ns.l }}{{ ns.a }}", "[1]1"),
        ("{{ 'a-' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ [1] * 2 + [3] }}{{ 1 ~ 'b' ~ none }}", "a-a-a-10243[1, 1, 3]1bNone"),
        (
            "{{ '%s is %03d' % ('a', 7) }} {{ '{} {b:.2f}'.format(1, b=2) }} {{ 'x'.join(['a', 'b']) }}",
            "a is 007 1 2.00 axb",
        ),
        (
            "{{ 'aXbX'.replace('X', '--') }}{{ 'aXbX' | replace('X', '-', 1) }}{{ 'ab' | replace('', '.') }}",
            "a--b--a-bX.a.b.",
        ),
        ("{{ ['a', 1] | join(', ') }}{{ messages | join('+', attribute='role') }}", "a, 1user"),
        ("{{ 'a\nb\n\nc' | indent }}|{{ 'a\nb' | indent(2, true) }}", "a\n    b\n\n    c|  a\n  b"),
        ("{{ {'b': [1, 'é<'], 'a': none} | tojson }}", '{"b": [1, "é<"], "a": null}'),
        ("{{ {'b': 1} | tojson(indent=2) }}{{ [1] | tojson(separators=(',', ':')) }}", '{\n  "b": 1\n}[1]'),
        ("{{ 2.567 | round(1) }}{{ [1, 2] | sum }}{{ messages | map(attribute='content') | list }}", "2.63['hi']"),
        ("{% for k, v in {'a': 1}.items() %}{{ k, v }}{% endfor %}{{ (1, 2)[1] }}", "('a', 1)2"),
        ("{% macro f(a, b='x') %}{{ a }}{{ b }}{% endmacro %}{{ f('1') }}{{ f('1', b='2') }}", "1x12"),
        ("{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{% endcall %}", "<in>"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x %}c{{ 1 }}{% endset %}{{ x }}", "ABc1"),
        ("{% for i in range(6) if i % 2 %}{{ i }}{{ ',' if not loop.last }}{% endfor %}", "1,3,5"),
        ("{% for x in [1, [2]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
        ("{{ 'a' in ('a', 'b') }}{{ 'x' if messages[0].role == 'user' }}{{ messages[1:] }}", "Truex[]"),
        ("{% if a is defined %}{{ a }}{% endif %}{{ a | default('d') }}", "d"),
        ("{{ messages | selectattr('role', 'eq', 'user') | list | length }}", "1"),
    ],
)
def test_what_templates_do_within_bounds_is_as_everywhere(source: str, text: str) -> None:
    assert render(source) == text


@pytest.mark.usefixtures("small_bounds")
def test_renderings_do_not_count_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 60.0)
    source = "{% for i in range(4000) %}{% for j in range(10) %}{% endfor %}{% endfor %}done"
    template = ChatTemplate(source, {})
    with ThreadPoolExecutor(4) as pool:
        rendered = pool.map(lambda _: template.render([USER], max_characters=100), range(8))
        assert list(rendered) == ["done"] * 8


def test_a_long_reason_is_cut() -> None:
    with pytest.raises(ChatTemplateError) as caught:
        render("{{ raise_exception('x' * 100000) }}")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("source", ["{% for %}", "{{ a", "{% unknown_tag %}"])
def test_what_does_not_compile_is_refused_at_once(source: str) -> None:
    with pytest.raises(TemplateRefusedError, match="chat_template"):
        ChatTemplate(source, {})
