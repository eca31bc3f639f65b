"""Whether calls are traced: opens what the settings name, and loads OpenTelemetry for nothing else."""

from prefixgate.config.settings import SettingsError
from prefixgate.config.tracing_settings import TracingSettings
from prefixgate.gateway.call_trace import UNTRACED, Traces


def open_traces(settings: TracingSettings, instance: str) -> Traces:
    """Make what traces calls; ``instance`` names this process. Raises SettingsError where the extra is not there."""
    if not settings.endpoint:
        return UNTRACED
    try:
        from prefixgate.gateway.call_spans import CallSpans, sampler_of
        from prefixgate.proto.tracing import Tracing, otlp
    except ImportError as error:
        raise SettingsError(
            "tracing.endpoint: tracing needs more than the base install: pip install 'prefixgate[otel]'"
        ) from error
    tracing = Tracing("prefixgate-gateway", instance, sampler_of(settings.sample_ratio), otlp(settings.endpoint))
    return CallSpans(tracing, trust_clients=settings.trust_clients)
