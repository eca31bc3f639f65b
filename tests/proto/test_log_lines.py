"""A record is one line, whatever is in it."""

import io
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.proto.log_lines import JsonLines, TextLines, printable, with_fields

FORGED = "mine\n2026-01-01T00:00:00.000Z INFO prefixgate: Generate OK tenant=other \x1b[2J\u2028\u202e"


def written(formatter: logging.Formatter, log: Callable[[logging.Logger], Any]) -> str:
    """Write what is logged to a logger of its own, and return it."""
    logger = logging.Logger("prefixgate.test")
    handler = logging.StreamHandler(stream := io.StringIO())
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    log(logger)
    return stream.getvalue()


def fail(logger: logging.Logger) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("A call failed")


def test_a_line_for_people_has_its_values_behind_it() -> None:
    fields = with_fields({"tenant": "acme", "seconds": 0.25, "finish": ["stop", "length"], "worker": "unix:/a/b"})
    line = written(TextLines(), lambda logger: logger.info("Generate %s", "OK", extra=fields))
    words = line.rstrip("\n").split(" ")
    assert words[1:] == [
        "INFO",
        "prefixgate.test:",
        "Generate",
        "OK",
        "tenant=acme",
        "seconds=0.25",
        'finish="stop,length"',
        "worker=unix:/a/b",
    ]


def test_a_line_for_programs_is_an_object_with_the_values_in_it() -> None:
    fields = with_fields({"tenant": "acme", "seconds": 0.25, "finish": ["stop", "length"]})
    line = json.loads(written(JsonLines(), lambda logger: logger.warning("Generate %s", "OK", extra=fields)))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "prefixgate.test",
        "message": "Generate OK",
        "tenant": "acme",
        "seconds": 0.25,
        "finish": ["stop", "length"],
    }


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines()], ids=["text", "json"])
def test_nobody_writes_a_line_of_their_own(formatter: logging.Formatter) -> None:
    fields = with_fields({"request_id": FORGED})
    text = written(formatter, lambda logger: logger.info("request %s", FORGED, extra=fields))
    assert text.count("\n") == 1
    assert text.rstrip("\n").isprintable()


def test_a_value_cannot_pass_for_two() -> None:
    fields = with_fields({"request_id": 'x tenant=other "'})
    line = written(TextLines(), lambda logger: logger.info("Generate", extra=fields))
    assert line.endswith('Generate request_id="x tenant=other \\""\n')


def test_lines_of_a_traceback_pass_for_no_record() -> None:
    first, *below = written(TextLines(), fail).rstrip("\n").split("\n")
    assert first.endswith("A call failed")
    assert all(line.startswith("    ") and line.isprintable() for line in below)
    assert "ValueError: mine" in "".join(below)


def test_a_traceback_is_part_of_the_object() -> None:
    text = written(JsonLines(), fail)
    assert text.count("\n") == 1
    assert f"ValueError: {FORGED}" in json.loads(text)["exception"]


@given(st.text())
def test_what_is_printable_is_printable_and_what_was_stays(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
