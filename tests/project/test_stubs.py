import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.tree import ROOT

PROTOS = sorted((ROOT / "proto").glob("*.proto"))


def test_making_the_stubs_again_changes_nothing(tmp_path: Path) -> None:
    # -o: the environment is taken as it is, however old.
    command = ["make", "--no-print-directory", "-o", ".venv/installed", "proto", f"STUBS={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "proto").glob("*_pb2*.py*")}
    assert sorted(made) == sorted(kept)
    assert [name for name in made if made[name] != kept[name]] == []


def declarations(text: str) -> Iterator[tuple[str, str]]:
    """List each declaration of a .proto file with the line above it."""
    above = ""
    for line in (line.strip() for line in text.splitlines()):
        if re.match(
            r"(message|enum|service|rpc|oneof) |(optional |repeated )?[\w.<>, ]+ \w+ = \d+;|[A-Z_]+ = \d+;", line
        ):
            yield line, above
        if line:
            above = line


def is_explained(line: str, above: str) -> bool:
    # A oneof that is the whole of its message is explained with it.
    return above.startswith("//") or line.startswith("oneof message")


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_message_field_and_method_is_explained(path: Path) -> None:
    found = list(declarations(path.read_text()))
    assert len(found) > 20
    assert [line for line, above in found if not is_explained(line, above)] == []


def test_the_check_sees_what_is_not_explained() -> None:
    text = """
    // Said.
    message A {
      // Said.
      uint32 a = 1;
      map<string, string> b = 2;
      oneof input {
        // Said.
        B c = 3;
        prefixgate.v1.B d = 4;
      }
    }
    enum E {
      E_ONE = 0;
    }
    """
    missing = [line.split(" = ")[0] for line, above in declarations(text) if not is_explained(line, above)]
    assert missing == ["map<string, string> b", "oneof input {", "prefixgate.v1.B d", "enum E {", "E_ONE"]
