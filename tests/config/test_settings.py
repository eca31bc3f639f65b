from dataclasses import replace
from pathlib import Path

import pytest

from prefixgate.config.cache_settings import CacheSettings
from prefixgate.config.limit_settings import TENANT_LIMITS, LimitSettings
from prefixgate.config.settings import (
    SECTIONS,
    Settings,
    SettingsError,
    TenantSettings,
    load_settings,
    setting_fields,
)

DIGEST = "sha256:" + "0123456789abcdef" * 4
OTHER_DIGEST = "sha256:" + "f" * 64


@pytest.fixture
def write(tmp_path: Path) -> "Writer":
    return Writer(tmp_path / "prefixgate.toml")


class Writer:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, text: str) -> Path:
        self.path.write_text(text, encoding="utf-8")
        return self.path


def refusal(path: Path | None, **overrides: str) -> str:
    with pytest.raises(SettingsError) as error:
        load_settings(path, {key.replace("__", "."): value for key, value in overrides.items()})
    return str(error.value)


def test_nothing_said_means_the_defaults(write: Writer) -> None:
    assert load_settings(None, {}) == Settings() == load_settings(write(""), {})


def test_every_default_is_a_value_that_may_be_set(write: Writer) -> None:
    for section in SECTIONS.values():
        for entry, kind in setting_fields(section):
            if entry.default is not None:
                assert kind.read(entry.default) == entry.default


def test_the_file_is_read_and_a_flag_wins_over_it(write: Writer) -> None:
    path = write(
        f"""
        [gateway]
        listen = "0.0.0.0:8050"
        drain_seconds = 5
        [limits]
        max_prompt_bytes = "1MiB"
        [worker]
        model = "witness"
        max_running = 8
        [cache]
        blocks = 64
        poison = true
        [tenants.blue]
        api_keys = ["{DIGEST}"]
        [tenants."red-2.x_y"]
        api_keys = ["{OTHER_DIGEST}"]
        """
    )
    settings = load_settings(path, {"worker.max_running": "4", "cache.poison": "false"})
    assert settings.gateway.listen == "0.0.0.0:8050"
    assert settings.limits.max_prompt_bytes == 1 << 20
    assert settings.gateway.drain_seconds == 5.0
    assert (settings.worker.model, settings.worker.max_running) == ("witness", 4)
    assert settings.cache == CacheSettings(blocks=64, poison=False)
    assert settings.tenants == {"blue": TenantSettings((DIGEST,)), "red-2.x_y": TenantSettings((OTHER_DIGEST,))}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[cach]\nblocks = 4",
            ["cach:", "did you mean cache?", "gateway, worker, cache, limits, routing, tracing, log, tenants"],
        ),
        ("[cache]\nblock = 4", ["cache.block:", "did you mean cache.blocks?", "memory, memory_share, blocks"]),
        ("blocks = 4", ["blocks:", "known here: gateway"]),
        ("cache = 4", ["cache: 4", "must be a table", "[cache]"]),
        ("[worker]\nmax_running = 0", ["worker.max_running: 0", "an integer from 1 to 4,096"]),
        ("[worker]\nmax_running = 4097", ["worker.max_running: 4097", "4,096"]),
        ("[worker]\nmax_running = true", ["worker.max_running: True", "an integer"]),
        ('[worker]\nmax_running = "8"', ["worker.max_running: '8'", "an integer"]),
        ("[worker]\ndrain_seconds = nan", ["worker.drain_seconds: nan", "a number from 0"]),
        ("[worker]\ndrain_seconds = inf", ["worker.drain_seconds: inf"]),
        ('[worker]\ndtype = "int4"', ["worker.dtype: 'int4'", '"auto", "float32", "float16", "bfloat16"']),
        ('[worker]\ndevice = "tpu"', ["worker.device: 'tpu'", '"cuda:N"']),
        ('[worker]\nmodel = ""', ["worker.model: ''"]),
        ('[gateway]\nhttp = "unix:/a"', ["gateway.http: 'unix:/a'", "HOST:PORT"]),
        ('[cache]\nmemory = "512MB"', ["cache.memory: '512MB'", '"512MiB"']),
        ('[cache]\npoison = "true"', ["cache.poison: 'true'", "true or false"]),
        ("[cache]\nblocks = 4\nmemory = 4096", ["cache.memory and cache.blocks (4)", "only one"]),
        ("[cache]\nmemory_share = 0.5\nblocks = 4", ["cache.memory_share (0.5) and cache.blocks", "only one"]),
        ("[cache]\nmemory_share = 1\nmemory = 9", ["cache.memory_share (1.0) and cache.memory", "only one"]),
        ("[cache]\nmemory_share = 90", ["cache.memory_share: 90", "a number from 0.01 to 1"]),
        ('[worker]\nattention = "fa2"', ["worker.attention: 'fa2'", '"vllm_flash_attn", "triton", "cpu", "sdpa"']),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(write: Writer, text: str, words: list[str]) -> None:
    message = refusal(write(text))
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants]\nblue = 1", ["tenants.blue: 1", "table"]),
        ("[tenants.blue]", ["tenants.blue.api_keys", "at least one"]),
        ("[tenants.blue]\napi_keys = []", ["tenants.blue.api_keys: (not shown)", "at least one"]),
        ('[tenants.blue]\napi_keys = ["pg-plain"]', ["tenants.blue.api_keys", "sha256:"]),
        (f'[tenants.blue]\napi_key = ["{DIGEST}"]', ["tenants.blue.api_key:", "did you mean tenants.blue.api_keys?"]),
        (f'[tenants.other]\napi_keys = ["{DIGEST}"]', ["tenants.other", "taken"]),
        (f'[tenants."Blue"]\napi_keys = ["{DIGEST}"]', ["'Blue'", "a-z"]),
        (f'[tenants.{"x" * 65}]\napi_keys = ["{DIGEST}"]', ["x" * 65, "64"]),
        (
            f'[tenants.a]\napi_keys = ["{DIGEST}"]\n[tenants.b]\napi_keys = ["{DIGEST}"]',
            ["tenants.b.api_keys", "tenant a too"],
        ),
        (
            '[tenants.a]\ncertificates = ["dns:x"]\n[tenants.b]\ncertificates = ["dns:x"]',
            ["tenants.b.certificates: dns:x", "tenant a too"],
        ),
        ('[tenants.a]\ncertificates = ["x"]', ["tenants.a.certificates: ['x']", '"subject:", "dns:"']),
        (f'[tenants.a]\napi_keys = ["{DIGEST}"]\nlimits = 4', ["tenants.a.limits: 4", "table"]),
        (
            f'[tenants.a]\napi_keys = ["{DIGEST}"]\n[tenants.a.limits]\nmax_stop = 4',
            ["tenants.a.limits.max_stop:", "did you mean tenants.a.limits.max_stops?"],
        ),
        (
            f'[tenants.a]\napi_keys = ["{DIGEST}"]\nlimits = {{ tokens_per_minute = 0 }}',
            ["tenants.a.limits.tokens_per_minute: 0", "an integer from 1"],
        ),
    ],
)
def test_a_wrong_tenant_is_refused_by_name(write: Writer, text: str, words: list[str]) -> None:
    message = refusal(write(text))
    assert [word for word in words if word not in message] == []


def test_flags_are_checked_like_the_file() -> None:
    assert "worker.max_running: '0'" in refusal(None, worker__max_running="0")
    assert "did you mean worker.max_running?" in refusal(None, worker__max_runing="1")
    assert "works: there is no such setting" in refusal(None, works__max_running="1")
    assert "tenants: there is no such setting" in refusal(None, tenants__blue="1")


def test_what_is_no_settings_file_is_refused_with_its_name(tmp_path: Path, write: Writer) -> None:
    assert "missing.toml: cannot be read: No such file" in refusal(tmp_path / "missing.toml")
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    assert "prefixgate.toml: is not TOML" in refusal(write("[cache"))
    assert "prefixgate.toml: is not TOML" in refusal(write("[cache]\nblocks = 4\nblocks = 5"))
    write.path.write_bytes(b'[worker]\nmodel = "\xff"')
    assert "is not TOML" in refusal(write.path)
    assert "larger than" in refusal(write("#" * (1 << 20) + "\n"))


def test_a_secret_is_shown_neither_in_a_refusal_nor_in_the_settings(write: Writer) -> None:
    secret = "ab" * 16
    message = refusal(write(f'[cache]\nhash_key = "{secret}g"'))
    assert "cache.hash_key: (not shown)" in message
    assert secret not in message
    assert secret not in refusal(write(f'[cache]\nhash_key = "{secret}"\nhash_key_file = "/x"'))
    settings = load_settings(write(f'[cache]\nhash_key = "{secret}"'), {})
    assert settings.cache.hash_key == secret
    assert secret not in repr(settings)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Settings().gateway.listen = "0.0.0.0:1"  # type: ignore[misc]


def test_a_tenants_part_of_the_pool_is_read(write: Writer) -> None:
    path = write(f'[tenants.acme]\napi_keys = ["{DIGEST}"]\nfloor_blocks = 10\ncap_blocks = 20\n')
    tenant = load_settings(path, {}).tenants["acme"]
    assert (tenant.floor_blocks, tenant.cap_blocks) == (10, 20)


def test_a_cap_below_the_floor_is_refused_with_both(write: Writer) -> None:
    path = write(f'[tenants.acme]\napi_keys = ["{DIGEST}"]\nfloor_blocks = 10\ncap_blocks = 9\n')
    assert refusal(path) == "tenants.acme.cap_blocks: 9 is below floor_blocks (10)"


def test_a_tenant_has_the_limits_that_it_names_and_a_bound_on_its_calls_at_the_same_time(write: Writer) -> None:
    path = write(
        f"""
        [limits]
        max_outputs = 4
        [tenants.acme]
        certificates = ["dns:acme.example", "subject:CN=acme,O=Example"]
        [tenants.acme.limits]
        requests_per_minute = 60
        [tenants.zenith]
        api_keys = ["{DIGEST}"]
        """
    )
    settings = load_settings(path, {"limits.max_concurrent_calls": "7"})
    assert settings.limits == LimitSettings(max_outputs=4, max_concurrent_calls=7)
    assert settings.tenants["acme"].limits == replace(TENANT_LIMITS, requests_per_minute=60)
    assert settings.tenants["acme"].certificates == ("dns:acme.example", "subject:CN=acme,O=Example")
    assert settings.tenants["zenith"].limits == TENANT_LIMITS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[gateway]\ntls_cert = "/c"', "gateway.tls_key: is not set, but gateway.tls_cert is; both belong together"),
        ('[worker]\ntls_key = "/k"', "worker.tls_cert: is not set, but worker.tls_key is; both belong together"),
        (
            '[gateway]\ntls_client_ca = "/a"',
            "gateway.tls_client_ca: needs gateway.tls_cert, without which there is no TLS",
        ),
        (
            '[gateway]\nworker_client_cert = "/c"\nworker_client_key = "/k"',
            "gateway.worker_client_cert: needs gateway.worker_ca, without which there is no TLS",
        ),
    ],
)
def test_tls_files_belong_together(write: Writer, text: str, message: str) -> None:
    assert refusal(write(text)) == message


def test_an_api_key_that_was_taken_for_its_digest_is_not_repeated(write: Writer) -> None:
    message = refusal(write('[tenants.blue]\napi_keys = ["pg-the-key-itself"]'))
    assert "tenants.blue.api_keys: (not shown)" in message
    assert "pg-the" not in message
