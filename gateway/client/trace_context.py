"""Names the application's own trace to the gateway, where the application traces."""

import sys


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Make the metadata that names the current span of OpenTelemetry; empty without one.

    Only an application that has loaded OpenTelemetry can have one, so that nothing is loaded here for any other. What
    it keeps as *baggage* can be anything, and stays with it.
    """
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
