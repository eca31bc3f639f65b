"""The configuration file while the gateway runs: read again when it changes."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

from prefixgate.config.flags import setting_keys
from prefixgate.config.settings import Settings, SettingsError

logger = logging.getLogger(__name__)

_State = tuple[int, int, int]
_MISSING: _State = (0, 0, 0)

_POLL_SECONDS = 2.0
"""Looked at, not listened to: notifications differ between systems, and miss files behind network mounts."""

_FOLLOWED = ("gateway.operator_keys",)
_FIXED = [
    key
    for key in setting_keys(("gateway", "routing", "tracing", "log", "cache.hash_key", "cache.hash_key_file"))
    if key not in _FOLLOWED
]
"""What a gateway reads once, at its start. Tenants and [limits] take effect at once; the rest is the worker's."""


class SettingsWatch:
    """Hands on new settings. A file that cannot be used is logged, and what was there before stays."""

    def __init__(self, path: Path, settings: Settings, load: Callable[[], Settings]) -> None:
        """``settings`` came from ``load``, which reads ``path``."""
        self._path = path
        self._started_with = self._latest = settings
        self._load = load
        # Not known: it may have changed since it was read.
        self._state: _State | None = None
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Have the file read at once, whether it has changed or not."""
        self._asked.set()

    async def run(self, apply: Callable[[Settings], None]) -> None:
        """Watch until cancelled. ``apply`` raises SettingsError where it changes nothing."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), _POLL_SECONDS)
            await self.look(apply)

    async def look(self, apply: Callable[[Settings], None]) -> None:
        """Read the file if it has changed or somebody asked for it."""
        state, is_asked = await asyncio.to_thread(_state_of, self._path), self._asked.is_set()
        if state == self._state and not is_asked:
            return
        # Before it is read: what changes meanwhile is seen the next time.
        self._asked.clear()
        self._state = state
        try:
            settings = await asyncio.to_thread(self._load)
            if settings == self._latest and not is_asked:
                return
            apply(settings)
            self._latest = settings
        except SettingsError as error:
            logger.error("The configuration has changed and cannot be used, so the old one stays: %s", error)
        except Exception:
            logger.exception("Reading the configuration again failed; the old one stays")
        else:
            logger.info("The configuration was read again: %d tenants", len(settings.tenants))
            for key in _FIXED:
                value_of = attrgetter(key)
                if value_of(settings) != value_of(self._started_with):
                    logger.warning("%s has changed; that takes effect when the gateway is started anew", key)


def _state_of(path: Path) -> _State:
    """Tell one state of the file from another; it may be a link that is pointed elsewhere."""
    try:
        status = os.stat(path)
    except OSError:
        return _MISSING
    return status.st_mtime_ns, status.st_ino, status.st_size
