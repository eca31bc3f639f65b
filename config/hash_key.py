"""The hash key: the secret that gateway and worker share, from wherever the operator keeps it."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from prefixgate.config.cache_settings import CacheSettings
from prefixgate.config.settings import SettingsError

HASH_KEY_VARIABLE = "PREFIXGATE_HASH_KEY"
"""Environment variable with the key in hexadecimal; `serve` sets it for the two processes that it starts."""

MIN_HASH_KEY_BYTES = 16
MAX_HASH_KEY_BYTES = 1024


def read_hash_key(cache: CacheSettings, environ: Mapping[str, str] = os.environ) -> bytes | None:
    """Find the key: the environment variable first, then ``cache.hash_key`` or ``cache.hash_key_file``.

    Returns None where none is set. Raises SettingsError for a key that is no key; its text never holds the key.
    """
    if HASH_KEY_VARIABLE in environ:
        return _parse(HASH_KEY_VARIABLE, environ[HASH_KEY_VARIABLE])
    if cache.hash_key:
        return _parse("cache.hash_key", cache.hash_key)
    if cache.hash_key_file:
        return _parse("cache.hash_key_file", _read_file(Path(cache.hash_key_file)))
    return None


def require_hash_key(cache: CacheSettings, environ: Mapping[str, str] = os.environ) -> bytes:
    """Find the key as ``read_hash_key`` does, or raise SettingsError with what to do about its absence."""
    key = read_hash_key(cache, environ)
    if key is None:
        raise SettingsError(
            "cache.hash_key is not set: a gateway and its worker started separately need one secret in common. Set "
            f"cache.hash_key_file (or cache.hash_key, or the variable {HASH_KEY_VARIABLE}) to the same for both; "
            "`openssl rand -hex 32` makes one. `prefixgate serve` does this by itself."
        )
    return key


def new_hash_key() -> bytes:
    """Make a fresh random key."""
    return secrets.token_bytes(32)


def _read_file(path: Path) -> str:
    try:
        with path.open(encoding="ascii") as file:
            return file.read(2 * MAX_HASH_KEY_BYTES + 2)
    except OSError as error:
        raise SettingsError(f"cache.hash_key_file: {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError:
        return ""


def _parse(source: str, text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if not MIN_HASH_KEY_BYTES <= len(key) <= MAX_HASH_KEY_BYTES:
        raise SettingsError(
            f"{source}: (not shown) is not allowed; it must be {MIN_HASH_KEY_BYTES} to {MAX_HASH_KEY_BYTES} bytes "
            "written as hexadecimal digits"
        )
    return key
