"""One output's text: stop strings over token borders, end marks without text, and one path to the end."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.gateway.detokenizer import TokenPieces
from prefixgate.gateway.output_text import OutputText, whole
from prefixgate.gateway.stop import StopStrings
from prefixgate.gateway.tokenizer import ModelTokenizer
from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2
from tests.counts import scaled
from tests.gateway import sample_tokenizers
from tests.gateway.sample_tokenizers import id_of

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH
MODEL = ModelTokenizer(sample_tokenizers.byte_level())
PIECES = TokenPieces(MODEL)
BYTE_IDS = {PIECES.piece(token_id): token_id for token_id in range(256)}
EOS = id_of(MODEL.tokenizer, "</s>")


def byte_ids(text: str) -> list[int]:
    """One id for each byte of a text."""
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


def push_all(
    stops: Sequence[str], messages: Sequence[Sequence[int]], reason: generation_pb2.FinishReason = LENGTH
) -> gateway_pb2.Output:
    """Push messages of ids, the last with a finish reason, and put the deltas together."""
    output, deltas = OutputText(0, PIECES, StopStrings(stops)), []
    for position, ids in enumerate(messages):
        is_last = position == len(messages) - 1
        news = worker_pb2.OutputTokens(index=0, token_ids=ids, finish_reason=reason if is_last else None)
        if (delta := output.push(news)) is not None:
            deltas.append(delta)
    assert [bool(delta.finish_reason) for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return whole(1, deltas)[0]


@settings(max_examples=scaled(6000), deadline=None)
@given(
    text=st.text("ab<é👋", max_size=12),
    stops=st.lists(st.text("ab<é", min_size=1, max_size=3), max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    reason=st.sampled_from([STOP, LENGTH]),
)
def test_an_output_is_the_same_however_its_ids_are_cut_into_messages(
    text: str, stops: list[str], cuts: list[int], reason: generation_pb2.FinishReason
) -> None:
    ids = [*byte_ids(text), *([EOS] if reason == STOP else [])] or [EOS]
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(ids)), len(ids)]
    cut_up = push_all(stops, [ids[a:b] for a, b in pairwise(bounds)], reason)
    assert cut_up == push_all(stops, [ids], reason)
    assert cut_up == push_all(stops, [[token_id] for token_id in ids], reason)
    if not cut_up.matched_stop:
        assert cut_up.text == text
        assert list(cut_up.token_ids) == ids


def test_a_stop_string_over_several_tokens_ends_the_output_without_a_trace() -> None:
    output = push_all(["DEFGHIJ"], [byte_ids("abcDEF"), byte_ids("G"), byte_ids("HI"), byte_ids("JK"), byte_ids("L")])
    assert (output.text, output.finish_reason, output.matched_stop) == ("abc", STOP, "DEFGHIJ")
    assert list(output.token_ids) == byte_ids("abcDEFGHIJ")


def test_held_text_is_sent_when_an_end_mark_follows() -> None:
    output = push_all(["<|sep|>xyz"], [byte_ids("answer<|s"), [EOS]], STOP)
    assert (output.text, output.finish_reason, output.matched_stop) == ("answer<|s", STOP, "")
    assert list(output.token_ids) == [*byte_ids("answer<|s"), EOS]


def test_a_stop_id_is_part_of_the_ids_and_not_of_the_text() -> None:
    output = push_all([], [byte_ids("ab!")], STOP)
    assert output.text == "ab"
    assert list(output.token_ids) == byte_ids("ab!")
    assert push_all([], [byte_ids("ab!")], LENGTH).text == "ab!"


def test_an_output_of_nothing_but_its_end_mark_is_empty() -> None:
    output = push_all(["x"], [[EOS]], STOP)
    assert (output.text, list(output.token_ids), output.finish_reason) == ("", [EOS], STOP)


def test_a_character_cut_off_by_the_length_is_marked() -> None:
    assert push_all([], [byte_ids("a👋")[:-1]], LENGTH).text == "a\ufffd"


def test_whatever_comes_after_a_stop_string_is_no_part_of_the_output() -> None:
    output = OutputText(0, PIECES, StopStrings(["b"]))
    first = output.push(worker_pb2.OutputTokens(token_ids=byte_ids("ab")))
    assert first is not None
    assert (first.text, first.matched_stop) == ("a", "b")
    assert output.push(worker_pb2.OutputTokens(token_ids=byte_ids("c"))) is None
    assert output.push(worker_pb2.OutputTokens(token_ids=[EOS], finish_reason=STOP)) is None


def test_ids_whose_text_still_waits_are_sent_at_once() -> None:
    output = OutputText(0, PIECES, StopStrings(["bc"]))
    delta = output.push(worker_pb2.OutputTokens(token_ids=byte_ids("b")))
    assert delta is not None
    assert (delta.text, list(delta.token_ids)) == ("", byte_ids("b"))


@pytest.mark.parametrize("stop", ["👋🏽", "\n\n", "\0"])
def test_stop_strings_of_any_characters_are_found_byte_by_byte(stop: str) -> None:
    output = push_all([stop], [[token_id] for token_id in byte_ids(f"text{stop}more")])
    assert (output.text, output.matched_stop) == ("text", stop)


@pytest.mark.parametrize(("stops", "reason", "kept"), [([], LENGTH, 5), ([], STOP, 5), (["l"], LENGTH, 3)])
def test_log_probabilities_go_where_their_tokens_go(
    stops: list[str], reason: generation_pb2.FinishReason, kept: int
) -> None:
    ids = byte_ids("hello")
    news = worker_pb2.OutputTokens(index=0, token_ids=ids, finish_reason=reason)
    news.logprobs.extend(generation_pb2.TokenLogprob(token_id=token_id, rank=7) for token_id in ids)
    delta = OutputText(0, PIECES, StopStrings(stops)).push(news)
    assert delta is not None
    assert [found.token_id for found in delta.logprobs] == list(delta.token_ids) == ids[:kept]
    assert whole(1, [delta, delta])[0].logprobs == [*delta.logprobs, *delta.logprobs]
