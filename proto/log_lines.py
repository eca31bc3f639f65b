"""How lines of the log look: one line for each record, whatever it holds, as text or as JSON.

What clients chose, such as a request id, can be part of a record. So nothing in it ends a line or reaches a terminal as
a command: characters that do not print are written as escapes, and a traceback's lines are indented, so that none of
them passes for a record.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

Value = str | int | float

_SAFE = re.compile(r"[\w.:/@%+-]+", re.ASCII)
_INDENT = "    "


def with_fields(fields: Mapping[str, Value | list[str]]) -> dict[str, object]:
    """Make the ``extra`` of a record that has values by name beside its message."""
    return {"fields": fields}


def start_logging(form: str) -> None:
    """Write what is logged in this process to standard error, as "text" or "json". To be called before gRPC is used."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    if form == "json":
        # gRPC's C++ core writes lines of its own, past Python. What they say of a call its status says too.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class TextLines(logging.Formatter):
    """Lines for people: time, level, logger, message, then ``name=value`` of each field."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        words = [_time(record), record.levelname, f"{record.name}:", record.getMessage()]
        words += [f"{name}={_word(value)}" for name, value in _fields(record).items()]
        line = printable(" ".join(words))
        trace = _exception(self, record)
        return "\n".join([line, *(_INDENT + printable(below) for below in trace.splitlines())])


class JsonLines(logging.Formatter):
    """Lines for programs: an object each, of ASCII characters alone."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one record."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if trace := _exception(self, record):
            line["exception"] = trace
        return json.dumps(line)


def printable(text: str) -> str:
    """Write characters that do not print, line ends among them, as escapes."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> Mapping[str, Value | list[str]]:
    fields: Mapping[str, Value | list[str]] = getattr(record, "fields", {})
    return fields


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    return "\n".join([*parts, record.stack_info] if record.stack_info else parts)


def _word(value: Value | list[str]) -> str:
    """Write a value so that it ends where it ends: in quotes unless it is one plain word."""
    if isinstance(value, int | float):
        return str(value)
    text = ",".join(value) if isinstance(value, list) else value
    return text if _SAFE.fullmatch(text) else json.dumps(text)
