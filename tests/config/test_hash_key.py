from pathlib import Path

import pytest

from prefixgate.cache.hashing import MIN_KEY_BYTES, BlockHasher
from prefixgate.config.cache_settings import CacheSettings
from prefixgate.config.hash_key import (
    HASH_KEY_VARIABLE,
    MIN_HASH_KEY_BYTES,
    new_hash_key,
    read_hash_key,
    require_hash_key,
)
from prefixgate.config.settings import SettingsError

A, B = "0a" * 16, "0B" * 32


def test_the_key_comes_from_the_variable_or_else_from_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(B + "\n")
    from_file = CacheSettings(hash_key_file=str(file))
    assert read_hash_key(CacheSettings(), {}) is None
    assert read_hash_key(CacheSettings(hash_key=A), {}) == bytes.fromhex(A)
    assert read_hash_key(from_file, {}) == bytes.fromhex(B)
    assert read_hash_key(from_file, {HASH_KEY_VARIABLE: A}) == bytes.fromhex(A)
    assert require_hash_key(from_file, {}) == bytes.fromhex(B)


def test_a_process_on_its_own_needs_a_key() -> None:
    with pytest.raises(SettingsError, match=rf"cache\.hash_key is not set.*{HASH_KEY_VARIABLE}"):
        require_hash_key(CacheSettings(), {})


@pytest.mark.parametrize("text", ["", "0a" * 15, "0a" * 16 + "0", "zz" * 16, "0a" * 1025, "é" * 16])
def test_what_is_no_key_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    for settings, environ in (
        (CacheSettings(), {HASH_KEY_VARIABLE: text}),
        (CacheSettings(hash_key_file=str(file)), {}),
    ):
        with pytest.raises(SettingsError, match=r"must be 16 to 1024 bytes") as refusal:
            read_hash_key(settings, environ)
        assert not text or text not in str(refusal.value)


def test_a_missing_file_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"cache\.hash_key_file: '/no/such' cannot be read"):
        read_hash_key(CacheSettings(hash_key_file="/no/such"), {})


def test_new_keys_differ_and_are_long_enough_to_hash_with() -> None:
    assert MIN_HASH_KEY_BYTES == MIN_KEY_BYTES
    assert BlockHasher(new_hash_key()).fingerprint != BlockHasher(new_hash_key()).fingerprint
