import asyncio
import logging
import os
from pathlib import Path

import pytest

from prefixgate.config.settings import GatewaySettings, Settings, SettingsError, load_settings
from prefixgate.gateway.settings_watch import SettingsWatch


def tenants(*names: str) -> str:
    return "".join(f'[tenants.{name}]\napi_keys = ["sha256:{index:064x}"]\n' for index, name in enumerate(names))


class Watched:
    """A file that is watched, and what was handed on of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.applied: list[Settings] = []
        self.watch = SettingsWatch(path, load_settings(path, {}), lambda: load_settings(path, {}))

    def look(self) -> None:
        asyncio.run(self.watch.look(self.applied.append))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "prefixgate.toml"
    path.write_text(tenants("blue"))
    return path


def test_a_file_is_read_when_it_changes_and_not_before(path: Path) -> None:
    watched = Watched(path)
    watched.look()
    assert watched.applied == []
    path.write_text(tenants("blue", "red"))
    watched.look()
    watched.look()
    assert [set(settings.tenants) for settings in watched.applied] == [{"blue", "red"}]


def test_a_file_that_is_exchanged_for_one_of_the_same_size_and_time_is_another(path: Path, tmp_path: Path) -> None:
    watched = Watched(path)
    before = path.stat()
    other = tmp_path / "other.toml"
    other.write_text(tenants("teal"))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert other.stat().st_size == before.st_size
    other.replace(path)
    watched.look()
    assert [set(settings.tenants) for settings in watched.applied] == [{"teal"}]


def test_a_link_that_is_pointed_elsewhere_is_a_change(path: Path, tmp_path: Path) -> None:
    """As when a volume of Kubernetes is updated."""
    link, other = tmp_path / "link.toml", tmp_path / "other.toml"
    link.symlink_to(path)
    other.write_text(tenants("red"))
    watched = Watched(link)
    fresh = tmp_path / "fresh"
    fresh.symlink_to(other)
    fresh.replace(link)
    watched.look()
    assert [set(settings.tenants) for settings in watched.applied] == [{"red"}]


@pytest.mark.parametrize("text", ["[tenants", "[worker]\nmax_runing = 1", None])
def test_a_file_that_cannot_be_used_is_told_once_and_changes_nothing(
    path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(path)
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    watched.look()
    watched.look()
    assert watched.applied == []
    path.write_text(tenants("red"))
    watched.look()
    assert len(watched.applied) == 1
    assert caplog.text.count("cannot be used, so the old one stays") == 1


def test_what_cannot_be_applied_is_told_and_whatever_fails_ends_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(path)

    def refuse(_: Settings) -> None:
        raise SettingsError("tenants: none are left")

    def fail(_: Settings) -> None:
        raise RuntimeError("odd")

    for apply in (refuse, fail):
        watched.watch.ask()
        asyncio.run(watched.watch.look(apply))
    watched.watch.ask()
    watched.look()
    assert "tenants: none are left" in caplog.text
    assert "failed; the old one stays" in caplog.text
    assert len(watched.applied) == 1


def test_whoever_asks_has_it_read_at_once_also_unchanged(path: Path) -> None:
    watched = Watched(path)

    async def scenario() -> None:
        applied = asyncio.Event()

        def apply(settings: Settings) -> None:
            watched.applied.append(settings)
            applied.set()

        running = asyncio.create_task(watched.watch.run(apply))
        for count in (1, 2):
            watched.watch.ask()
            await asyncio.wait_for(applied.wait(), 60)
            applied.clear()
            assert len(watched.applied) == count
        running.cancel()

    asyncio.run(scenario())


def test_what_needs_a_restart_is_named_and_secrets_are_not(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(path)
    secret, digest = "ab" * 16, "sha256:" + "0f" * 32
    path.write_text(
        f'[gateway]\nlisten = "127.0.0.1:1"\noperator_keys = ["{digest}"]\n[cache]\nhash_key = "{secret}"\n'
        "[worker]\nmax_running = 1\n[limits]\nmax_outputs = 2\n" + tenants("blue")
    )
    with caplog.at_level(logging.INFO):
        watched.look()
    for key in ("gateway.listen", "cache.hash_key"):
        assert f"{key} has changed; that takes effect when the gateway is started anew" in caplog.text
    assert caplog.text.count("started anew") == 2
    assert secret not in caplog.text
    assert watched.applied[0].gateway == GatewaySettings(listen="127.0.0.1:1", operator_keys=(digest,))
    assert watched.applied[0].limits.max_outputs == 2


def test_a_change_between_the_start_and_the_first_look_is_seen(path: Path) -> None:
    before = load_settings(path, {})
    path.write_text(tenants("blue", "red"))
    applied: list[Settings] = []
    asyncio.run(SettingsWatch(path, before, lambda: load_settings(path, {})).look(applied.append))
    assert [set(settings.tenants) for settings in applied] == [{"blue", "red"}]


def test_a_file_that_says_the_same_in_other_words_changes_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(path)
    path.write_text("# the same\n" + tenants("blue"))
    with caplog.at_level(logging.INFO):
        watched.look()
    assert (watched.applied, caplog.text) == ([], "")
