"""Settings: every key of the configuration file, what it may be, and how a file and flags become one value.

The dataclasses below are the only list of keys: flags, help and the reference page are made from their metadata.
"""

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

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

T = TypeVar("T")

MAX_SETTINGS_BYTES = 1 << 20
RESERVED_TENANTS = frozenset({"other"})
"""Names that metrics use for themselves."""

DEFAULT_POOL_BYTES = 512 << 20
"""The pool's size where neither ``cache.memory`` nor ``cache.blocks`` is set."""


class SettingsError(Exception):
    """The settings cannot be used; the text names key, value and what is allowed."""


def _setting(default: T, kind: Kind, help: str, *, unit: str = "", secret: bool = False, flag: str = "") -> T:
    metadata = {"kind": kind, "help": help, "unit": unit, "secret": secret, "flag": flag}
    # Typed as its default, not as the Field it is: what the class body says of a setting is then checked.
    return field(default=default, repr=not secret, metadata=metadata)


_SECONDS = Number(0, 86_400)
_HEX_KEY = Text("at least 16 bytes written as hexadecimal digits", r"(?:[0-9A-Fa-f]{2}){16,1024}|")
_DIGEST = Text('"sha256:" and 64 lower-case hexadecimal digits (`prefixgate key` makes one)', r"sha256:[0-9a-f]{64}")
_TENANT_NAME = Text("1 to 64 of a-z, 0-9, -, _ and .", r"[a-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The process that clients call."""

    listen: str = _setting("127.0.0.1:8050", AddressText(), "Where clients call; port 0 takes a free one.")
    http: str = _setting(
        "127.0.0.1:8051", AddressText(unix=False), "Where /metrics is served; port 0 takes a free one."
    )
    workers: tuple[str, ...] = _setting(
        (),
        WorkerAddresses(),
        "Where the workers are. `serve` sets it; a gateway alone needs it. Several serve one model together, and each "
        "call goes to one of them. A name with dns: before it is looked up again and again, as workers come and go.",
        flag="--workers",
    )
    default_max_tokens: int = _setting(
        256, Integer(1, 1 << 20), "Length of an output where the call sets no max_tokens.", unit="tokens"
    )
    max_outputs: int = _setting(16, Integer(1, 128), "Most outputs (n) that one call may ask for.", unit="outputs")
    # Ids travel to the worker in up to 4 bytes each, at most one for each byte of text, in one message of 64 MiB.
    max_prompt_bytes: int = _setting(4 << 20, Size(1, 15 << 20), "Longest prompt text of a call.", unit="bytes")
    drain_seconds: float = _setting(30.0, _SECONDS, "Time that live calls get to finish after SIGTERM.", unit="seconds")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The process that owns a model, its device and its pool."""

    listen: str = _setting(
        "unix:/run/prefixgate/worker.sock", AddressText(), "Where gateways call; port 0 takes a free one."
    )
    http: str = _setting(
        "127.0.0.1:8052", AddressText(unix=False), "Where /metrics is served; port 0 takes a free one."
    )
    model: str = _setting(
        "smollm2",
        Text("a name or a path, not empty", r"[^\x00-\x1f\x7f]+"),
        '"smollm2" (a small chat model that runs on a CPU), "witness" (a built-in diagnostic model without weights; '
        '"witness:eos_every=8,step_ms=5,prefill_us_per_token=20" sets what it imitates), the folder of a Hugging Face '
        "causal language model, or a GGUF file.",
    )
    served_name: str = _setting(
        "",
        Text("at most 128 bytes of text", max_bytes=128),
        "The name by which clients know the model. Empty: the model's own.",
    )
    device: str = _setting(
        "auto",
        Text('"auto", "cpu", "cuda" or "cuda:N"', r"auto|cpu|cuda(?::[0-9]{1,3})?"),
        'Where the model runs; "auto" takes CUDA where there is one.',
    )
    dtype: str = _setting(
        "auto",
        Choice(("auto", "float32", "float16", "bfloat16")),
        'Number format of weights and cache; "auto" is float32 on a CPU, and the model\'s own on CUDA.',
    )
    threads: int = _setting(0, Integer(0, 1024), "CPU threads for the model; 0 leaves it to torch.", unit="threads")
    max_batch_tokens: int = _setting(
        512,
        Integer(2, 1 << 20),
        "Tokens computed in one step, prefill and decode together; more than max_running.",
        unit="tokens",
    )
    max_running: int = _setting(64, Integer(1, 4096), "Sequences that generate at the same time.", unit="sequences")
    max_waiting: int = _setting(
        1024,
        Integer(0, 1 << 20),
        "Calls that may wait; more are refused, the newest ones of the tenant that has most.",
        unit="calls",
    )
    drain_seconds: float = _setting(30.0, _SECONDS, "Time that live calls get to finish after SIGTERM.", unit="seconds")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The pool of blocks, and the secret that names them."""

    memory: int | None = _setting(
        None, Size(1, 1 << 50), "Size of the pool in bytes. Not set, and no blocks either: 512MiB.", unit="bytes"
    )
    blocks: int | None = _setting(
        None, Integer(2, 1 << 31), "Size of the pool in blocks of 16 tokens, instead of memory.", unit="blocks"
    )
    mode: str = _setting(
        "on",
        Choice(("on", "off")),
        '"off" computes every prompt anew: the baseline that shows what the cache is worth.',
        flag="--cache",
    )
    eviction: str = _setting(
        "adaptive",
        Choice(("adaptive", "lru")),
        'Which cached block goes first: "adaptive" keeps what the pool has learned to come back, and is "lru" else.',
    )
    hash_key: str = _setting(
        "",
        _HEX_KEY,
        "Secret that gateway and worker share. A command line can be read by others on the machine: prefer the file, "
        "hash_key_file, or the variable PREFIXGATE_HASH_KEY. `serve` makes a fresh one where none is set.",
        secret=True,
    )
    hash_key_file: str = _setting("", Text("a path"), "File that holds hash_key as hexadecimal digits.")
    poison: bool = _setting(
        False,
        Flag(),
        "Fill fresh blocks with NaN, so that a read of an unwritten slot shows. The witness always does.",
    )


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """One tenant: who may call in its name. Tenants share nothing of the cache."""

    api_keys: tuple[str, ...] = _setting(
        (), TextList(_DIGEST), "Digests of the tenant's API keys, each as `prefixgate key` prints it."
    )
    floor_blocks: int = _setting(
        0,
        Integer(0, 1 << 31),
        "Blocks that are the tenant's own: never evicted for others, and kept free for it while it has fewer. The "
        "floors of all tenants together must leave part of the pool.",
        unit="blocks",
    )
    cap_blocks: int | None = _setting(
        None, Integer(1, 1 << 31), "Most blocks that the tenant holds, cached ones included.", unit="blocks"
    )
    weight: float = _setting(
        1.0,
        Number(0.01, 100),
        "The tenant's part beside others: of computed tokens, of the blocks that no floor covers, and of the queue. A "
        "tenant of weight 2 gets twice as much as one of weight 1 where both want more than there is.",
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """All of the configuration; a default where nothing else is said."""

    gateway: GatewaySettings = GatewaySettings()
    worker: WorkerSettings = WorkerSettings()
    cache: CacheSettings = CacheSettings()
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict)


SECTIONS: Mapping[str, type[Any]] = {"gateway": GatewaySettings, "worker": WorkerSettings, "cache": CacheSettings}
"""The sections whose keys are also flags."""


def setting_fields(section: type[Any]) -> Iterator[tuple[Field[Any], Kind]]:
    """List a section's settings in order, each with its kind."""
    for entry in fields(section):
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
        tenants=_read_tenants(document.get("tenants", {})),
    )
    _check_together(settings)
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
        tenant = TenantSettings(**_read_section(f"tenants.{name}", TenantSettings, table))
        if not tenant.api_keys:
            raise SettingsError(f"tenants.{name}.api_keys: must be set to {_allowed(TenantSettings, 'api_keys')}")
        if tenant.cap_blocks is not None and tenant.cap_blocks < tenant.floor_blocks:
            raise SettingsError(
                f"tenants.{name}.cap_blocks: {tenant.cap_blocks} is below floor_blocks ({tenant.floor_blocks})"
            )
        for digest in tenant.api_keys:
            if digest in owners:
                raise SettingsError(f"tenants.{name}.api_keys: {digest} is a key of tenant {owners[digest]} too")
            owners[digest] = name
        tenants[name] = tenant
    return tenants


def _allowed(section: type[Any], setting: str) -> str:
    kind: Kind = _field("", section, setting).metadata["kind"]
    return kind.allowed


def _check_together(settings: Settings) -> None:
    cache = settings.cache
    if cache.memory is not None and cache.blocks is not None:
        raise SettingsError(f"cache.memory and cache.blocks ({cache.blocks}): only one of both sets the pool's size")
    if cache.hash_key and cache.hash_key_file:
        raise SettingsError("cache.hash_key and cache.hash_key_file: only one of both names the key")
