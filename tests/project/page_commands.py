"""The commands on the pages of the tree, as their readers would type them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.project.tree import ROOT, tracked_files

_FENCED = re.compile(r"^```(?:sh|shell|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`(?:\.venv/bin/)?(prefixgate [^`\n]*)`(?!`)")
_COMMENT = re.compile(r"(?:^|\s+)#\s.*$")


class PageCommand(NamedTuple):
    """A line of a block that a reader runs."""

    page: str
    text: str


def pages() -> list[Path]:
    """List all pages."""
    return [path for path in tracked_files() if path.suffix == ".md"]


def fenced(text: str) -> Iterator[str]:
    """Yield the commands of a page's blocks, without comments; lines that go on and loops are one command each."""
    for block in _FENCED.findall(text):
        loop: list[str] = []
        for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
            command = _COMMENT.sub("", line).rstrip().removeprefix("$ ")
            if loop or command.endswith("; do"):
                loop.append(command)
                if not command.startswith("done"):
                    continue
                command, loop = "\n".join(loop), []
            if command.strip():
                yield command


def inline(text: str) -> Iterator[str]:
    """Yield what a page calls `prefixgate` with amid its sentences."""
    yield from _INLINE.findall(text)


def commands() -> list[PageCommand]:
    """List the commands of all pages."""
    return [PageCommand(str(path.relative_to(ROOT)), text) for path in pages() for text in fenced(path.read_text())]
