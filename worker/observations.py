"""What the engine counts, each thing once and when it becomes true.

Plain numbers: they are written by the engine's thread between two tokens, where a metric library's locks and label
look-ups would cost more than the counting. What a scrape makes of them stands in ``metrics``.
"""

from collections import Counter
from collections.abc import Iterable

from grpc import StatusCode

from prefixgate.cache.admission import CacheMode
from prefixgate.cache.matching import MissReason
from prefixgate.proto.exposition import Histogram
from prefixgate.proto.metrics_page import MAX_TENANT_LABELS
from prefixgate.worker.request import End, Request

OTHER_TENANT = "other"
"""The label of every tenant that the settings do not name."""

BYPASSED = "bypassed"
SOURCES = ("computed", "block_hit", "partial_copy", "claimed_tail", BYPASSED)
MISSES = tuple(reason.value for reason in MissReason if reason is not MissReason.NONE)
OUTPUT_ENDS = ("stop", "length", "time_limit", "abort", "error")
CALL_ENDS = tuple(
    code.name.lower()
    for code in (
        StatusCode.OK,
        StatusCode.CANCELLED,
        StatusCode.DEADLINE_EXCEEDED,
        StatusCode.INVALID_ARGUMENT,
        StatusCode.UNIMPLEMENTED,
        StatusCode.ALREADY_EXISTS,
        StatusCode.RESOURCE_EXHAUSTED,
        StatusCode.INTERNAL,
        StatusCode.UNAVAILABLE,
    )
)

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class Observations:
    """The numbers behind the metrics. Written by the engine's thread, but for refusals at the door."""

    def __init__(self, tenants: Iterable[str]) -> None:
        in_order = list(tenants)
        self.tenants = frozenset(in_order)
        self.shown_tenants = frozenset(in_order[:MAX_TENANT_LABELS])
        """Those with series of their own. All are counted apart, since each may ask for its own figures."""
        self.calls_received = 0
        self.calls_refused: Counter[str] = Counter()
        """By status; written by the threads that submit, so kept apart from those that the engine ended."""
        self.calls_ended: Counter[str] = Counter(dict.fromkeys(CALL_ENDS, 0))
        self.outputs_ended: Counter[str] = Counter(dict.fromkeys(OUTPUT_ENDS, 0))
        labels = [*sorted(self.tenants), OTHER_TENANT]
        self.prompt_tokens: Counter[tuple[str, str]] = Counter(
            {(label, source): 0 for label in labels for source in SOURCES}
        )
        """By tenant and source, at admission."""
        self.misses: Counter[str] = Counter(dict.fromkeys(MISSES, 0))
        """Calls by why the first of their tokens that were not cached was not."""
        self.generated_tokens: Counter[str] = Counter(dict.fromkeys(labels, 0))
        self.preemptions = 0
        self.resumed_tokens: Counter[str] = Counter(computed=0, cached=0)
        """Tokens that preempted calls needed again, by where they came from."""
        self.prefilled_tokens = 0
        """Tokens of prompts that were worked through to their first output token."""
        self.queue_seconds = Histogram(FIRST_TOKEN_BUCKETS)
        self.first_token_seconds = Histogram(FIRST_TOKEN_BUCKETS)
        self.token_gap_seconds = Histogram(GAP_BUCKETS)

    def call_received(self) -> None:
        """A call came to the engine."""
        self.calls_received += 1

    def call_refused(self, end: End) -> None:
        """A call was refused before the engine saw it."""
        self.calls_refused[end.code.name.lower()] += 1

    def call_admitted(self, request: Request) -> None:
        """A call's prompt was looked up and its blocks are held."""
        usage, tenant = request.usage, self._label(request.scope.tenant)
        computed = BYPASSED if request.cache_mode is CacheMode.BYPASS else "computed"
        self.prompt_tokens[tenant, computed] += usage.prompt_tokens - usage.cached_tokens
        self.prompt_tokens[tenant, "block_hit"] += usage.block_hit_tokens
        self.prompt_tokens[tenant, "partial_copy"] += usage.partial_copy_tokens
        self.prompt_tokens[tenant, "claimed_tail"] += usage.claimed_tail_tokens
        if request.miss_reason is not MissReason.NONE:
            self.misses[request.miss_reason.value] += 1
        self.queue_seconds.observe(usage.queue_seconds)

    def call_preempted(self) -> None:
        """A call had to give its blocks back."""
        self.preemptions += 1

    def call_resumed(self, carried_tokens: int, cached_tokens: int) -> None:
        """A preempted call was admitted again. What it finds of itself is no hit."""
        self.resumed_tokens["cached"] += cached_tokens
        self.resumed_tokens["computed"] += carried_tokens - cached_tokens

    def first_token(self, request: Request) -> None:
        """The first token of a call was sampled."""
        self.prefilled_tokens += request.usage.prompt_tokens
        self.first_token_seconds.observe(request.usage.first_token_seconds)

    def tokens(self, sampled: Iterable[tuple[str, float | None]]) -> None:
        """Tokens were sampled for these tenants, each so long after the one before it in its output, if any was."""
        # Most outputs of a step had their last token in the same one too.
        for (tenant, gap_seconds), times in Counter(sampled).items():
            self.generated_tokens[self._label(tenant)] += times
            if gap_seconds is not None:
                self.token_gap_seconds.observe(gap_seconds, times)

    def output_ended(self, reason: str) -> None:
        """An output ended; one of ``OUTPUT_ENDS``."""
        self.outputs_ended[reason] += 1

    def call_ended(self, end: End) -> None:
        """A call that the engine had taken ended."""
        self.calls_ended[end.code.name.lower()] += 1

    def queried_tokens(self, tenant: str) -> int:
        """Prompt tokens of a label's calls that were looked up."""
        return sum(self.prompt_tokens[tenant, source] for source in SOURCES if source != BYPASSED)

    def hit_tokens(self, tenant: str) -> int:
        """Of these, tokens that came from the cache."""
        return self.queried_tokens(tenant) - self.prompt_tokens[tenant, "computed"]

    def labels(self) -> list[str]:
        """The tenant labels, all there will ever be."""
        return list(self.generated_tokens)

    def _label(self, tenant: str) -> str:
        return tenant if tenant in self.tenants else OTHER_TENANT
