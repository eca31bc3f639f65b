"""Settings: every key of the configuration file, what it may be, and how a file and flags become one value.

The dataclasses below are the only list of keys: flags, help and the reference page are made from their metadata.
"""

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from prefixgate.config.cache_settings import CacheSettings
from prefixgate.config.contradictions import contradictions
from prefixgate.config.kinds import (
    AddressText,
    Choice,
    Flag,
    Integer,
    Kind,
    NotAllowedError,
    Number,
    Size,
    Text,
    TextList,
    WorkerAddresses,
)
from prefixgate.config.limit_settings import MAX_MESSAGE_BYTES, TENANT_LIMITS, LimitSettings
from prefixgate.config.log_settings import LogSettings
from prefixgate.config.routing_settings import RoutingSettings
from prefixgate.config.setting import setting
from prefixgate.config.tracing_settings import TracingSettings

MAX_SETTINGS_BYTES = 1 << 20
RESERVED_TENANTS = frozenset({"other"})
"""Names that metrics use for themselves."""


class SettingsError(Exception):
    """The settings cannot be used; the text names key, value and what is allowed."""


_SECONDS = Number(0, 86_400)
_DIGEST = Text('"sha256:" and 64 lower-case hexadecimal digits (`prefixgate key` makes one)', r"sha256:[0-9a-f]{64}")
_PATH = Text("a path")
_CERTIFICATE = Text(
    '"subject:", "dns:", "uri:" or "email:" and the name as it stands in the certificate',
    r"(?:subject|dns|uri|email):[^\x00-\x1f\x7f]+",
    max_bytes=1024,
)
_TENANT_NAME = Text("1 to 64 of a-z, 0-9, -, _ and .", r"[a-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The process that clients call."""

    listen: str = setting("127.0.0.1:8050", AddressText(), "Where clients call; port 0 takes a free one.")
    http: str = setting(
        "127.0.0.1:8051",
        AddressText(unix=False),
        "Where /metrics and the status page are served; port 0 takes a free one.",
    )
    operator_keys: tuple[str, ...] | None = setting(
        None,
        TextList(_DIGEST),
        "Digests of the keys that open the status page, each as `prefixgate key` prints it. Not set: the page is for "
        "browsers on this machine alone, and only while gateway.http is on a loopback address.",
        secret=True,
    )
    workers: tuple[str, ...] = setting(
        (),
        WorkerAddresses(),
        "Where the workers are. `serve` sets it; a gateway alone needs it. Several serve one model together, and each "
        "call goes to one of them. A name with dns: before it is looked up again and again, as workers come and go.",
    )
    metrics_seconds: float = setting(
        0.25, _SECONDS, "How often the page of metrics is made; 0 makes it anew for each scrape.", unit="seconds"
    )
    default_max_tokens: int = setting(
        256, Integer(1, 1 << 20), "Length of an output where the call sets no max_tokens.", unit="tokens"
    )
    drain_seconds: float = setting(30.0, _SECONDS, "Time that live calls get to finish after SIGTERM.", unit="seconds")
    tls_cert: str = setting(
        "", _PATH, "File with the server's certificate chain, PEM. Set with tls_key; calls then need TLS."
    )
    tls_key: str = setting("", _PATH, "File with the private key of tls_cert, PEM, not encrypted.")
    tls_client_ca: str = setting(
        "",
        _PATH,
        "File with the authorities, PEM, one of which must have signed the certificate that each client shows.",
    )
    max_message_bytes: int = setting(
        MAX_MESSAGE_BYTES,
        Size(1 << 16, MAX_MESSAGE_BYTES),
        "Longest message that a client may send. Whatever it is, the hop to the workers takes every message that came "
        "in here.",
        unit="bytes",
    )
    insecure_workers: bool = setting(
        False,
        Flag(),
        "Reach workers on other machines without TLS too. Prompts, answers and the proof that makes a gateway one then "
        "travel in the clear: for networks that encrypt by themselves.",
    )
    worker_ca: str = setting(
        "",
        _PATH,
        "File with the authorities, PEM, that sign the workers' certificates. Set: workers are reached by TLS.",
    )
    worker_client_cert: str = setting(
        "", _PATH, "File with the certificate chain, PEM, that this gateway shows to its workers."
    )
    worker_client_key: str = setting("", _PATH, "File with the private key of worker_client_cert, PEM, not encrypted.")
    worker_tls_name: str = setting(
        "",
        Text("a host name", r"[A-Za-z0-9.-]*"),
        "Name that the workers' certificates hold, where it is not the host in gateway.workers, as with dns: names.",
    )


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The process that owns a model, its device and its pool."""

    listen: str = setting(
        "unix:/run/prefixgate/worker.sock", AddressText(), "Where gateways call; port 0 takes a free one."
    )
    http: str = setting("127.0.0.1:8052", AddressText(unix=False), "Where /metrics is served; port 0 takes a free one.")
    metrics_seconds: float = setting(
        0.25, _SECONDS, "How often the page of metrics is made; 0 makes it anew for each scrape.", unit="seconds"
    )
    model: str = setting(
        "smollm2",
        Text("a name or a path, not empty", r"[^\x00-\x1f\x7f]+"),
        '"smollm2" (a small chat model that runs on a CPU), "witness" (a built-in diagnostic model without weights; '
        '"witness:eos_every=8,step_ms=5,prefill_us_per_token=20" sets what it imitates), the folder of a Hugging Face '
        "causal language model, or a GGUF file.",
    )
    served_name: str = setting(
        "",
        Text("at most 128 bytes of text", max_bytes=128),
        "The name by which clients know the model. Empty: the model's own.",
    )
    device: str = setting(
        "auto",
        Text('"auto", "cpu", "cuda" or "cuda:N"', r"auto|cpu|cuda(?::[0-9]{1,3})?"),
        'Where the model runs; "auto" takes CUDA where there is one.',
    )
    dtype: str = setting(
        "auto",
        Choice(("auto", "float32", "float16", "bfloat16")),
        'Number format of weights and cache; "auto" is float32 on a CPU, and the model\'s own on CUDA.',
    )
    attention: str = setting(
        "auto",
        Choice(("auto", "vllm_flash_attn", "triton", "cpu", "sdpa")),
        'What computes attention over the pool; "auto" takes the first of these that works for the model on its '
        "device, and says why each before it does not. One that is named and does not work is refused.",
    )
    cuda_graphs: bool = setting(
        True,
        Flag(),
        "Whether decode steps are recorded as CUDA graphs, where device and attention can; they then start at once "
        "instead of kernel by kernel, and take some memory beside the pool.",
    )
    threads: int = setting(0, Integer(0, 1024), "CPU threads for the model; 0 leaves it to torch.", unit="threads")
    max_batch_tokens: int = setting(
        512,
        Integer(2, 1 << 20),
        "Tokens computed in one step, prefill and decode together; more than max_running.",
        unit="tokens",
    )
    max_running: int = setting(64, Integer(1, 4096), "Sequences that generate at the same time.", unit="sequences")
    max_waiting: int = setting(
        1024,
        Integer(0, 1 << 20),
        "Calls that may wait; more are refused, the newest ones of the tenant that has most.",
        unit="calls",
    )
    max_step_seconds: float = setting(
        120.0,
        _SECONDS,
        "Time that one step may take. One that takes longer is held to hang: its calls end, and so does the process, "
        "for whatever started it to start it again. More than the longest step of a slow device; 0 is no bound.",
        unit="seconds",
    )
    drain_seconds: float = setting(30.0, _SECONDS, "Time that live calls get to finish after SIGTERM.", unit="seconds")
    insecure_listen: bool = setting(
        False,
        Flag(),
        "Listen where other machines reach it without TLS too; as gateway.insecure_workers.",
    )
    tls_cert: str = setting(
        "", _PATH, "File with the server's certificate chain, PEM. Set with tls_key; calls then need TLS."
    )
    tls_key: str = setting("", _PATH, "File with the private key of tls_cert, PEM, not encrypted.")
    tls_client_ca: str = setting(
        "",
        _PATH,
        "File with the authorities, PEM, one of which must have signed the certificate that each gateway shows.",
    )


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """One tenant: who may call in its name. Tenants share nothing of the cache."""

    api_keys: tuple[str, ...] = setting(
        (),
        TextList(_DIGEST),
        "Digests of the tenant's API keys, each as `prefixgate key` prints it.",
        secret=True,
    )
    certificates: tuple[str, ...] = setting(
        (),
        TextList(_CERTIFICATE),
        'Names of client certificates that are the tenant\'s, such as "dns:search.example" or '
        '"subject:CN=search,O=Example" (as `openssl x509 -subject -nameopt RFC2253` writes it), compared as a whole.',
    )
    floor_blocks: int = setting(
        0,
        Integer(0, 1 << 31),
        "Blocks that are the tenant's own: never evicted for others, and kept free for it while it has fewer. The "
        "floors of all tenants together must leave part of the pool.",
        unit="blocks",
    )
    cap_blocks: int | None = setting(
        None, Integer(1, 1 << 31), "Most blocks that the tenant holds, cached ones included.", unit="blocks"
    )
    pin_cap_blocks: int | None = setting(
        None,
        Integer(0, 1 << 31),
        "Most blocks that the tenant's pins hold. Not set: as many as the pins of all together (cache.pin_share), so "
        "that who comes first can have all of them.",
        unit="blocks",
    )
    weight: float = setting(
        1.0,
        Number(0.01, 100),
        "The tenant's part beside others: of computed tokens, of the blocks that no floor covers, and of the queue. A "
        "tenant of weight 2 gets twice as much as one of weight 1 where both want more than there is.",
    )
    limits: LimitSettings = TENANT_LIMITS
    """A table of its own, with the keys of [limits]."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All of the configuration; a default where nothing else is said."""

    gateway: GatewaySettings = GatewaySettings()
    worker: WorkerSettings = WorkerSettings()
    cache: CacheSettings = field(default_factory=CacheSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    tracing: TracingSettings = field(default_factory=TracingSettings)
    log: LogSettings = field(default_factory=LogSettings)
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict)


SECTIONS: Mapping[str, type[Any]] = {
    "gateway": GatewaySettings,
    "worker": WorkerSettings,
    "cache": CacheSettings,
    "limits": LimitSettings,
    "routing": RoutingSettings,
    "tracing": TracingSettings,
    "log": LogSettings,
}
"""The sections whose keys are also flags."""


def setting_fields(section: type[Any]) -> Iterator[tuple[Field[Any], Kind]]:
    """List a section's settings in order, each with its kind."""
    for entry in fields(section):
        if "kind" in entry.metadata:
            yield entry, entry.metadata["kind"]


def load_settings(path: Path | None, overrides: Mapping[str, str]) -> Settings:
    """Read the configuration file, if any, and lay the overrides over it.

    ``overrides`` maps ``section.key`` to a flag's text; it wins over the file. Raises SettingsError for a file that
    cannot be read, and for unknown sections and keys, wrong types, and values out of bounds.
    """
    document = _read_toml(path) if path is not None else {}
    _known("", document, [*SECTIONS, "tenants"])
    values = {name: _read_section(name, section, document.get(name, {})) for name, section in SECTIONS.items()}
    for key, text in overrides.items():
        name, _, setting = key.partition(".")
        _known("", [name], SECTIONS)
        values[name][setting] = _checked(key, _field(name, SECTIONS[name], setting), text, from_flag=True)
    settings = Settings(
        gateway=GatewaySettings(**values["gateway"]),
        worker=WorkerSettings(**values["worker"]),
        cache=CacheSettings(**values["cache"]),
        limits=LimitSettings(**values["limits"]),
        routing=RoutingSettings(**values["routing"]),
        tracing=TracingSettings(**values["tracing"]),
        log=LogSettings(**values["log"]),
        tenants=_read_tenants(document.get("tenants", {})),
    )
    for contradiction in contradictions(settings):
        raise SettingsError(contradiction)
    return settings


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_SETTINGS_BYTES + 1)
        if len(text) > MAX_SETTINGS_BYTES:
            raise SettingsError(f"{path}: the file is larger than {MAX_SETTINGS_BYTES:,} bytes")
        return tomllib.loads(text.decode())
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # of TOML and of UTF-8
        raise SettingsError(f"{path}: is not TOML: {error}") from error


def _known(prefix: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    for name in names:
        if name in allowed:
            continue
        near = difflib.get_close_matches(name, allowed, n=1)
        hint = f" (did you mean {prefix}{near[0]}?)" if near else ""
        raise SettingsError(f"{prefix}{name}: there is no such setting{hint}; known here: {', '.join(allowed)}")


def _field(name: str, section: type[Any], setting: str) -> Field[Any]:
    known = {entry.name: entry for entry in fields(section)}
    _known(f"{name}.", [setting], known)
    return known[setting]


def _checked(key: str, entry: Field[Any], value: object, *, from_flag: bool = False) -> object:
    kind: Kind = entry.metadata["kind"]
    try:
        return kind.read_text(str(value)) if from_flag else kind.read(value)
    except NotAllowedError:
        shown = "(not shown)" if entry.metadata["secret"] else repr(value)
        raise SettingsError(f"{key}: {shown} is not allowed; it must be {kind.allowed}") from None


def _table(key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SettingsError(f"{key}: {value!r} is not allowed; it must be a table, written [{key}]")
    return value


def _read_section(name: str, section: type[Any], value: object) -> dict[str, Any]:
    table = _table(name, value)
    return {setting: _checked(f"{name}.{setting}", _field(name, section, setting), table[setting]) for setting in table}


def _read_tenants(value: object) -> dict[str, TenantSettings]:
    tenants: dict[str, TenantSettings] = {}
    owners: dict[str, str] = {}
    for name, table in _table("tenants", value).items():
        try:
            _TENANT_NAME.read(name)
        except NotAllowedError:
            raise SettingsError(f"tenants.{name!r}: a tenant's name must be {_TENANT_NAME.allowed}") from None
        if name in RESERVED_TENANTS:
            raise SettingsError(f"tenants.{name}: this name is taken by the metrics; choose another")
        own = dict(_table(f"tenants.{name}", table))
        limits = _read_section(f"tenants.{name}.limits", LimitSettings, own.pop("limits", {}))
        tenant = TenantSettings(
            **_read_section(f"tenants.{name}", TenantSettings, own), limits=replace(TENANT_LIMITS, **limits)
        )
        if not (tenant.api_keys or tenant.certificates):
            raise SettingsError(
                f"tenants.{name}.api_keys: must be set to {_allowed(TenantSettings, 'api_keys')}, or certificates to "
                f"{_allowed(TenantSettings, 'certificates')}"
            )
        if tenant.cap_blocks is not None and tenant.cap_blocks < tenant.floor_blocks:
            raise SettingsError(
                f"tenants.{name}.cap_blocks: {tenant.cap_blocks} is below floor_blocks ({tenant.floor_blocks})"
            )
        for setting_name, credentials in (("api_keys", tenant.api_keys), ("certificates", tenant.certificates)):
            for credential in credentials:
                if credential in owners:
                    raise SettingsError(
                        f"tenants.{name}.{setting_name}: {credential} is one of tenant {owners[credential]} too"
                    )
                owners[credential] = name
        tenants[name] = tenant
    return tenants


def _allowed(section: type[Any], setting: str) -> str:
    kind: Kind = _field("", section, setting).metadata["kind"]
    return kind.allowed
