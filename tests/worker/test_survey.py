"""How a worker stands as a whole, asked over a real socket."""

import grpc
import pytest
from grpc.aio import AioRpcError

from prefixgate.cache.accounts import TenantShare
from prefixgate.proto import worker_pb2
from prefixgate.proto.field_table import MAX_MAP_CELLS
from prefixgate.proto.metrics_page import MAX_TENANT_LABELS
from prefixgate.worker.witness_options import WitnessOptions
from tests.worker.driver import Driver, words
from tests.worker.hosting import INCARNATION, Host, on_host


def survey(max_cells: int) -> worker_pb2.SurveyRequest:
    return worker_pb2.SurveyRequest(max_cells=max_cells)


def test_a_worker_at_rest_tells_what_is_cached_for_whom() -> None:
    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        for call_id in (1, 2):
            await gateway.until(await gateway.submit(call_id, words(40)), ends=1)
        await gateway.until(await gateway.submit(3, words(20), tenant="bolt"), ends=1)
        found = await host.stub.Survey(survey(64))
        report = host.driver.engine.report()
        assert found.incarnation == INCARNATION
        assert (found.pool.total, found.pool.free) == (64, report.free_blocks)
        assert (found.pool.active, found.pool.cached, found.pool.pinned) == (0, report.cached_blocks, 0)
        assert (found.queried_tokens, found.hit_tokens) == (100, 39)
        assert found.misses["never_seen"] == 2
        assert sum(found.map.cached) == report.cached_blocks
        assert (list(found.map.active), list(found.map.holders)) == ([0] * 64, [0] * 64)
        names = [tenant.tenant for tenant in found.tenants]
        for tenant in found.tenants:
            assert found.map.owner[:].count(names.index(tenant.tenant) + 1) == tenant.cached_blocks
            assert (tenant.cap_blocks, tenant.floor_blocks) == (64, 0)
        looked_up = {tenant.tenant: (tenant.queried_tokens, tenant.hit_tokens) for tenant in found.tenants}
        assert (looked_up["acme"], looked_up["bolt"]) == ((80, 39), (20, 0))

    on_host(scenario)


def test_calls_that_run_and_wait_are_told_by_tenant_and_shared_blocks_by_their_holders() -> None:
    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        first = await gateway.submit(1, words(33), 400, n=2)
        # The block that the outputs part in was copied by then.
        await gateway.until(first, tokens=3)
        await gateway.submit(2, words(8, 9), 4, n=2, tenant="bolt")
        # The second call waits, as two outputs are all that run at a time.
        found = await host.stub.Survey(survey(16))
        while not found.waiting_calls:
            found = await host.stub.Survey(survey(16))
        by_name = {tenant.tenant: tenant for tenant in found.tenants}
        assert (found.running_calls, found.waiting_calls) == (1, 1)
        assert (by_name["acme"].running_calls, by_name["acme"].waiting_calls) == (1, 0)
        assert (by_name["bolt"].running_calls, by_name["bolt"].waiting_calls) == (0, 1)
        assert max(found.map.holders) == 2
        assert found.map.sharing[1] == 2
        assert by_name["acme"].active_blocks == sum(found.map.active) == found.pool.active
        assert (len(found.map.free), found.map.blocks_per_cell, found.map.stride) == (16, 4, 1)

    on_host(scenario, Driver(max_running=2, options=WitnessOptions(step_ms=5)))


def test_without_a_map_the_engine_is_not_asked() -> None:
    async def scenario(host: Host) -> None:
        found = await host.stub.Survey(survey(0))
        assert (found.pool.total, found.pool.free) == (64, 64)
        assert not found.HasField("map")
        assert not found.tenants

    on_host(scenario)


def test_tenants_beyond_a_bound_are_told_of_together() -> None:
    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        for number in range(MAX_TENANT_LABELS + 5):
            await gateway.until(await gateway.submit(number, words(16), 2, tenant=f"t{number:02}"), ends=1)
        found = await host.stub.Survey(survey(64))
        assert len(found.tenants) == MAX_TENANT_LABELS + 1
        assert found.tenants[-1].tenant == "other"
        assert sum(tenant.cached_blocks for tenant in found.tenants) == found.pool.cached
        assert max(found.map.owner) == MAX_TENANT_LABELS + 1

    on_host(scenario, Driver(num_blocks=128))


def test_a_map_has_a_bound() -> None:
    async def scenario(host: Host) -> None:
        with pytest.raises(AioRpcError) as refused:
            await host.stub.Survey(survey(MAX_MAP_CELLS + 1))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (refused.value.details() or "").startswith("max_cells: ")

    on_host(scenario)


def test_tenants_of_the_settings_are_told_of_before_they_have_anything() -> None:
    async def scenario(host: Host) -> None:
        told = await host.stub.Survey(survey(4))
        assert list(told.map.owner) == [0] * 4, "free blocks are nobody's"
        found = {tenant.tenant: tenant for tenant in told.tenants}
        assert (found["acme"].floor_blocks, found["acme"].cap_blocks) == (4, 64)
        assert (found["bolt"].floor_blocks, found["bolt"].cap_blocks) == (0, 20)

    on_host(scenario, Driver(shares={"acme": TenantShare(4), "bolt": TenantShare(0, 20)}))
