"""What is installed: versions, and the parts that the settings need."""

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Iterator

from prefixgate.config.settings import Settings
from prefixgate.config.version import VERSION
from prefixgate.proto.finding import Finding

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)$")


def check_versions() -> Iterator[Finding]:
    """Look at whether what prefixgate needs in any case is there, and new enough."""
    yield Finding("versions", "ok", f"prefixgate {VERSION}, Python {platform.python_version()}, {platform.platform()}")
    try:
        requirements = importlib.metadata.requires("prefixgate") or []
        installed = importlib.metadata.version("prefixgate")
    except importlib.metadata.PackageNotFoundError:
        remedy = f"{sys.executable} -m pip install prefixgate"
        yield Finding("versions", "warning", "prefixgate runs from a folder and is not installed", remedy)
        return
    if installed != VERSION:
        message = f"prefixgate {installed} is installed, and the code that runs is {VERSION}"
        yield Finding("versions", "warning", message, "install it anew")
    # What an extra needs has a condition behind it.
    base = [match for requirement in requirements if (match := _REQUIREMENT.match(requirement))]
    wrong = [finding for match in base if (finding := _version(match[1], match[2]))]
    if wrong:
        yield from wrong
    else:
        there = ", ".join(f"{match[1]} {importlib.metadata.version(match[1])}" for match in base)
        yield Finding("versions", "ok", there)


def _version(name: str, least: str) -> Finding | None:
    remedy = f"{sys.executable} -m pip install '{name}>={least}'"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding("versions", "problem", f"{name} is not installed", remedy)
    if _numbers(version) < _numbers(least):
        return Finding("versions", "problem", f"{name} {version} is older than {least}", remedy)
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def check_tracing(settings: Settings) -> Iterator[Finding]:
    """Look at whether calls can be traced, where they are to be."""
    if not settings.tracing.endpoint:
        return
    parts = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    try:
        missing = [part for part in parts if importlib.util.find_spec(part) is None]
    except ModuleNotFoundError:  # not even what they are part of
        missing = list(parts)
    if missing:
        remedy = "pip install 'prefixgate[otel]', or leave tracing.endpoint empty"
        yield Finding("tracing", "problem", f"tracing.endpoint is set, and {missing[0]} is not installed", remedy)
    else:
        yield Finding("tracing", "ok", f"tracing.endpoint: spans go to {settings.tracing.endpoint}")
