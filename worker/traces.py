"""Whether calls are traced: opens what the settings name, and loads OpenTelemetry for nothing else."""

from typing import Protocol

from prefixgate.config.settings import SettingsError
from prefixgate.config.tracing_settings import TracingSettings
from prefixgate.worker.request import End, Request


class Traces(Protocol):
    """What traces calls. Lives on the event loop."""

    def call_ended(self, request: Request, end: End) -> None:
        """Trace a call that the engine has ended. Does not raise."""

    def close(self, seconds: float) -> None:
        """Send what is left, and give up after so long. Blocks."""


class Untraced:
    """Traces nothing."""

    def call_ended(self, request: Request, end: End) -> None:
        """Do nothing."""

    def close(self, seconds: float) -> None:
        """Do nothing."""


def open_traces(settings: TracingSettings, instance: str) -> Traces:
    """Make what traces calls; ``instance`` names this process. Raises SettingsError where the extra is not there."""
    if not settings.endpoint:
        return Untraced()
    try:
        from prefixgate.proto.tracing import Tracing, otlp
        from prefixgate.worker.call_spans import SAMPLER, CallSpans
    except ImportError as error:
        raise SettingsError(
            "tracing.endpoint: tracing needs more than the base install: pip install 'prefixgate[otel]'"
        ) from error
    return CallSpans(Tracing("prefixgate-worker", instance, SAMPLER, otlp(settings.endpoint)))
