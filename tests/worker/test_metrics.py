"""The metrics: what they say equals what happened, each once, whatever goes wrong."""

import re
from collections.abc import Iterable

import pytest
from grpc import StatusCode
from prometheus_client.parser import text_string_to_metric_families

from prefixgate.cache.accounts import TenantShare
from prefixgate.cache.admission import CacheMode
from prefixgate.cache.hashing import BlockHash, BlockHasher
from prefixgate.proto.exposition import write_page
from prefixgate.proto.metrics_page import MAX_SERIES, MAX_TENANT_LABELS
from prefixgate.worker.metrics import METRICS, families
from prefixgate.worker.observations import CALL_ENDS, Observations
from prefixgate.worker.reading import Reading
from prefixgate.worker.report import TenantBlocks
from prefixgate.worker.request import End, RefusedError
from tests.worker.driver import Driver, solo, words

VLLM = {"model_name": "witness", "engine": "0"}


class Page:
    """The metrics of a driver's engine, as a scrape sees them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def text(self) -> str:
        driver = self._driver
        reading = Reading(
            driver.observations, driver.engine.report(), driver.runner.spec, driver.engine.tenant_blocks()
        )
        return write_page(families(reading)).decode()

    def __call__(self, name: str, **labels: str) -> float:
        prefix = "" if name.startswith("vllm:") else "prefixgate_worker_"
        wanted = labels | (VLLM if not prefix else {})
        found = [
            sample.value
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
            if (sample.name, sample.labels) == (prefix + name, wanted)
        ]
        assert len(found) == 1, f"{name} {labels} is on the page {len(found)} times"
        return float(found[0])

    def num_series(self) -> int:
        return sum(1 for line in self.text().splitlines() if not line.startswith("#"))


def test_every_metric_of_the_table_is_on_the_page_and_nothing_else() -> None:
    page = Page(Driver()).text()
    assert re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE) == [(metric.name, metric.kind) for metric in METRICS]


def test_the_page_has_a_bound_however_many_tenants_there_are() -> None:
    names = [f"tenant-{number:03}" for number in range(3 * MAX_TENANT_LABELS)]
    counts = Observations(names)
    for name in names:
        counts.tokens([(name, None)])
    blocks = {name: TenantBlocks(active=1, cached=2, floor=3) for name in [*names, "other"]}
    driver = Driver()
    page = write_page(families(Reading(counts, driver.engine.report(), driver.runner.spec, blocks))).decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    assert len(lines) < MAX_SERIES
    folded = 2 * MAX_TENANT_LABELS
    assert f'prefixgate_worker_generated_tokens_total{{tenant="{names[0]}"}} 1' in lines
    assert f'prefixgate_worker_generated_tokens_total{{tenant="other"}} {folded}' in lines
    assert f'prefixgate_worker_tenant_blocks{{state="cached",tenant="other"}} {2 * (folded + 1)}' in lines
    assert counts.generated_tokens[names[-1]] == 1, "what a tenant asks of itself is still its own"


def test_names_carry_their_unit_and_are_ours_or_vllms() -> None:
    for metric in METRICS:
        assert metric.name.startswith(("prefixgate_worker_", "vllm:"))
        assert metric.help.endswith(".")
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "histogram") <= metric.name.endswith("_seconds")


def test_queries_and_hits_are_counted_at_admission_by_tenant_and_source() -> None:
    driver = Driver(max_running=1)
    page = Page(driver)
    driver.ask(words(40), 2)
    driver.submit(words(40), 9)
    driver.submit(words(64, 3), 2, tenant="bolt")
    assert page("queried_tokens_total", tenant="acme") == 40
    driver.step()
    assert page("queried_tokens_total", tenant="acme") == 80
    assert page("hit_tokens_total", tenant="acme") == 39
    assert page("queried_tokens_total", tenant="bolt") == 0, "a waiting call was not looked up yet"
    driver.run()
    assert page("prompt_tokens_total", tenant="acme", source="block_hit") == 32
    assert page("prompt_tokens_total", tenant="acme", source="partial_copy") == 7
    assert page("prompt_tokens_total", tenant="acme", source="computed") == 41
    assert page("prompt_tokens_total", tenant="bolt", source="computed") == 64
    assert page("vllm:prefix_cache_queries_total") == page("vllm:prompt_tokens_total") == 144
    assert page("vllm:prefix_cache_hits_total") == 39
    assert page("generated_tokens_total", tenant="acme") == 11
    assert page("vllm:generation_tokens_total") == 13


def test_misses_are_counted_by_reason_and_what_was_not_looked_up_is_no_query() -> None:
    driver = Driver(num_blocks=8)
    page = Page(driver)

    def misses() -> dict[str, float]:
        return {
            reason: page("misses_total", reason=reason) for reason in ("never_seen", "evicted", "diverged", "bypassed")
        }

    driver.ask(words(40), 1)
    assert misses() == {"never_seen": 1, "evicted": 0, "diverged": 0, "bypassed": 0}
    driver.ask(words(40), 1)
    assert sum(misses().values()) == 1, "only the last token was computed"
    driver.ask([*words(36), *words(9, 5)], 1)
    assert misses()["diverged"] == 1
    driver.ask(words(40), 1, cache_mode=CacheMode.BYPASS)
    assert misses()["bypassed"] == 1
    assert page("queried_tokens_total", tenant="acme") == 40 + 40 + 45
    assert page("prompt_tokens_total", tenant="acme", source="bypassed") == 40
    driver.ask(words(120, 7), 1)
    driver.ask(words(40), 1)
    assert misses() == {"never_seen": 2, "evicted": 1, "diverged": 1, "bypassed": 1}
    assert page("hash_collisions_total") == 0


def test_a_hash_that_other_content_has_is_counted_as_collision_and_miss() -> None:
    class Colliding(BlockHasher):
        """Hashes that tell nothing but the depth."""

        def hash_block(self, parent: BlockHash, scope_digest: bytes, packed_ids: bytes) -> BlockHash:
            return BlockHash(bytes(15) + bytes([parent[-1] + 1]))

        def hash_blocks(self, parent: BlockHash, scope_digest: bytes, blocks: Iterable[bytes]) -> list[BlockHash]:
            return [parent := self.hash_block(parent, scope_digest, block) for block in blocks]

    driver = Driver(hasher=Colliding(bytes(16)))
    page = Page(driver)
    driver.ask(words(40), 1)
    assert driver.ask(words(40, 3), 1).outputs == solo(words(40, 3), 1)
    assert page("hash_collisions_total") > 0
    assert page("hit_tokens_total", tenant="acme") == 0


def test_each_tenants_blocks_are_shown_and_add_up_to_the_pools() -> None:
    driver = Driver(shares={"acme": TenantShare(floor=5)})
    page = Page(driver)
    driver.ask(words(33), 1)
    driver.submit(words(20), 50, tenant="bolt")
    driver.ask(words(60), 1, tenant="stranger")
    driver.submit(words(90), 50, tenant="stranger")
    driver.step()
    shown = {
        (tenant, state): page("tenant_blocks", tenant=tenant, state=state)
        for tenant in ("acme", "bolt", "other")
        for state in ("active", "cached")
    }
    assert shown["acme", "cached"] == 3
    assert shown["acme", "active"] == 0
    for state in ("active", "cached"):
        assert sum(shown[tenant, state] for tenant in ("acme", "bolt", "other")) == page("pool_blocks", state=state)
    assert [page("tenant_floor_blocks", tenant=tenant) for tenant in ("acme", "bolt", "other")] == [5, 0, 0]


def test_prompts_that_are_all_new_give_no_hits_however_many_are_evicted() -> None:
    driver = Driver(num_blocks=16, max_running=3)
    for seed in range(60):
        driver.submit(words(50, seed), 3)
    driver.run()
    page = Page(driver)
    assert page("evicted_blocks_total") > 0
    assert page("queried_tokens_total", tenant="acme") == 3000
    assert page("hit_tokens_total", tenant="acme") == 0


def test_gauges_are_read_when_scraped() -> None:
    driver = Driver(max_running=3)
    page = Page(driver)
    call = driver.submit(words(40), 100, n=2)
    driver.submit(words(40, 1), 100, n=2)
    assert (page("running_calls"), page("waiting_calls")) == (0, 2)
    driver.step()
    assert (page("running_calls"), page("running_sequences"), page("waiting_calls")) == (1, 2, 1)
    assert (page("vllm:num_requests_running"), page("vllm:num_requests_waiting")) == (2, 2)
    states = {state: page("pool_blocks", state=state) for state in ("free", "active", "cached")}
    assert sum(states.values()) == 64
    assert page("vllm:kv_cache_usage_perc") == states["active"] / 64 > 0
    driver.now += 4
    assert page("oldest_call_seconds") == 4
    driver.engine.cancel(call.request)
    driver.run()
    assert (page("running_calls"), page("waiting_calls"), page("pool_blocks", state="active")) == (0, 0, 0)
    assert page("vllm:cache_config_info", block_size="16", num_gpu_blocks="64") == 1
    assert page("info", model="witness", device="cpu", dtype="int64", attention="") == 1


def test_there_is_one_first_token_for_each_call_that_has_a_token() -> None:
    driver = Driver(max_running=2)
    page = Page(driver)
    for max_tokens, n in ((1, 1), (5, 1), (3, 2)):
        driver.ask(words(20, max_tokens), max_tokens, n=n)
    early = driver.submit(words(20, 8), 5)
    driver.engine.cancel(early.request)
    driver.run()
    for name in ("first_token_seconds", "vllm:time_to_first_token_seconds"):
        assert page(f"{name}_count") == 3
    for name in ("token_gap_seconds", "vllm:inter_token_latency_seconds"):
        assert page(f"{name}_count") == 0 + 4 + 2 * 2
    assert page("queue_seconds_count") == 3, "the cancelled call was never admitted"


def test_times_are_put_into_their_buckets() -> None:
    driver = Driver()
    call = driver.submit(words(20), 3)
    driver.now += 0.25
    driver.step()
    driver.now += 0.3
    driver.run()
    page = Page(driver)
    assert call.usage.first_token_seconds == 0.25
    assert [page("first_token_seconds_bucket", le=le) for le in ("0.1", "0.25", "0.5", "+Inf")] == [0, 1, 1, 1]
    assert page("first_token_seconds_sum") == 0.25
    assert [page("token_gap_seconds_bucket", le=le) for le in ("0.01", "0.2", "0.4")] == [1, 1, 2]


def test_what_came_in_is_what_ended_and_what_lives() -> None:
    driver = Driver(max_running=1, max_waiting=2)
    page = Page(driver)
    driver.ask(words(20), 3)
    cancelled = driver.submit(words(20), 100)
    driver.submit(words(20, 1), 100, deadline_seconds=1.0)
    driver.step()
    driver.engine.cancel(cancelled.request)
    driver.now += 1
    driver.step()
    with pytest.raises(RefusedError) as refused:
        driver.submit(words(2000), 10)
    driver.engine.call_refused(refused.value.end)
    driver.submit(words(20), 100)
    driver.step()
    ends = {code: page("calls_ended_total", code=code) for code in CALL_ENDS}
    assert {code for code, count in ends.items() if count} == {
        "ok", "cancelled", "deadline_exceeded", "invalid_argument",
    }  # fmt: skip
    assert page("calls_received_total") == sum(ends.values()) + page("running_calls") == 5
    outputs = {reason: page("outputs_ended_total", reason=reason) for reason in ("stop", "length", "abort", "error")}
    assert outputs == {"stop": 0, "length": 1, "abort": 2, "error": 0}
    assert page("vllm:request_success_total", finished_reason="abort") == 2


def test_no_client_can_make_the_page_grow() -> None:
    driver = Driver()
    page = Page(driver)
    before = page.num_series()
    for number in range(50):
        driver.ask(words(3, number), 1, tenant=f"tenant-{number}", salt=f"salt-{number}")
    driver.ask(words(3), 1, tenant="acme")
    assert page.num_series() == before
    assert page("queried_tokens_total", tenant="other") == 150
    assert page("queried_tokens_total", tenant="acme") == 3


def test_observations_that_fail_are_counted_and_nobody_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()

    def fail(*_: object) -> None:
        raise ValueError("Counters can only be incremented by non-negative amounts.")

    for name in (
        "call_received",
        "call_admitted",
        "call_refused",
        "first_token",
        "tokens",
        "output_ended",
        "call_ended",
    ):
        monkeypatch.setattr(driver.observations, name, fail)
    calls = [driver.submit(words(20, seed), 5, n=2) for seed in range(3)]
    driver.engine.call_refused(End(StatusCode.UNAVAILABLE))
    driver.run()
    assert [call.outputs for call in calls] == [solo(words(20, seed), 5, n=2) for seed in range(3)]
    # A refusal, the tokens of five steps; per call: received, admitted, first token, two ends of outputs, its own end.
    assert Page(driver)("metrics_errors_total") == 1 + 5 + 3 * (3 + 2 + 1)
    driver.assert_idle()


def test_pins_are_on_the_page_while_they_last() -> None:
    driver = Driver(pin_limit=8)
    page = Page(driver)
    assert (page("pins"), page("pinned_blocks"), page("pin_limit_blocks")) == (0, 0, 8)
    driver.ask(words(60), pin_seconds=30.0)
    driver.ask(words(40), pin_seconds=60.0)
    assert (page("pins"), page("pinned_blocks")) == (2, 3)
    assert page("pool_blocks", state="active") == 3
    driver.now += 30.0
    driver.step()
    assert (page("pins"), page("pinned_blocks")) == (1, 2)
