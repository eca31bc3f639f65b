"""Stop strings: found across pieces, nothing of them sent, nothing else delayed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixgate.gateway.stop import StopScanner, StopStrings
from tests.counts import scaled

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
PIECES = st.lists(st.text("abc", max_size=5), max_size=8)


def scan(stops: list[str], pieces: list[str]) -> tuple[list[str], str]:
    """Send pieces until a stop string is found or they end; return what came of each, and the stop string."""
    scanner, sent = StopScanner(StopStrings(stops)), []
    for piece in pieces:
        scanned = scanner.push(piece)
        sent.append(scanned.text)
        if scanned.matched_stop:
            return sent, scanned.matched_stop
    sent.append(scanner.flush())
    return sent, ""


def expected(stops: list[str], text: str) -> tuple[str, str]:
    """The plain statement of the rule: the match complete first, of several the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, ""


@settings(max_examples=scaled(20_000), deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_any_cut_of_a_text_gives_the_same_and_the_right_end(stops: list[str], pieces: list[str]) -> None:
    sent, matched = scan(stops, pieces)
    assert ("".join(sent), matched) == expected(stops, "".join(pieces))


@settings(max_examples=scaled(20_000), deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_only_what_could_become_a_stop_string_waits(stops: list[str], pieces: list[str]) -> None:
    sent, matched = scan(stops, pieces)
    for count in range(1, len(sent) if not matched else 0):
        text = "".join(pieces[:count])
        held = text[len("".join(sent[:count])) :]
        suffixes = [text[start:] for start in range(len(text) + 1)]
        assert held == next(suffix for suffix in suffixes if any(stop.startswith(suffix) for stop in [*stops, ""]))


def test_nothing_of_a_stop_string_that_spans_pieces_is_sent() -> None:
    assert scan(["DEFGHIJ"], ["DEF", "G", "HI", "J"]) == (["", "", "", ""], "DEFGHIJ")
    assert scan(["own fox"], ["the quick br", "own", " fox", " jumps"]) == (["the quick br", "", ""], "own fox")


def test_held_text_is_sent_once_at_the_end() -> None:
    assert scan(["<|sep|>xyz"], ["answer", "<|s"]) == (["answer", "", "<|s"], "")


def test_text_without_a_beginning_of_a_stop_string_is_not_delayed() -> None:
    assert scan(["<" + "x" * 1000], ["short ", "answer"]) == (["short ", "answer", ""], "")


def test_no_stop_strings_hold_nothing() -> None:
    assert scan([], ["a", "b"]) == (["a", "b", ""], "")


@pytest.mark.parametrize("stop", ["👋🏽", "\0", "\n\n", "é"])
def test_stop_strings_are_compared_by_character(stop: str) -> None:
    assert scan([stop, stop], [*f"ab{stop}", "cd"]) == (["a", "b", *[""] * len(stop)], stop)
