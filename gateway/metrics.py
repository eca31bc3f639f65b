"""Every metric of the gateway in one table, and the only way to count.

A fault in counting never reaches a call: it is counted itself. Labels come from closed sets, so that no client can make
the page grow.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prefixgate.proto.exposition import Family, Histogram, Kind, Samples, Value
from prefixgate.proto.metrics_page import MAX_TENANT_LABELS

logger = logging.getLogger(__name__)

OTHER_TENANT = "other"
"""Label of calls that prove no configured tenant."""

_TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, eq=False, slots=True)
class Metric:
    """One line of the table."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    tenant_at: int | None = field(init=False)
    """Where ``tenant`` stands among the labels."""

    def __post_init__(self) -> None:
        # The way to set what is made of a frozen object's other fields.
        object.__setattr__(self, "tenant_at", self.labels.index("tenant") if "tenant" in self.labels else None)


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
LIMIT_REFUSALS = Metric(
    "prefixgate_gateway_limit_refusals_total",
    "counter",
    "Calls that were refused for one of the operator's limits, by the limit's name.",
    ("tenant", "limit"),
    "refusals",
)
CHARGED_TOKENS = Metric(
    "prefixgate_gateway_charged_tokens_total",
    "counter",
    "Tokens that calls were charged at their end: of the prompt those that were not cached, and the generated ones.",
    ("tenant",),
    "tokens",
)
PROMPT_TOKENS = Metric(
    "prefixgate_gateway_prompt_tokens_total",
    "counter",
    "Prompt tokens of calls that a worker ended, well or not; of one that it lost before the first token none.",
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
QUERIED_TOKENS = Metric(
    "prefixgate_gateway_queried_tokens_total",
    "counter",
    "Prompt tokens that calls looked up in the cache: of those that ended well, or failed after their first token.",
    ("tenant",),
    "tokens",
)
REUSABLE_TOKENS = Metric(
    "prefixgate_gateway_reusable_tokens_total",
    "counter",
    "Of these, tokens that some worker was known to hold, or to hold soon, when the call was placed.",
    ("tenant",),
    "tokens",
)
PREDICTED_TOKENS = Metric(
    "prefixgate_gateway_predicted_tokens_total",
    "counter",
    "Of these, tokens that the worker which got the call was known to hold, or to hold soon.",
    ("tenant",),
    "tokens",
)
DELIVERED_TOKENS = Metric(
    "prefixgate_gateway_delivered_tokens_total",
    "counter",
    "Of the tokens looked up, those that came from the worker's cache in the end.",
    ("tenant",),
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
    "Between one output's pieces of news, each of one token unless the gateway is behind.",
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
WAITING_CALLS = Metric(
    "prefixgate_gateway_waiting_calls",
    "gauge",
    "Calls in progress that wait for their first token.",
    (),
    "calls",
)
LONGEST_WAIT = Metric(
    "prefixgate_gateway_longest_wait_seconds",
    "gauge",
    "Age of the oldest of these; 0 without any. Above 1 the gateway calls itself busy.",
    (),
    "seconds",
)
WORKER_READY = Metric(
    "prefixgate_gateway_worker_ready", "gauge", "1 while there is a worker that takes calls, else 0.", (), "flag"
)
WORKER_UP = Metric(
    "prefixgate_gateway_worker_up",
    "gauge",
    "1 while calls go to the worker as to any other: connected, answering, not draining, not left alone for faults.",
    ("worker",),
    "flag",
)
WORKER_LIVE_CALLS = Metric(
    "prefixgate_gateway_worker_live_calls", "gauge", "This gateway's calls in the worker's hands.", ("worker",), "calls"
)
WORKER_CALLS = Metric(
    "prefixgate_gateway_worker_calls_total", "counter", "Calls that were sent to the worker.", ("worker",), "calls"
)
WORKER_RETRIED_CALLS = Metric(
    "prefixgate_gateway_worker_retried_calls_total",
    "counter",
    "Of these, calls that another worker had dropped before it answered.",
    ("worker",),
    "calls",
)
WORKER_EJECTIONS = Metric(
    "prefixgate_gateway_worker_ejections_total",
    "counter",
    "Times that the worker was left alone, for calls that failed in a row or because it did not answer.",
    ("worker",),
    "ejections",
)
WORKER_KNOWN_BLOCKS = Metric(
    "prefixgate_gateway_worker_known_blocks",
    "gauge",
    "Cached blocks that the worker has told of, by which calls are sent to it.",
    ("worker",),
    "blocks",
)
WORKER_RESYNCS = Metric(
    "prefixgate_gateway_worker_resyncs_total",
    "counter",
    "Times that the picture of the worker's cache was dropped and taken anew while the worker lived on.",
    ("worker",),
    "resyncs",
)
RENDERED = Metric(
    "prefixgate_gateway_rendered_timestamp_seconds",
    "gauge",
    "When this page was made, in seconds since 1970. It is served again until it is gateway.metrics_seconds old.",
    (),
    "seconds",
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
    LIMIT_REFUSALS,
    CHARGED_TOKENS,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    QUERIED_TOKENS,
    REUSABLE_TOKENS,
    PREDICTED_TOKENS,
    DELIVERED_TOKENS,
    COMPLETION_TOKENS,
    OUTPUTS_FINISHED,
    FIRST_TOKEN,
    TOKEN_GAP,
    ENCODING,
    LIVE_CALLS,
    OLDEST_CALL,
    WAITING_CALLS,
    LONGEST_WAIT,
    WORKER_READY,
    WORKER_UP,
    WORKER_LIVE_CALLS,
    WORKER_CALLS,
    WORKER_RETRIED_CALLS,
    WORKER_EJECTIONS,
    WORKER_KNOWN_BLOCKS,
    WORKER_RESYNCS,
    RENDERED,
    METRICS_ERRORS,
)


Readings = Mapping[Metric, Callable[[], "float | Samples"]]
"""How to read what is not counted here, all gauges among it: one value, or those of each series."""


class GatewayMetrics:
    """The metrics of one gateway: counted on its event loop, read on other threads."""

    def __init__(self, tenants: Iterable[str], readings: Readings) -> None:
        """``readings`` are taken when a page is made, on another thread.

        Tenants beyond the first ``MAX_TENANT_LABELS`` count as ``other``.
        """
        self._readings = readings
        self._values: dict[Metric, dict[tuple[str, ...], Value]] = {
            metric: {} if metric.labels else {(): _zero(metric)} for metric in METRICS if metric not in readings
        }
        self._tenants: frozenset[str] = frozenset()
        self.know(tenants)

    def know(self, tenants: Iterable[str]) -> None:
        """Count these apart too, as long as there is room. Who is known stays known: its series stay on the page."""
        others = (name for name in tenants if name not in self._tenants)
        known = frozenset(itertools.islice(others, MAX_TENANT_LABELS - len(self._tenants)))
        self._tenants |= known
        # What has no other label is there from the beginning, as zero: a rate does not see a series' first value.
        for metric, values in self._values.items():
            if metric.labels == ("tenant",):
                values |= {(tenant,): _zero(metric) for tenant in known}

    def count(self, metric: Metric, *labels: str, amount: float = 1) -> None:
        """Add to a counter. A tenant without series of its own counts as ``other``."""
        try:
            if amount < 0:
                raise ValueError(f"a counter cannot fall by {-amount}")
            values = self._values[metric]
            labels = self._closed(metric, labels)
            values[labels] = values.get(labels, 0) + amount  # type: ignore[operator]  # a counter's are numbers
        except Exception:
            self._count_error(metric)

    def observe(self, metric: Metric, *labels: str, seconds: float) -> None:
        """Add one duration to a histogram."""
        try:
            values = self._values[metric]
            labels = self._closed(metric, labels)
            histogram = values.get(labels)
            if histogram is None:
                histogram = values[labels] = _zero(metric)
            histogram.observe(seconds)  # type: ignore[union-attr]  # a histogram's are histograms
        except Exception:
            self._count_error(metric)

    def families(self) -> Iterator[Family]:
        """Read all metrics, in the order of the table."""
        for metric in METRICS:
            if metric in self._readings:
                value = self._readings[metric]()
                samples: Samples = value if isinstance(value, Mapping) else {(): value}
            else:
                # The copy is made in one go, whatever is counted meanwhile.
                samples = dict(self._values[metric])
            yield Family(metric.name, metric.kind, metric.help, metric.labels, samples)

    def _closed(self, metric: Metric, labels: tuple[str, ...]) -> tuple[str, ...]:
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has the labels {metric.labels}, not {len(labels)}")
        at = metric.tenant_at
        if at is None or labels[at] in self._tenants:
            return labels
        return (*labels[:at], OTHER_TENANT, *labels[at + 1 :])

    def _count_error(self, metric: Metric) -> None:
        logger.exception("Counting %s failed", metric.name)
        # By itself and by 1: the one count that has nothing to fail on.
        self._values[METRICS_ERRORS][()] += 1  # type: ignore[operator]


def _zero(metric: Metric) -> Value:
    return Histogram(_TIME_BUCKETS) if metric.kind == "histogram" else 0
