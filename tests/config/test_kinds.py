import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixgate.config.kinds import (
    AddressText,
    Choice,
    Flag,
    Integer,
    Kind,
    NotAllowedError,
    Number,
    Size,
    Text,
    TextList,
    WorkerAddresses,
    format_size,
)

WORD = Text("a word", r"[a-z]+", max_bytes=8)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Flag(), True),
        (Integer(1, 9), 1),
        (Integer(1, 9), 9),
        (Number(0, 1), 0.5),
        (Number(0, 1), 1),
        (Size(1, 1 << 40), 4096),
        (Choice(("a", "b")), "b"),
        (WORD, "abc"),
        (AddressText(), "unix:/a"),
    ],
)
def test_a_value_reads_as_itself_from_the_file_and_from_a_flag(kind: Kind, value: object) -> None:
    assert kind.read(value) == value
    assert kind.read_text(str(value).lower() if isinstance(value, bool) else str(value)) == value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((Flag(), value) for value in (1, "true", None)),
        *((Integer(1, 9), value) for value in (0, 10, True, 1.0, "1", None, 10**30)),
        *((Number(0, 1), value) for value in (-0.1, 1.1, True, "0", math.nan, math.inf, -math.inf)),
        *((Size(1, 100), value) for value in (0, 101, True, 1.5, "", "1KiB", "1 KB", "-1", "1.5MiB", "KiB")),
        *((Choice(("a",)), value) for value in ("A", "", 1)),
        *((WORD, value) for value in ("", "abc\n", "ABC", 1, "abcdefghi", b"abc")),
        *((AddressText(unix=False), value) for value in ("unix:/a", "", "x", 1)),
        *(
            (WorkerAddresses(), value)
            for value in ("a:1", ["a"], ["a:1", "a:1"], ["dns:a"], ["dns:unix:/a"], [1], None)
        ),
        *((TextList(WORD), value) for value in ([], ["a", "a"], ["a", ""], "a", [1], None)),
    ],
)
def test_other_values_of_the_file_are_refused(kind: Kind, value: object) -> None:
    with pytest.raises(NotAllowedError):
        kind.read(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((Flag(), text) for text in ("", "yes", "1", "True")),
        *((Integer(1, 9), text) for text in ("", "0", "10", "1.0", "0x1", "1_0", " 1", "٣", "9" * 5000)),
        *((Number(0, 1), text) for text in ("", "nan", "inf", "-inf", "1e400", "2", "half")),
        *((Size(1, 100), text) for text in ("", "0", "101", "١", "1kib")),
    ],
)
def test_other_texts_of_a_flag_are_refused(kind: Kind, text: str) -> None:
    with pytest.raises(NotAllowedError):
        kind.read_text(text)


@given(st.integers(1, 1 << 50))
def test_a_size_is_written_as_it_is_read(count: int) -> None:
    assert Size(1, 1 << 50).read_text(format_size(count)) == count


def test_workers_are_addresses_and_names_to_look_up() -> None:
    workers = ("a:1", "unix:/a", "dns:b.svc:2", "dns:c.svc:2")
    assert WorkerAddresses().read(list(workers)) == WorkerAddresses().read_text(",".join(workers)) == workers
    assert WorkerAddresses().read([]) == WorkerAddresses().read_text("") == ()


def test_sizes_take_binary_units() -> None:
    size = Size(1, 1 << 50)
    texts = ("512MiB", "512 MiB", "1GiB", "3KiB", "2TiB", "7B", "7")
    assert [size.read(text) for text in texts] == [512 << 20, 512 << 20, 1 << 30, 3 << 10, 2 << 40, 7, 7]
