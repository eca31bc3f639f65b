import pytest

from prefixgate.config.address import MAX_UNIX_PATH_BYTES, Address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8050", Address("127.0.0.1", 8050)),
        ("localhost:0", Address("localhost", 0)),
        ("worker-0.workers.svc:65535", Address("worker-0.workers.svc", 65535)),
        ("[::1]:80", Address("::1", 80)),
        ("unix:/run/a b.sock", Address(path="/run/a b.sock")),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


def test_a_unix_url_is_its_path() -> None:
    assert parse_address("unix:///run/a.sock") == Address(path="/run/a.sock")


@pytest.mark.parametrize(
    "text",
    [
        *("", "8050", ":8050", "host", "host:", "host:65536", "host:-1", "host:1 ", "host:١", "a/b:1", "[::g]:1"),
        *("::1:80", "unix:", "unix:relative", "unix:/a\0b", "unix:/" + "a" * MAX_UNIX_PATH_BYTES, "http://h:1"),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither|absolute path|IPv6|At least|Only hex"):
        parse_address(text)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1", "unix:/a"])
def test_loopback_and_unix_sockets_are_local(text: str) -> None:
    assert parse_address(text).is_local


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "localhost.example.org:1"])
def test_nothing_else_is_local(text: str) -> None:
    assert not parse_address(text).is_local
