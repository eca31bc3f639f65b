"""Flags: every setting of the configuration file as an option of the command line."""

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any

from prefixgate.config.kinds import Flag, Kind, Size, format_size
from prefixgate.config.settings import SECTIONS, Settings, load_settings, setting_fields


def flag_name(section: str, setting: str) -> str:
    """Name the flag of a setting: the setting's own name, with its section where two sections have the same.

    A few settings name their flag themselves.
    """
    own = next(entry for entry, _ in setting_fields(SECTIONS[section]) if entry.name == setting).metadata["flag"]
    if own:
        return str(own)
    owners = [
        name for name, kind in SECTIONS.items() if any(entry.name == setting for entry, _ in setting_fields(kind))
    ]
    stem = setting if len(owners) == 1 else f"{section}_{setting}"
    return "--" + stem.replace("_", "-")


def setting_keys(names: Iterable[str]) -> list[str]:
    """List the keys (``section.key``) that some names stand for: a section for all of its keys, a key for itself."""
    keys = []
    for name in names:
        section, _, only = name.partition(".")
        keys += [
            f"{section}.{entry.name}" for entry, _ in setting_fields(SECTIONS[section]) if only in ("", entry.name)
        ]
    return keys


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add ``--config`` and the flags of some sections or single settings (``section.key``).

    Values stay text until ``load_settings`` checks them, so that file and flags are refused in the same words.
    """
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file (TOML); flags win over it")
    for key in setting_keys(names):
        _add_flag(parser, key)


def _add_flag(parser: argparse.ArgumentParser, key: str) -> None:
    section, entry, kind = _setting(key)
    flag, text = flag_name(section, entry.name), f"{entry.metadata['help']} Default: {format_default(entry, kind)}."
    text = text.replace("%", "%%")
    if isinstance(kind, Flag):
        parser.add_argument(flag, dest=key, default=None, action=argparse.BooleanOptionalAction, help=text)
    else:
        metavar = (entry.metadata["unit"] or entry.name.rpartition("_")[2]).upper()
        parser.add_argument(flag, dest=key, default=None, metavar=metavar, help=text)


def format_default(entry: Field[Any], kind: Kind) -> str:
    """Write a setting's default as the configuration file would."""
    default: Any = entry.default
    if default is None:
        return "not set"
    return json.dumps(format_size(default) if isinstance(kind, Size) else default)


def overrides_from(args: argparse.Namespace) -> dict[str, str]:
    """Collect the settings that were given as flags, as ``section.key`` and text."""
    given = {key: value for key, value in vars(args).items() if key.partition(".")[0] in SECTIONS and "." in key}
    return {key: _flag_text(value) for key, value in given.items() if value is not None}


def _flag_text(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else value


def settings_from(args: argparse.Namespace) -> Settings:
    """Load the settings that a parsed command line names. Raises SettingsError."""
    return load_settings(args.config, overrides_from(args))


def arguments_for(overrides: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Write overrides as a command line again: those of some sections or settings, and no secret ones."""
    arguments = []
    for key in setting_keys(names):
        section, entry, kind = _setting(key)
        if key not in overrides or entry.metadata["secret"]:
            continue
        flag = flag_name(section, entry.name)
        if isinstance(kind, Flag):
            arguments.append(flag if overrides[key] == "true" else flag.replace("--", "--no-", 1))
        else:
            # One word, so that a value beginning with a dash is not taken for a flag.
            arguments.append(f"{flag}={overrides[key]}")
    return arguments


def _setting(key: str) -> tuple[str, Field[Any], Kind]:
    section, _, name = key.partition(".")
    entry, kind = next(pair for pair in setting_fields(SECTIONS[section]) if pair[0].name == name)
    return section, entry, kind
