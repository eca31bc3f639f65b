"""Standard output as the command line uses it: lines that are seen at once, and nobody's fault when nobody reads."""

import os
import sys


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
