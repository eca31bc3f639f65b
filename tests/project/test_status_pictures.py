"""The pictures of the status page are there, alike in size, and small."""

import re
import struct

import pytest

from tests.project.status_pictures import FOLDER, SCHEMES, SIZE, STATES, name_of
from tests.project.tree import ROOT

MAX_BYTES = 200_000
NAMES = [name_of(state, scheme) for state in STATES for scheme in SCHEMES]


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_small_and_as_large_as_the_others(name: str) -> None:
    picture = (FOLDER / name).read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", picture[16:24]) == SIZE
    assert len(picture) < MAX_BYTES


def test_the_readme_shows_each_of_them_with_words_for_who_cannot_see_it() -> None:
    readme = (ROOT / "README.md").read_text()
    assert sorted(re.findall(r"docs/images/(status-[a-z-]+\.png)", readme)) == sorted(NAMES)
    pictures = re.findall(r'<img src="docs/images/status-[^>]+>', readme)
    assert all(re.search(r'alt="[^"]{30,}"', picture) for picture in pictures)
    assert len(pictures) == len(STATES)
