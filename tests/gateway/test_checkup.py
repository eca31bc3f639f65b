"""What is looked at before a start, each thing as it is and as it should not be."""

import importlib.metadata
import importlib.util
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from prefixgate.config.hash_key import HASH_KEY_VARIABLE
from prefixgate.config.settings import Settings, SettingsError, load_settings
from prefixgate.gateway.address_checks import check_exposure, check_listening, check_workers
from prefixgate.gateway.certificate_checks import check_tls
from prefixgate.gateway.checkup import GATEWAY, SERVE, WORKER, checkup
from prefixgate.gateway.file_checks import check_secret_files
from prefixgate.gateway.install_checks import check_tracing, check_versions
from prefixgate.proto.finding import Finding, examine
from tests.certificates import Authority

KEY = "5c" * 32
DIGEST = "sha256:" + "ab" * 32


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HASH_KEY_VARIABLE, raising=False)


def settings(**overrides: str) -> Settings:
    return load_settings(None, {key.replace("__", "."): value for key, value in overrides.items()})


def only(found: Iterator[Finding]) -> Finding:
    (finding,) = found
    # Whoever reads that something is wrong reads what to do.
    assert bool(finding.remedy) is (finding.level != "ok")
    return finding


def levels(found: Iterator[Finding]) -> Mapping[str, list[str]]:
    by_check: dict[str, list[str]] = {}
    for finding in found:
        by_check.setdefault(finding.check, []).append(finding.level)
    return by_check


class TestSecretFiles:
    @pytest.mark.parametrize(
        ("mode", "level", "word"),
        [(0o600, "ok", "owner"), (0o400, "ok", "owner"), (0o640, "warning", "group"), (0o604, "warning", "every user")],
    )
    def test_who_can_read_a_key(self, tmp_path: Path, mode: int, level: str, word: str) -> None:
        path = tmp_path / "key"
        path.write_text(KEY)
        path.chmod(mode)
        finding = only(check_secret_files(settings(cache__hash_key_file=str(path)), None))
        assert finding.level == level
        assert word in finding.message
        assert KEY not in str(finding)
        assert level == "ok" or finding.remedy == f"chmod 600 {path}"

    def test_a_key_that_is_not_there(self, tmp_path: Path) -> None:
        finding = only(check_secret_files(settings(cache__hash_key_file=str(tmp_path / "none")), None))
        assert finding.level == "problem"
        assert "No such file" in finding.message

    def test_a_file_of_settings_with_a_key_in_it(self, tmp_path: Path) -> None:
        path = tmp_path / "settings.toml"
        path.write_text(f'[cache]\nhash_key = "{KEY}"\n')
        path.chmod(0o644)
        finding = only(check_secret_files(load_settings(path, {}), path))
        assert finding.level == "warning"
        assert KEY not in str(finding)

    def test_where_no_file_is_named_there_is_nothing_to_say(self) -> None:
        assert list(check_secret_files(settings(), None)) == []


class TestAddresses:
    def test_a_port_that_is_free_and_one_that_is_not(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            taken = only(check_listening("gateway.http", f"127.0.0.1:{server.getsockname()[1]}"))
        assert (taken.level, only(check_listening("gateway.http", "127.0.0.1:0")).level) == ("problem", "ok")
        assert "another program listens there" in taken.message
        assert "gateway.http" in taken.remedy

    def test_an_address_of_another_machine(self) -> None:
        # Reserved for documentation, so that no machine has it.
        finding = only(check_listening("gateway.listen", "192.0.2.1:8050"))
        assert finding.level == "problem"
        assert "address of this machine" in finding.remedy

    def test_a_socket_that_can_be_made(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        assert only(check_listening("worker.listen", f"unix:{tmp_path}/new/worker.sock")).level == "ok"
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_others_can_write_to(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        finding = only(check_listening("worker.listen", f"unix:{tmp_path}/worker.sock"))
        assert (finding.level, finding.remedy) == ("problem", f"chmod 700 {tmp_path}")

    @pytest.mark.parametrize("is_socket", [True, False])
    def test_a_path_that_is_taken(self, tmp_path: Path, is_socket: bool) -> None:
        tmp_path.chmod(0o700)
        path = tmp_path / "worker.sock"
        with socket.socket(socket.AF_UNIX) as server:
            if is_socket:
                server.bind(str(path))
                server.listen()
            else:
                path.touch()
            found = list(check_listening("worker.listen", f"unix:{path}"))
        assert [finding.level for finding in found] == ["ok", "problem"]
        # What a process left that is gone is no hindrance.
        assert not is_socket or [finding.level for finding in check_listening("worker.listen", f"unix:{path}")] == [
            "ok"
        ]

    @pytest.mark.parametrize(
        ("overrides", "with_tenant", "expected"),
        [
            ({}, False, ["ok"]),
            ({"gateway__listen": "0.0.0.0:8050"}, False, ["problem", "warning"]),
            ({"gateway__listen": "0.0.0.0:8050"}, True, ["ok", "warning"]),
            ({"gateway__listen": "0.0.0.0:8050", "gateway__tls_cert": "/c", "gateway__tls_key": "/k"}, True, ["ok"]),
        ],
    )
    def test_who_can_reach_the_gateway(
        self, tmp_path: Path, overrides: dict[str, str], with_tenant: bool, expected: list[str]
    ) -> None:
        path = tmp_path / "settings.toml"
        path.write_text(f'[tenants.acme]\napi_keys = ["{DIGEST}"]\n' if with_tenant else "")
        loaded = load_settings(path, {key.replace("__", "."): value for key, value in overrides.items()})
        assert [finding.level for finding in check_exposure(loaded)] == expected

    def test_a_certificate_and_its_key(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        certificate, key = authority.issue("server", days=300)
        _, other = authority.server("other")
        assert only(check_tls("gateway.tls", str(certificate), str(key), "")).level == "ok"
        assert only(check_tls("gateway.tls", str(certificate), str(other), "")).level == "problem"
        assert only(check_tls("gateway.tls", str(certificate), str(tmp_path / "none"), "")).level == "problem"
        assert list(check_tls("gateway.tls", "", "", "")) == []

    @pytest.mark.parametrize(("days", "level", "words"), [(0, "problem", "expired"), (1, "warning", "ends in")])
    def test_a_certificate_that_has_ended_or_is_about_to(
        self, tmp_path: Path, days: int, level: str, words: str
    ) -> None:
        certificate, key = Authority(tmp_path).issue("server", days=days)
        finding = only(check_tls("worker.tls", str(certificate), str(key), ""))
        assert (finding.level, words in finding.message) == (level, True)

    def test_workers(self, tmp_path: Path) -> None:
        assert only(check_workers(())).level == "problem"
        with socket.create_server(("127.0.0.1", 0)) as server:
            there = f"127.0.0.1:{server.getsockname()[1]}"
            found = list(check_workers((there, f"unix:{tmp_path}/none")))
        # One that is not there may come later.
        assert [finding.level for finding in found] == ["ok", "warning"]


class TestInstalled:
    def test_what_is_needed_is_there(self) -> None:
        assert {finding.level for finding in check_versions()} == {"ok"}

    def test_a_version_that_is_too_old_and_one_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = importlib.metadata.version

        def version(name: str) -> str:
            if name == "protobuf":
                return "3.20.3"
            if name == "xxhash":
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        problems = [finding for finding in check_versions() if finding.level == "problem"]
        assert [finding.message.split()[0] for finding in problems] == ["protobuf", "xxhash"]
        assert all("pip install" in finding.remedy for finding in problems)

    def test_tracing_needs_its_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert list(check_tracing(settings())) == []
        traced = settings(tracing__endpoint="http://127.0.0.1:4318/v1/traces")
        assert only(check_tracing(traced)).level == "ok"
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        finding = only(check_tracing(traced))
        assert (finding.level, "prefixgate[otel]" in finding.remedy) == ("problem", True)


class TestCheckup:
    def of(self, process: str, load: Callable[[], Settings] = settings, **options: Any) -> Mapping[str, list[str]]:
        return levels(checkup(process, load, options.pop("config", None), options))

    def test_each_process_has_what_concerns_it(self, tmp_path: Path) -> None:
        free = {
            "gateway__listen": "127.0.0.1:0",
            "gateway__http": "127.0.0.1:0",
            "gateway__workers": f"unix:{tmp_path}/w",
        }
        found = self.of(GATEWAY, lambda: settings(**free))
        assert found == {
            "versions": ["ok", "ok"],
            "settings": ["ok"],
            "hash key": ["problem"],
            "access": ["ok"],
            "addresses": ["ok", "ok"],
            "workers": ["warning"],
        }

    def test_a_worker_is_looked_at_by_a_program_of_its_own(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o700)
        overrides = {
            "worker.listen": f"unix:{tmp_path}/w",
            "worker.http": "127.0.0.1:0",
            "worker.model": "witness",
            "worker.device": "cpu",
            "cache.hash_key": KEY,
        }
        found = self.of(WORKER, lambda: load_settings(None, overrides), **overrides)
        assert found["hash key"] == ["ok"]
        assert found["model"] == ["ok"]
        assert found["memory"] == ["ok"]
        assert "access" not in found

    def test_serve_makes_its_own_key(self) -> None:
        finding = next(finding for finding in checkup(SERVE, settings, None, {}) if finding.check == "hash key")
        assert finding.level == "ok"

    def test_settings_that_cannot_be_used_are_a_finding(self) -> None:
        def load() -> Settings:
            raise SettingsError("worker.threads: 'x' is not allowed")

        assert self.of(GATEWAY, load)["settings"] == ["problem"]

    def test_a_worker_that_cannot_be_loaded_is_a_finding(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        broken = tmp_path / "torch.py"
        broken.write_text("raise ImportError('libcudart is not there')")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        found = [finding for finding in checkup(WORKER, settings, None, {}) if finding.check == "worker"]
        assert [finding.level for finding in found] == ["problem"]
        assert "libcudart is not there" in found[0].message

    def test_a_check_that_fails_keeps_no_other_from_running(self) -> None:
        def fail() -> Iterator[Finding]:
            yield Finding("one", "ok", "fine")
            raise RuntimeError("unforeseen")

        found = list(examine([("one", fail), ("two", lambda: iter([Finding("two", "ok", "fine")]))]))
        assert [(finding.check, finding.level) for finding in found] == [
            ("one", "ok"),
            ("one", "problem"),
            ("two", "ok"),
        ]
        assert "unforeseen" in found[1].message
        assert json.dumps([finding.as_dict() for finding in found])
