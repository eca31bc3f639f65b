"""The service over a real socket: who is let in, what is answered, and what a stream's end leaves."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from grpc import StatusCode

from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2
from prefixgate.proto.transport import text_digest
from prefixgate.worker.service import SHUTTING_DOWN
from prefixgate.worker.session import Session
from tests.worker.driver import Driver, solo, words
from tests.worker.hosting import HANG_SECONDS, INCARNATION, Host, on_host

OK: int = StatusCode.OK.value[0]
CANCELLED: int = StatusCode.CANCELLED.value[0]
UNAVAILABLE: int = StatusCode.UNAVAILABLE.value[0]


def test_describe_tells_what_is_served() -> None:
    async def scenario(host: Host) -> None:
        said = await host.stub.Describe(worker_pb2.DescribeRequest())
        spec = host.driver.runner.spec
        assert (said.model, said.fingerprint, said.vocabulary_size) == (
            spec.name,
            spec.fingerprint,
            spec.vocabulary_size,
        )
        assert (said.context_length, said.block_size, said.max_call_tokens) == (2048, 16, 64 * 16)
        assert tuple(said.eos_ids) == spec.eos_ids
        assert said.tokenizer == spec.text.tokenizer
        assert said.text_digest == text_digest(said.tokenizer, said.chat_template)
        assert (said.incarnation, said.protocol_version) == (INCARNATION, 1)
        assert said.hash_key_fingerprint == host.driver.cache.hasher.fingerprint

    on_host(scenario)


def test_before_the_model_is_loaded_every_method_is_unavailable() -> None:
    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        assert (await gateway.status())[0] is StatusCode.UNAVAILABLE
        for ask in (host.stub.Describe(worker_pb2.DescribeRequest()), host.stub.Report(worker_pb2.ReportRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await ask
            assert failed.value.code() is StatusCode.UNAVAILABLE
            assert failed.value.details() == "the model is loading; try again later"

    on_host(scenario, serve=False)


class Aborted(Exception):
    """What the context of a handler raises when it ends the call."""


@pytest.mark.parametrize("draining", [False, True])
def test_a_hello_is_read_before_the_stream_is_refused(draining: bool) -> None:
    """A gateway whose hello meets a stream that has ended is told INTERNAL by gRPC, whatever status was sent."""
    done: list[object] = []

    async def hello() -> AsyncIterator[worker_pb2.SessionRequest]:
        done.append("hello read")
        yield worker_pb2.SessionRequest(hello={"gateway": "test"})

    async def abort(code: StatusCode, _: str) -> None:
        done.append(code)
        raise Aborted

    async def scenario(host: Host) -> None:
        if draining:
            host.service.drain()
        context: Any = SimpleNamespace(abort=abort)
        with pytest.raises(Aborted):
            await host.service.Session(hello(), context)
        assert done == ["hello read", StatusCode.UNAVAILABLE]

    on_host(scenario, serve=draining)


@pytest.mark.parametrize(
    ("field", "value"),
    [("protocol_version", 2), ("incarnation", "dead"), ("hash_key_fingerprint", b"other"), ("gateway", "x" * 129)],
)
def test_a_hello_that_believes_something_else_is_refused_by_the_fields_name(field: str, value: Any) -> None:
    async def scenario(host: Host) -> None:
        code, details = await (await host.gateway(**{field: value})).status()
        assert code is (StatusCode.INVALID_ARGUMENT if field == "gateway" else StatusCode.FAILED_PRECONDITION)
        assert details.startswith(f"{field}: ")

    on_host(scenario)


@pytest.mark.parametrize("first", [None, worker_pb2.SessionRequest(), worker_pb2.SessionRequest(cancel={"call_id": 1})])
def test_a_stream_that_does_not_begin_with_a_hello_is_refused(first: worker_pb2.SessionRequest | None) -> None:
    async def scenario(host: Host) -> None:
        stream = host.stub.Session()
        if first is not None:
            await stream.write(first)
        await stream.done_writing()
        assert await stream.code() is StatusCode.FAILED_PRECONDITION
        assert await stream.details() == "hello: must be the first message"

    on_host(scenario)


def test_a_second_hello_ends_the_stream_and_its_calls() -> None:
    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        heard = await gateway.submit(1, words(20), 1000)
        await gateway.until(heard, tokens=2)
        await gateway.open()
        code, details = await gateway.status()
        assert (code, details) == (StatusCode.FAILED_PRECONDITION, "hello: out of place after the first hello")
        await host.until_idle()

    on_host(scenario)


@pytest.mark.parametrize("way", ["cancel", "half-close"])
def test_a_stream_that_ends_cancels_its_calls_and_no_others(way: str) -> None:
    async def scenario(host: Host) -> None:
        leaver, stayer = await host.gateway(), await host.gateway()
        kept = await stayer.submit(1, words(20), 200)
        running = await leaver.submit(1, words(20, 1), 900, n=2)
        waiting = [await leaver.submit(number, words(20, number), 900) for number in range(2, 6)]
        await leaver.until(running, tokens=3)
        if way == "cancel":
            leaver.stream.cancel()
        else:
            await leaver.stream.done_writing()
        await stayer.until(kept, ends=1)
        assert kept.outputs == solo(words(20), 200)
        await host.until_idle()
        host.driver.assert_idle()
        ended = host.driver.observations.calls_ended
        assert (ended["ok"], ended["cancelled"]) == (1, 1 + len(waiting))

    on_host(scenario, Driver(num_blocks=512, max_running=3))


def test_many_gateways_hear_each_of_its_own_calls_alone() -> None:
    async def scenario(host: Host) -> None:
        gateways = [await host.gateway() for _ in range(5)]
        calls = {}
        for number in range(10):
            for index, gateway in enumerate(gateways):
                calls[index, number] = await gateway.submit(number, words(5 + number, index), 9)
        for (index, number), heard in calls.items():
            await gateways[index].until(heard, ends=1)
            assert heard.codes == [OK]
            assert heard.outputs == solo(words(5 + number, index), 9)
        assert all(len(gateway.calls) == 10 for gateway in gateways)

    on_host(scenario)


def test_report_reads_the_live_engine_and_tells_a_tenant_its_own_counts() -> None:
    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        for call_id in (1, 2):
            await gateway.until(await gateway.submit(call_id, words(40)), ends=1)
        await gateway.until(await gateway.submit(3, words(40), tenant="stranger"), ends=1)
        running = await gateway.submit(4, words(20, 1), 900, tenant="bolt")
        await gateway.until(running, tokens=1)
        report = await host.stub.Report(worker_pb2.ReportRequest(tenant="acme"))
        assert (report.incarnation, report.pool.block_size, report.pool.total_blocks) == (INCARNATION, 16, 64)
        assert report.tenant == gateway_pb2.TenantStats(
            cached_blocks=3, cap_blocks=64, queried_tokens=80, hit_tokens=39
        )
        busy = (await host.stub.Report(worker_pb2.ReportRequest(tenant="bolt"))).tenant
        assert (busy.running_calls, busy.waiting_calls, busy.queried_tokens) == (1, 0, 20)
        assert busy.active_blocks > 0
        # Of tenants that are not in the settings nothing is counted apart.
        stranger = (await host.stub.Report(worker_pb2.ReportRequest(tenant="stranger"))).tenant
        assert stranger == gateway_pb2.TenantStats(cached_blocks=3, cap_blocks=64)
        assert not (await host.stub.Report(worker_pb2.ReportRequest())).HasField("tenant")
        nobody = (await host.stub.Report(worker_pb2.ReportRequest(tenant="nobody"))).tenant
        assert nobody == gateway_pb2.TenantStats(cap_blocks=64)

    on_host(scenario)


class TestDrain:
    def test_live_calls_finish_and_new_ones_are_refused(self) -> None:
        async def scenario(host: Host) -> None:
            gateway = await host.gateway()
            live = await gateway.submit(1, words(20), 100)
            await gateway.until(live, tokens=1)
            host.service.drain()
            late = await gateway.submit(2, words(20))
            await gateway.until(late, ends=1)
            assert late.codes == [UNAVAILABLE]
            assert (await (await host.gateway()).status())[0] is StatusCode.UNAVAILABLE
            # A gateway that joins must not believe for a moment that it has a worker.
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await host.stub.Describe(worker_pb2.DescribeRequest())
            assert refused.value.code() is StatusCode.UNAVAILABLE
            assert refused.value.details() == SHUTTING_DOWN.message
            async with asyncio.timeout(HANG_SECONDS):
                await host.service.until_idle()
                await host.service.close()
            assert await gateway.status() == (StatusCode.UNAVAILABLE, "the worker is shutting down")
            assert live.outputs == solo(words(20), 100)
            assert live.codes == [OK]

        on_host(scenario)

    def test_closing_says_what_is_still_to_be_said(self) -> None:
        async def scenario(host: Host) -> None:
            gateway = await host.gateway()
            live = await gateway.submit(1, words(20), 900)
            await gateway.until(live, tokens=1)
            await gateway.cancel(1)
            host.service.drain()
            async with asyncio.timeout(HANG_SECONDS):
                await host.service.until_idle()
                await host.service.close()
            await gateway.status()
            assert live.codes == [CANCELLED]

        on_host(scenario)


def test_a_cancel_from_inside_gives_the_gateway_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    async def scenario(host: Host) -> None:
        monkeypatch.setattr(Session, "run", cancelled)
        assert (await (await host.gateway()).status())[0] is StatusCode.UNAVAILABLE

    on_host(scenario)


def test_a_long_prompt_passes_and_is_answered_in_our_own_words() -> None:
    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        heard = await gateway.submit(1, [100] * 5_000_000)
        await gateway.until(heard, ends=1)
        assert heard.ends[0].code == StatusCode.INVALID_ARGUMENT.value[0]
        assert "5000000 ids; must be at most 2047" in heard.ends[0].message

    on_host(scenario)


def test_the_calls_wishes_to_the_cache_are_followed() -> None:
    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        for call_id, mode, cached in (
            (1, generation_pb2.CACHE_MODE_READ_ONLY, 0),
            (2, generation_pb2.CACHE_MODE_DEFAULT, 0),
            (3, generation_pb2.CACHE_MODE_BYPASS, 0),
            (4, generation_pb2.CACHE_MODE_READ_ONLY, 39),
        ):
            cache = generation_pb2.CacheControl(mode=mode, retention=70)
            heard = await gateway.submit(call_id, words(40), cache=cache)
            await gateway.until(heard, ends=1)
            assert (heard.codes, heard.ends[0].usage.cached_tokens) == ([OK], cached)

    on_host(scenario)


def test_usage_comes_with_the_end() -> None:
    async def scenario(host: Host) -> None:
        gateway = await host.gateway()
        await gateway.until(await gateway.submit(1, words(20), 5), ends=1)
        heard = await gateway.submit(2, words(20), 5, n=2)
        await gateway.until(heard, ends=1)
        usage = heard.ends[0].usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (20, 19, 10)
        assert usage.block_hit_tokens + usage.partial_copy_tokens + usage.claimed_tail_tokens == 19
        assert usage.copied_blocks == 2
        assert 0 <= usage.queue_seconds <= usage.first_token_seconds
        assert heard.finished == dict.fromkeys(range(2), generation_pb2.FINISH_REASON_LENGTH)

    on_host(scenario)
