"""Logs: how their lines look."""

from dataclasses import dataclass

from prefixgate.config.kinds import Choice
from prefixgate.config.setting import setting


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What gateway and worker write to standard error."""

    format: str = setting(
        "text",
        Choice(("text", "json")),
        'How a line looks: "text" for people, or "json", one object for each line.',
        flag="--log-format",
    )
