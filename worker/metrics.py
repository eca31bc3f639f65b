"""Every metric of the worker in one table, and how a scrape reads it.

A name that exists twice, once for us and once for dashboards and routers made for vLLM, is two readings of one number.
Gauges are read from the engine when a page is made. Labels come from closed sets, so no client can make the page
grow.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from prefixgate.proto.exposition import Family, Histogram, Kind, Samples, Value
from prefixgate.worker.observations import OTHER_TENANT, Observations
from prefixgate.worker.reading import Reading


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table."""

    name: str
    kind: Kind
    help: str
    read: Callable[[Reading], Samples]
    labels: tuple[str, ...] = ()

    def family(self, reading: Reading) -> Family:
        """Read the metric into what a page is written from."""
        samples = self.read(reading)
        if self.labels[:1] == ("tenant",):
            samples = _folded(samples, reading.counts.shown_tenants)
        return Family(self.name, self.kind, self.help, self.labels, samples)


def families(reading: Reading) -> list[Family]:
    """Read every metric, all from one reading."""
    return [metric.family(reading) for metric in METRICS]


def _folded(samples: Samples, shown: Collection[str]) -> Samples:
    """Add what tenants without series of their own have to ``other``, so that the page keeps to its bound."""
    folded: dict[tuple[str, ...], Value] = {}
    for (tenant, *others), value in samples.items():
        assert not isinstance(value, Histogram)
        key = (tenant if tenant in shown else OTHER_TENANT, *others)
        before = folded.get(key, 0)
        assert not isinstance(before, Histogram)
        folded[key] = before + value
    return folded


def _by_tenant(read: Callable[[Observations, str], float]) -> Callable[[Reading], Samples]:
    return lambda reading: {(tenant,): read(reading.counts, tenant) for tenant in reading.counts.labels()}


def _one(read: Callable[[Reading], Value]) -> Callable[[Reading], Samples]:
    return lambda reading: {(): read(reading)}


def _vllm(read: Callable[[Reading], Value]) -> Callable[[Reading], Samples]:
    return lambda reading: {(reading.model, "0"): read(reading)}


def _prompt_tokens(reading: Reading) -> Samples:
    return {(tenant, source): count for (tenant, source), count in reading.counts.prompt_tokens.items()}


def _calls_received(reading: Reading) -> float:
    return reading.counts.calls_received + sum(reading.counts.calls_refused.values())


def _calls_ended(reading: Reading) -> Samples:
    ended = reading.counts.calls_ended + reading.counts.calls_refused
    return {(code,): ended[code] for code in reading.counts.calls_ended}


_VLLM = ("model_name", "engine")

METRICS: tuple[Metric, ...] = (
    Metric(
        "prefixgate_worker_queried_tokens_total",
        "counter",
        "Prompt tokens looked up in the cache, at admission.",
        _by_tenant(Observations.queried_tokens),
        ("tenant",),
    ),
    Metric(
        "prefixgate_worker_hit_tokens_total",
        "counter",
        "Of these, tokens that came from the cache.",
        _by_tenant(Observations.hit_tokens),
        ("tenant",),
    ),
    Metric(
        "prefixgate_worker_prompt_tokens_total",
        "counter",
        "Prompt tokens at admission by where their keys and values come from: computed, block_hit (a shared block), "
        "partial_copy (copied out of a block that goes on differently), claimed_tail (an unfinished block taken over), "
        "bypassed (computed without a look into the cache, as the call asked).",
        _prompt_tokens,
        ("tenant", "source"),
    ),
    Metric(
        "prefixgate_worker_misses_total",
        "counter",
        "Calls that missed, by why the first token that missed did: never_seen, evicted, diverged (inside a cached "
        "block), bypassed (the call asked not to read). A call of which all but the last token is cached is no miss.",
        lambda reading: {(reason,): count for reason, count in reading.counts.misses.items()},
        ("reason",),
    ),
    Metric(
        "prefixgate_worker_hash_collisions_total",
        "counter",
        "Blocks found by their hash whose content was another's: misses, where trusting the hash would be wrong.",
        _one(lambda reading: reading.report.hash_collisions),
    ),
    Metric(
        "prefixgate_worker_generated_tokens_total",
        "counter",
        "Tokens sampled.",
        _by_tenant(lambda counts, tenant: counts.generated_tokens[tenant]),
        ("tenant",),
    ),
    Metric(
        "prefixgate_worker_computed_tokens_total",
        "counter",
        "Tokens that the model computed, of prompts and outputs.",
        _one(lambda reading: reading.report.computed_tokens),
    ),
    Metric(
        "prefixgate_worker_calls_received_total",
        "counter",
        "Calls received, refused ones included.",
        _one(_calls_received),
    ),
    Metric(
        "prefixgate_worker_calls_ended_total",
        "counter",
        "Calls ended, by gRPC status.",
        _calls_ended,
        ("code",),
    ),
    Metric(
        "prefixgate_worker_outputs_ended_total",
        "counter",
        "Outputs of calls ended: stop, length, time_limit, abort (cancelled, past its deadline, or cut off), error.",
        lambda reading: {(reason,): count for reason, count in reading.counts.outputs_ended.items()},
        ("reason",),
    ),
    Metric(
        "prefixgate_worker_copied_blocks_total",
        "counter",
        "Blocks copied: partial copies at admission and copies on write.",
        _one(lambda reading: reading.report.copied_blocks),
    ),
    Metric(
        "prefixgate_worker_evicted_blocks_total",
        "counter",
        "Cached blocks given up for others.",
        _one(lambda reading: reading.report.evicted_blocks),
    ),
    Metric(
        "prefixgate_worker_evicted_idle_seconds_total",
        "counter",
        "Time from the last use of evicted blocks to their eviction, added up: per evicted block, how long content is "
        "kept.",
        _one(lambda reading: reading.report.evicted_idle_seconds),
    ),
    Metric(
        "prefixgate_worker_preemptions_total",
        "counter",
        "Running calls that had to give their blocks back and wait again.",
        _one(lambda reading: reading.counts.preemptions),
    ),
    Metric(
        "prefixgate_worker_resumed_tokens_total",
        "counter",
        "Tokens that preempted calls needed again, by source: cached, computed. They are neither queries nor hits.",
        lambda reading: {(source,): count for source, count in reading.counts.resumed_tokens.items()},
        ("source",),
    ),
    Metric(
        "prefixgate_worker_pool_blocks",
        "gauge",
        "Blocks of the pool by state: free, active (held by live calls or pins), cached (held by nobody, reusable).",
        lambda reading: {
            ("free",): reading.report.free_blocks,
            ("active",): reading.report.active_blocks,
            ("cached",): reading.report.cached_blocks,
        },
        ("state",),
    ),
    Metric(
        "prefixgate_worker_tenant_blocks",
        "gauge",
        "Blocks of each tenant by state: active (held by its live calls or pins), cached (held by nobody, reusable by "
        "it).",
        lambda reading: {
            key: count
            for tenant, blocks in reading.tenants.items()
            for key, count in (((tenant, "active"), blocks.active), ((tenant, "cached"), blocks.cached))
        },
        ("tenant", "state"),
    ),
    Metric(
        "prefixgate_worker_tenant_floor_blocks",
        "gauge",
        "Blocks that are kept for the tenant.",
        lambda reading: {(tenant,): blocks.floor for tenant, blocks in reading.tenants.items()},
        ("tenant",),
    ),
    Metric(
        "prefixgate_worker_pins",
        "gauge",
        "Pinned prefixes.",
        _one(lambda reading: reading.report.pins),
    ),
    Metric(
        "prefixgate_worker_pinned_blocks",
        "gauge",
        "Blocks that pins hold, each counted once.",
        _one(lambda reading: reading.report.pinned_blocks),
    ),
    Metric(
        "prefixgate_worker_pin_limit_blocks",
        "gauge",
        "Most blocks that pins may hold.",
        _one(lambda reading: reading.report.pin_limit_blocks),
    ),
    Metric(
        "prefixgate_worker_running_calls",
        "gauge",
        "Calls admitted and not ended.",
        _one(lambda reading: reading.report.running_calls),
    ),
    Metric(
        "prefixgate_worker_running_sequences",
        "gauge",
        "Their outputs that are not finished.",
        _one(lambda reading: reading.report.running_sequences),
    ),
    Metric(
        "prefixgate_worker_waiting_calls",
        "gauge",
        "Calls not admitted yet.",
        _one(lambda reading: reading.report.waiting_calls),
    ),
    Metric(
        "prefixgate_worker_oldest_call_seconds",
        "gauge",
        "Age of the oldest live call; 0 without one.",
        _one(lambda reading: reading.report.oldest_call_seconds),
    ),
    Metric(
        "prefixgate_worker_queue_seconds",
        "histogram",
        "Time from receipt to admission.",
        _one(lambda reading: reading.counts.queue_seconds),
    ),
    Metric(
        "prefixgate_worker_first_token_seconds",
        "histogram",
        "Time from receipt to a call's first token.",
        _one(lambda reading: reading.counts.first_token_seconds),
    ),
    Metric(
        "prefixgate_worker_token_gap_seconds",
        "histogram",
        "Time between two tokens of an output.",
        _one(lambda reading: reading.counts.token_gap_seconds),
    ),
    Metric("prefixgate_worker_steps_total", "counter", "Engine steps run.", _one(lambda reading: reading.report.steps)),
    Metric(
        "prefixgate_worker_integrity_checks_total",
        "counter",
        "Checks of the cache's invariants, one each time the worker comes to rest.",
        _one(lambda reading: reading.report.integrity_checks),
    ),
    Metric(
        "prefixgate_worker_integrity_violations_total",
        "counter",
        "Of these, checks that failed. Anything but 0 is a fault of the worker.",
        _one(lambda reading: reading.report.integrity_violations),
    ),
    Metric(
        "prefixgate_worker_info",
        "gauge",
        "Always 1; the labels tell what computes: the model, its device, the format of its keys and values, and what "
        "attends.",
        lambda reading: {(reading.model, reading.spec.device, reading.dtype, reading.spec.attention): 1},
        ("model", "device", "dtype", "attention"),
    ),
    Metric(
        "prefixgate_worker_rendered_timestamp_seconds",
        "gauge",
        "When this page was made, in seconds since 1970. It is served again until it is worker.metrics_seconds old.",
        _one(lambda reading: time.time()),
    ),
    Metric(
        "prefixgate_worker_metrics_errors_total",
        "counter",
        "Observations that failed and were dropped.",
        _one(lambda reading: reading.report.metrics_errors),
    ),
    Metric(
        "vllm:num_requests_running",
        "gauge",
        "As prefixgate_worker_running_sequences.",
        _vllm(lambda reading: reading.report.running_sequences),
        _VLLM,
    ),
    Metric(
        "vllm:num_requests_waiting",
        "gauge",
        "Outputs that the waiting calls ask for.",
        _vllm(lambda reading: reading.report.waiting_sequences),
        _VLLM,
    ),
    Metric(
        "vllm:num_preemptions_total",
        "counter",
        "As prefixgate_worker_preemptions_total.",
        _vllm(lambda reading: reading.counts.preemptions),
        _VLLM,
    ),
    Metric(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Active blocks as a share of all, 0 to 1.",
        _vllm(lambda reading: reading.report.active_blocks / reading.report.total_blocks),
        _VLLM,
    ),
    Metric(
        "vllm:cache_config_info",
        "gauge",
        "Always 1; the labels tell the pool's shape.",
        lambda reading: {(reading.model, "0", str(reading.block_size), str(reading.report.total_blocks)): 1},
        (*_VLLM, "block_size", "num_gpu_blocks"),
    ),
    Metric(
        "vllm:prefix_cache_queries_total",
        "counter",
        "As prefixgate_worker_queried_tokens_total, all tenants.",
        _vllm(lambda reading: sum(map(reading.counts.queried_tokens, reading.counts.labels()))),
        _VLLM,
    ),
    Metric(
        "vllm:prefix_cache_hits_total",
        "counter",
        "As prefixgate_worker_hit_tokens_total, all tenants.",
        _vllm(lambda reading: sum(map(reading.counts.hit_tokens, reading.counts.labels()))),
        _VLLM,
    ),
    Metric(
        "vllm:prompt_tokens_total",
        "counter",
        "Tokens of prompts that were worked through to a first output token, cached ones included.",
        _vllm(lambda reading: reading.counts.prefilled_tokens),
        _VLLM,
    ),
    Metric(
        "vllm:generation_tokens_total",
        "counter",
        "As prefixgate_worker_generated_tokens_total, all tenants.",
        _vllm(lambda reading: sum(reading.counts.generated_tokens.values())),
        _VLLM,
    ),
    Metric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "As prefixgate_worker_first_token_seconds.",
        _vllm(lambda reading: reading.counts.first_token_seconds),
        _VLLM,
    ),
    Metric(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "As prefixgate_worker_token_gap_seconds.",
        _vllm(lambda reading: reading.counts.token_gap_seconds),
        _VLLM,
    ),
    Metric(
        "vllm:request_success_total",
        "counter",
        "As prefixgate_worker_outputs_ended_total.",
        lambda reading: {(reading.model, "0", reason): count for reason, count in reading.counts.outputs_ended.items()},
        (*_VLLM, "finished_reason"),
    ),
)
"""Every metric that the worker exports."""
