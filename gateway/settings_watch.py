"""The configuration file while the gateway runs: read again when it changes."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from prefixgate.config.settings import SECTIONS, Settings, SettingsError

logger = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
"""Looked at, not listened to: notifications differ between systems, and miss files behind network mounts."""

_LIVE_SECTIONS = frozenset({"limits"})
"""Sections that take effect at once, as tenants do."""


class SettingsWatch:
    """Hands on new settings. A file that cannot be used is logged, and what was there before stays."""

    def __init__(self, path: Path, settings: Settings, load: Callable[[], Settings]) -> None:
        """``settings`` came from ``load``, which reads ``path``."""
        self._path = path
        self._settings = settings
        self._load = load
        self._state = _state(path)
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
        state = await asyncio.to_thread(_state, self._path)
        if state == self._state and not self._asked.is_set():
            return
        # Before it is read: what changes meanwhile is seen the next time.
        self._asked.clear()
        self._state = state
        try:
            settings = await asyncio.to_thread(self._load)
            apply(settings)
        except SettingsError as error:
            logger.error("The configuration has changed and cannot be used, so the old one stays: %s", error)
        except Exception:
            logger.exception("Reading the configuration again failed; the old one stays")
        else:
            logger.info("The configuration was read again: %d tenants", len(settings.tenants))
            for key in _waiting_for_restart(self._settings, settings):
                logger.warning("%s has changed; that takes effect when the gateway is started anew", key)


def _waiting_for_restart(running: Settings, settings: Settings) -> list[str]:
    """Name the keys whose new values are not in use. Keys of the worker are its own affair."""
    return [
        f"{section}.{entry.name}"
        for section in SECTIONS.keys() - _LIVE_SECTIONS - {"worker"}
        for entry in fields(SECTIONS[section])
        if getattr(getattr(running, section), entry.name) != getattr(getattr(settings, section), entry.name)
    ]


def _state(path: Path) -> tuple[int, int, int] | None:
    """Tell one state of the file from another; it may be a link that is pointed elsewhere."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
