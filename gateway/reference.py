"""The reference page of settings and flags, made from the settings themselves: ``docs/configuration.md``.

``make reference`` writes the page anew.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from prefixgate.config.flags import flag_name, format_default, setting_keys
from prefixgate.config.hash_key import HASH_KEY_VARIABLE
from prefixgate.config.limit_settings import TENANT_LIMITS
from prefixgate.config.settings import SECTIONS, TenantSettings, setting_fields
from prefixgate.gateway.cli import COMMAND_SETTINGS, COMMANDS
from prefixgate.gateway.commands.connection import API_KEY_VARIABLE

_HEAD = """\
# Configuration

One TOML file holds all settings; `--config FILE` names it. Gateway and worker can read the same one. Every setting is
also a flag, and a flag wins over the file. What the file does not say has the default below. An unknown section or key
is refused with its name and the known ones; a value of the wrong type or out of range with its key, the value, and
what is allowed. The column *of* names the commands that take the flag.

```toml
[worker]
model = "smollm2"

[cache]
memory = "2GiB"

[tenants.search]
api_keys = ["sha256:0f2b..."]
```
"""

_TENANTS = f"""\
## [tenants.NAME]

{(TenantSettings.__doc__ or "").strip()}

A name is 1 to 64 of `a-z`, `0-9`, `-`, `_` and `.`; `other` is taken. Without any tenant there is one, `local`, who
needs no key; the gateway then refuses to listen where other machines could reach it. Clients send the metadata
`authorization: Bearer KEY`, or show a certificate; a tenant has api_keys, certificates or both (`docs/security.md`).
`[tenants.NAME.limits]` has the keys of `[limits]`, each for the tenant alone; what it does not name is not limited
there, but for max_concurrent_calls ({TENANT_LIMITS.max_concurrent_calls}). There are no flags for tenants.
"""

_ENVIRONMENT = f"""\
## Environment variables

| variable | meaning |
|---|---|
| `{HASH_KEY_VARIABLE}` | The hash key in hexadecimal digits, for gateway and worker. Wins over `cache.hash_key` and \
`cache.hash_key_file`. |
| `{API_KEY_VARIABLE}` | The API key that commands send, where `--api-key-file` is not given. |
"""


def page() -> str:
    """Write the page."""
    lines = [_HEAD]
    for name, section in SECTIONS.items():
        lines += [f"## [{name}]", "", (section.__doc__ or "").strip(), "", *_section_table(name, section), ""]
    lines += [_TENANTS, *_tenant_table(), "", *_commands(), "", _ENVIRONMENT]
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _section_table(name: str, section: type[Any]) -> Iterator[str]:
    takes = {command: setting_keys(names) for command, names in COMMAND_SETTINGS.items()}
    yield from ("| key | flag | of | default | meaning | allowed |", "|---|---|---|---|---|---|")
    for entry, kind in setting_fields(section):
        flag, default = flag_name(name, entry.name), format_default(entry, kind)
        commands = ", ".join(command for command, keys in takes.items() if f"{name}.{entry.name}" in keys)
        yield _row(f"`{entry.name}`", f"`{flag}`", commands, f"`{default}`", entry.metadata["help"], kind.allowed)


def _tenant_table() -> Iterator[str]:
    yield from ("| key | meaning | allowed |", "|---|---|---|")
    for entry, kind in setting_fields(TenantSettings):
        yield _row(f"`{entry.name}`", entry.metadata["help"], kind.allowed)


def _commands() -> Iterator[str]:
    yield from ("## Commands", "", "| command | what it does |", "|---|---|")
    for command in COMMANDS:
        yield _row(f"`prefixgate {command.name}`", command.summary)
    yield from ("", "Those that call a gateway take:", "", "| argument | of | meaning |", "|---|---|---|")
    takers: dict[tuple[str, str], list[str]] = {}
    for command in COMMANDS:
        command.add_arguments(parser := argparse.ArgumentParser(command.name, add_help=False))
        for name, action in _arguments(command.name, parser):
            takers.setdefault((_spelling(action), str(action.help)), []).append(name)
    for (spelling, meaning), names in takers.items():
        yield _row(f"`{spelling}`", ", ".join(names), meaning)


def _arguments(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """List the arguments of a command and of its actions. Argparse has no public name for what a parser takes."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner, below in action.choices.items():
                yield from _arguments(f"{name} {inner}", below)
        elif not isinstance(action, argparse._HelpAction):
            yield name, action


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar)
    values = f" {action.metavar}" if action.nargs != 0 and action.metavar else ""
    return ", ".join(action.option_strings) + values


if __name__ == "__main__":
    sys.stdout.write(page())
