"""Every metric of the gateway in one table, and the only way to count.

A fault in counting never reaches a call: it is counted itself. Labels come from closed sets, so that no client can make
the page grow.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

logger = logging.getLogger(__name__)

OTHER_TENANT = "other"
"""Label of calls that prove no configured tenant."""

_TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""


CALLS_STARTED = Metric(
    "prefixgate_gateway_calls_started_total", "counter", "Calls with a valid credential.", ("method", "tenant"), "calls"
)
CALLS_ENDED = Metric(
    "prefixgate_gateway_calls_ended_total",
    "counter",
    "Calls that ended, by gRPC status code. CANCELLED are those whose client went away or ran into its deadline.",
    ("method", "tenant", "code"),
    "calls",
)
CALLS_REFUSED = Metric(
    "prefixgate_gateway_calls_refused_total",
    "counter",
    "Calls that never started: without a valid credential, or with bytes that are no request.",
    ("code",),
    "calls",
)
PROMPT_TOKENS = Metric(
    "prefixgate_gateway_prompt_tokens_total",
    "counter",
    "Prompt tokens of calls that the worker ended, well or not.",
    ("tenant",),
    "tokens",
)
CACHED_TOKENS = Metric(
    "prefixgate_gateway_cached_tokens_total",
    "counter",
    "Of these, tokens that came from the worker's cache, by how: block_hit, partial_copy or claimed_tail.",
    ("tenant", "source"),
    "tokens",
)
COMPLETION_TOKENS = Metric(
    "prefixgate_gateway_completion_tokens_total",
    "counter",
    "Tokens handed to clients, counted as they come, so those of calls that failed later too.",
    ("tenant",),
    "tokens",
)
OUTPUTS_FINISHED = Metric(
    "prefixgate_gateway_outputs_finished_total",
    "counter",
    "Outputs that ended, by reason: stop, stop_string, length or time_limit.",
    ("tenant", "reason"),
    "outputs",
)
FIRST_TOKEN = Metric(
    "prefixgate_gateway_time_to_first_token_seconds",
    "histogram",
    "From the call's arrival to its first token, of calls that got one.",
    ("tenant",),
    "seconds",
)
TOKEN_GAP = Metric(
    "prefixgate_gateway_inter_token_seconds",
    "histogram",
    "Between one output's pieces of news, each of one token unless the client reads slowly.",
    ("tenant",),
    "seconds",
)
ENCODING = Metric(
    "prefixgate_gateway_tokenize_seconds",
    "histogram",
    "Rendering and encoding of a prompt, waiting for a free thread included.",
    (),
    "seconds",
)
LIVE_CALLS = Metric("prefixgate_gateway_live_calls", "gauge", "Calls in progress.", (), "calls")
OLDEST_CALL = Metric(
    "prefixgate_gateway_oldest_call_seconds",
    "gauge",
    "Age of the oldest call in progress; 0 without any.",
    (),
    "seconds",
)
WORKER_READY = Metric(
    "prefixgate_gateway_worker_ready", "gauge", "1 while the stream to the worker is open, else 0.", (), "flag"
)
METRICS_ERRORS = Metric(
    "prefixgate_gateway_metrics_errors_total",
    "counter",
    "Faults while counting; none of them hurt a call.",
    (),
    "errors",
)

METRICS: tuple[Metric, ...] = (
    CALLS_STARTED,
    CALLS_ENDED,
    CALLS_REFUSED,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    OUTPUTS_FINISHED,
    FIRST_TOKEN,
    TOKEN_GAP,
    ENCODING,
    LIVE_CALLS,
    OLDEST_CALL,
    WORKER_READY,
    METRICS_ERRORS,
)


class GatewayMetrics:
    """The metrics of one gateway, in a registry of its own."""

    def __init__(
        self,
        registry: CollectorRegistry,
        tenants: Collection[str],
        gauges: Mapping[Metric, Callable[[], float]],
    ) -> None:
        """``gauges`` reads each gauge's value when it is scraped, from another thread."""
        self._tenants = frozenset(tenants)
        self._counters: dict[Metric, Counter] = {}
        self._histograms: dict[Metric, Histogram] = {}
        for metric in METRICS:
            if metric.kind == "counter":
                self._counters[metric] = Counter(metric.name, metric.help, metric.labels, registry=registry)
            elif metric.kind == "histogram":
                self._histograms[metric] = Histogram(
                    metric.name, metric.help, metric.labels, registry=registry, buckets=_TIME_BUCKETS
                )
            else:
                Gauge(metric.name, metric.help, registry=registry).set_function(gauges[metric])

    def count(self, metric: Metric, *labels: str, amount: float = 1) -> None:
        """Add to a counter. A tenant that is not configured counts as ``other``."""
        try:
            counter = self._counters[metric]
            (counter.labels(*self._closed(metric, labels)) if labels else counter).inc(amount)
        except Exception:
            self._count_error(metric)

    def observe(self, metric: Metric, *labels: str, seconds: float) -> None:
        """Add one duration to a histogram."""
        try:
            histogram = self._histograms[metric]
            (histogram.labels(*self._closed(metric, labels)) if labels else histogram).observe(seconds)
        except Exception:
            self._count_error(metric)

    def _closed(self, metric: Metric, labels: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            OTHER_TENANT if name == "tenant" and value not in self._tenants else value
            for name, value in zip(metric.labels, labels, strict=True)
        )

    def _count_error(self, metric: Metric) -> None:
        logger.exception("Counting %s failed", metric.name)
        # Without labels and by 1: the one count that has nothing to fail on.
        self._counters[METRICS_ERRORS].inc()
