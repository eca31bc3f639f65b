import re

from prefixgate.config.settings import TenantSettings
from prefixgate.gateway.tenants import TenantKeys, digest_api_key, new_api_key


def _keys(**keys: list[str]) -> TenantKeys:
    return TenantKeys(
        {name: TenantSettings(tuple(digest_api_key(key.encode()) for key in of)) for name, of in keys.items()}
    )


def test_every_key_finds_its_owner_and_no_other() -> None:
    keys = _keys(blue=["b1", "b2"], red=["r1"])
    assert [keys.owner(key) for key in (b"b1", b"b2", b"r1", b"b", b"B1", b"b1 ", b"", b"\xff\x00")] == [
        *("blue", "blue", "red"),
        *[None] * 5,
    ]


def test_a_digest_is_no_key() -> None:
    digest = digest_api_key(b"secret")
    keys = _keys(blue=["secret"])
    assert keys.owner(digest.encode()) is None
    assert keys.owner(bytes.fromhex(digest.removeprefix("sha256:"))) is None


def test_a_digest_is_written_as_the_configuration_wants_it() -> None:
    # The SHA-256 of "abc" from FIPS 180-2, so that digests made elsewhere (sha256sum) fit.
    assert digest_api_key(b"abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_new_keys_are_long_printable_and_different() -> None:
    made = {new_api_key() for _ in range(50)}
    assert len(made) == 50
    assert all(re.fullmatch(r"pg-[A-Za-z0-9_-]{43}", key) for key in made)
