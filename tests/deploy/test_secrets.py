"""The script that makes a deployment's secrets."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from prefixgate.config.settings import load_settings
from prefixgate.gateway.tenants import digest_api_key
from tests.deploy.secrets import PREFIXGATE, run_script
from tests.project.tree import ROOT


def test_the_key_is_the_digests_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    assert str(folder) in run_script(folder)
    key = (folder / "api.key").read_bytes()
    assert load_settings(folder / "settings.toml", {}).tenants["application"].api_keys == (digest_api_key(key),)
    assert len(bytes.fromhex((folder / "hash.key").read_text())) == 32
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    run_script(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run_script(tmp_path, "workers.example")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.items() <= after.items()
    run_script(tmp_path, "workers.example")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == after


def test_a_key_that_could_not_be_made_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    failing = programs / "openssl"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    folder = tmp_path / "secrets"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(programs), prepend=os.pathsep)
        with pytest.raises(subprocess.CalledProcessError):
            run_script(folder)
    run_script(folder)
    assert len(bytes.fromhex((folder / "hash.key").read_text())) == 32


def test_certificates_are_the_authoritys_and_hold_the_name(tmp_path: Path) -> None:
    run_script(tmp_path, "workers.example")
    verify = ["openssl", "verify", "-CAfile", str(tmp_path / "authority.crt"), "-verify_hostname", "workers.example"]
    assert subprocess.run([*verify, str(tmp_path / "worker.crt")], capture_output=True).returncode == 0
    assert subprocess.run([*verify, str(tmp_path / "gateway.crt")], capture_output=True).returncode != 0


def test_the_program_can_be_named_by_a_path_from_here(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "prefixgate").symlink_to(PREFIXGATE)
    environment = {**os.environ, "PREFIXGATE": "bin/prefixgate"}
    subprocess.run([str(ROOT / "deploy" / "secrets.sh"), "made"], check=True, cwd=tmp_path, env=environment)
    assert (tmp_path / "made" / "api.key").read_text().startswith("pg-")
