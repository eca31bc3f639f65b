"""Stop strings: where an output ends, and what must wait because it could still become the beginning of an end.

An Aho-Corasick automaton over the characters of a call's stop strings. Its state is the longest suffix of the text
seen that begins some stop string, so that the state's depth is exactly the number of characters to hold back: text
that cannot become a stop string is never delayed, and a long stop string does not silence a short answer.

The match taken is the one that is complete first; of several complete at the same character the longest. That depends
on the text alone, never on how it was cut into pieces. Waiting for a longer stop string that began earlier was
rejected: it would hold back an end that has already come.
"""

from collections.abc import Iterable
from typing import NamedTuple


class StopStrings:
    """The stop strings of one call, shared by its outputs. None of them is empty."""

    def __init__(self, stops: Iterable[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        """For each state the states that characters lead to. A state is a prefix of some stop string."""
        self.fallback = [0]
        """For each state that of its longest proper suffix."""
        self.depth = [0]
        """For each state its length in characters."""
        self.matched: list[str] = [""]
        """For each state the longest stop string that it ends with, or none."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.matched.append("")
            state = self.next[state][character]
        self.matched[state] = stop

    def _link(self) -> None:
        """Set fallbacks breadth first, since a state's fallback is shorter than the state."""
        states = list(self.next[0].values())
        for state in states:
            for character, child in self.next[state].items():
                self.fallback[child] = self.step(self.fallback[state], character)
                self.matched[child] = self.matched[child] or self.matched[self.fallback[child]]
                states.append(child)

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while character not in self.next[state]:
            if state == 0:
                return 0
            state = self.fallback[state]
        return self.next[state][character]


class Scanned(NamedTuple):
    """What a piece of text came to."""

    text: str
    """Text that can be sent now; it may begin with what was held back before."""
    matched_stop: str
    """The stop string found, which ends the output; else empty."""


class StopScanner:
    """Looks for stop strings in one output's text as it grows."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""

    def push(self, text: str) -> Scanned:
        """Take the next piece of text. Not to be called again once a stop string was found."""
        stops, state = self._stops, self._state
        for position, character in enumerate(text):
            state = stops.step(state, character)
            if stops.matched[state]:
                seen = self._held + text[: position + 1]
                self._held = ""
                return Scanned(seen[: -len(stops.matched[state])], stops.matched[state])
        seen = self._held + text
        cut = len(seen) - stops.depth[state]
        self._state, self._held = state, seen[cut:]
        return Scanned(seen[:cut], "")

    def flush(self) -> str:
        """End the output without a stop string: return what was held back."""
        held, self._held = self._held, ""
        return held
