"""Standard output and error as the command line uses them: seen at once, and nobody's fault when nobody reads."""

import os
import sys
import unicodedata

from rich.console import Console


def say(text: str) -> None:
    """Print a line. Where the reader has gone the line is lost, and all later ones: what runs goes on."""
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


def discard_output() -> None:
    """Lead standard output nowhere from now on.

    The interpreter flushes it once more when it ends; into a broken pipe that would be a complaint and an exit code.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def write_text(text: str) -> None:
    """Write a model's text as it comes. A terminal gets no control characters but line breaks and tabs of it."""
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def harmless(text: str) -> str:
    """Replace control characters, which could do anything to a terminal, but for line breaks and tabs."""
    return "".join(map(_harmless, text))


def _harmless(character: str) -> str:
    return "\ufffd" if unicodedata.category(character) == "Cc" and character not in "\n\t" else character


def output() -> Console:
    """Make what draws tables on standard output, in colour only where that is a terminal."""
    return Console(highlight=False)


def remark(text: str) -> None:
    """Write a line about what was done to standard error, where it does not mix with results."""
    Console(stderr=True).print(harmless(text), style="dim", markup=False, highlight=False, soft_wrap=True)
