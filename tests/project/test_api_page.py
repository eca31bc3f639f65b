"""`docs/api.md` is what the protocol and the table of fields say, and says something of everything."""

import re

from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2
from tests.project.api_page import PARTS, page
from tests.project.tree import ROOT

KEPT = (ROOT / "docs" / "api.md").read_text()
FILES = (gateway_pb2.DESCRIPTOR, generation_pb2.DESCRIPTOR, worker_pb2.DESCRIPTOR)


def lines_of(heading: str) -> list[str]:
    """List the lines of a table under a heading."""
    section = re.search(rf"^### {heading}$(.*?)(?=^##|\Z)", KEPT, re.MULTILINE | re.DOTALL)
    assert section is not None, heading
    return [line for line in section[1].splitlines() if line.startswith("| `")]


def test_the_page_is_what_the_protocol_and_the_table_say() -> None:
    assert page() == KEPT, "run `make reference`"


def test_every_file_of_the_protocol_has_its_part() -> None:
    assert {path.name for path in (ROOT / "proto").glob("*.proto")} == set(PARTS)


def test_every_method_message_field_and_value_has_a_line_with_a_meaning() -> None:
    wanted = [
        (message.name, [f.name for f in message.fields]) for d in FILES for message in d.message_types_by_name.values()
    ]
    wanted += [(enum.name, [v.name for v in enum.values]) for d in FILES for enum in d.enum_types_by_name.values()]
    wanted += [
        (service.name, [m.name for m in service.methods]) for d in FILES for service in d.services_by_name.values()
    ]
    assert len(wanted) > 30
    for heading, names in wanted:
        lines = lines_of(heading)
        assert [re.match(r"\| `(\w+)`", line)[1] for line in lines] == names  # type: ignore[index]
        assert [line for line in lines if re.search(r"\|\s*\|$", line)] == [], "without a meaning"


def test_links_lead_to_headings_of_the_page() -> None:
    headings = {heading.lower() for heading in re.findall(r"^### (\w+)$", KEPT, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", KEPT)) <= headings
