import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest

from prefixgate.config.flags import (
    add_flags,
    arguments_for,
    flag_name,
    format_default,
    overrides_from,
    setting_keys,
    settings_from,
)
from prefixgate.config.settings import SECTIONS, Settings, SettingsError, load_settings, setting_fields

ALL = list(SECTIONS)


def parse(arguments: Sequence[str], names: Sequence[str] = ALL) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, names)
    return parser.parse_args(arguments)


def test_a_flag_bears_its_section_only_where_two_sections_have_its_name() -> None:
    names = [flag_name(*key.split(".")) for key in setting_keys(ALL)]
    assert len(set(names)) == len(names)
    assert {"--gateway-listen", "--worker-listen", "--gateway-http", "--worker-http"} <= set(names)
    assert {"--gateway-drain-seconds", "--worker-drain-seconds", "--model", "--max-running", "--blocks"} <= set(names)


def test_no_flag_given_changes_nothing() -> None:
    args = parse([])
    assert overrides_from(args) == {}
    assert settings_from(args) == Settings()


def test_every_setting_can_be_given_as_a_flag() -> None:
    values = {
        "gateway.listen": "127.0.0.1:1",
        "gateway.http": "127.0.0.1:2",
        "gateway.operator_keys": "sha256:" + "0f" * 32,
        "gateway.workers": "unix:/a",
        "gateway.default_max_tokens": "3",
        "limits.max_outputs": "4",
        "limits.max_prompt_bytes": "5KiB",
        "gateway.drain_seconds": "6.5",
        "gateway.metrics_seconds": "0.5",
        "worker.metrics_seconds": "0.75",
        "gateway.tls_cert": "/c",
        "gateway.tls_key": "/d",
        "gateway.tls_client_ca": "/e",
        "gateway.worker_ca": "/f",
        "gateway.worker_client_cert": "/g",
        "gateway.worker_client_key": "/h",
        "gateway.worker_tls_name": "worker.example",
        "limits.requests_per_minute": "13",
        "limits.tokens_per_minute": "14",
        "limits.max_concurrent_calls": "15",
        "gateway.max_message_bytes": "8MiB",
        "gateway.insecure_workers": "true",
        "limits.max_prompt_tokens": "17",
        "limits.max_output_tokens": "18",
        "limits.max_stops": "3",
        "limits.max_logit_biases": "0",
        "routing.miss_weight": "1.5",
        "routing.eviction_weight": "0",
        "routing.call_seconds": "0.25",
        "routing.prefill_tokens_per_second": "900",
        "tracing.endpoint": "http://127.0.0.1:4318/v1/traces",
        "tracing.sample_ratio": "0.5",
        "tracing.trust_clients": "true",
        "log.format": "json",
        "worker.tls_cert": "/i",
        "worker.tls_key": "/j",
        "worker.tls_client_ca": "/k",
        "worker.listen": "unix:/b",
        "worker.http": "127.0.0.1:3",
        "worker.model": "-odd",
        "worker.served_name": "name",
        "worker.device": "cuda:1",
        "worker.dtype": "float16",
        "worker.attention": "sdpa",
        "worker.cuda_graphs": "false",
        "worker.threads": "7",
        "worker.max_batch_tokens": "8",
        "worker.max_running": "9",
        "worker.max_waiting": "10",
        "worker.max_step_seconds": "3",
        "worker.insecure_listen": "true",
        "worker.drain_seconds": "11",
        "cache.memory": "1MiB",
        "cache.memory_share": "0.5",
        "cache.mode": "off",
        "cache.eviction": "lru",
        "cache.hash_key": "ab" * 16,
        "cache.hash_key_file": "",
        "cache.pin_share": "0.25",
        "cache.poison": "true",
        "cache.blocks": "12",
    }
    assert set(values) == set(setting_keys(ALL))
    flags = {key: flag_name(*key.split(".")) for key in values}
    switches = {"true": "--", "false": "--no-"}
    given = [
        flags[key].replace("--", switches[value], 1) if value in switches else f"{flags[key]}={value}"
        for key, value in values.items()
    ]
    overrides = overrides_from(parse(given))
    assert overrides == values
    del overrides["cache.memory"], overrides["cache.memory_share"]
    settings = load_settings(None, overrides)
    defaults = Settings()
    for key in overrides:
        section, _, name = key.partition(".")
        changed = getattr(getattr(settings, section), name)
        assert changed != getattr(getattr(defaults, section), name) or key == "cache.hash_key_file"


def test_only_the_settings_asked_for_are_taken() -> None:
    keys = setting_keys(["gateway", "cache.hash_key_file"])
    assert keys == [*setting_keys(["gateway"]), "cache.hash_key_file"]
    assert overrides_from(parse(["--hash-key-file", "x"], ["cache.hash_key_file"])) == {"cache.hash_key_file": "x"}
    with pytest.raises(SystemExit):
        parse(["--blocks", "4"], ["gateway", "cache.hash_key_file"])


def test_overrides_become_the_same_overrides_again_but_for_secrets() -> None:
    overrides = {"cache.poison": "false", "worker.model": "-odd --model", "cache.blocks": "4", "gateway.workers": "a:1"}
    arguments = arguments_for({**overrides, "cache.hash_key": "ab" * 16}, ALL)
    assert overrides_from(parse(arguments)) == overrides
    assert arguments_for(overrides, ["cache"]) == ["--blocks=4", "--no-poison"]
    assert overrides_from(parse(arguments_for({"cache.poison": "true"}, ALL))) == {"cache.poison": "true"}


def test_the_file_named_by_the_command_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[cache]\nblocks = 4\n[worker]\nthreads = 2")
    settings = settings_from(parse(["--config", str(path), "--blocks", "8"]))
    assert (settings.cache.blocks, settings.worker.threads) == (8, 2)
    with pytest.raises(SettingsError, match=r"cache\.blocks: '1' is not allowed"):
        settings_from(parse(["--config", str(path), "--blocks", "1"]))


def test_the_help_tells_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for section in SECTIONS.values():
        for entry, kind in setting_fields(section):
            assert f"Default: {format_default(entry, kind)}." in text
