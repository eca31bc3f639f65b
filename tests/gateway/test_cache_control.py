"""Cache control over a fleet: who is asked, and what becomes of those that do not answer."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
import pytest

from prefixgate.gateway.cache_control import CacheControl
from prefixgate.gateway.encoding_threads import EncodingThreads
from prefixgate.gateway.errors import CallError, NoWorkerError, status_of
from prefixgate.gateway.live_calls import Call
from prefixgate.gateway.metrics import GatewayMetrics
from prefixgate.gateway.prompt_encoder import PromptEncoder
from prefixgate.gateway.served_model import ServedModel, load_model
from prefixgate.gateway.worker_client import Connection
from prefixgate.proto import gateway_pb2, worker_pb2, worker_pb2_grpc
from prefixgate.proto.fields import FieldError
from prefixgate.proto.status_details import Details, Violation, field_violation, pack, retry_after, unpack
from prefixgate.proto.transport import STATUS_DETAILS_KEY
from tests.gateway.fake_worker import describe
from tests.gateway.rig import run

NOT_FOUND, UNAVAILABLE = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE
FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


def status(code: grpc.StatusCode, details: str = "why") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class Worker:
    """A stub whose methods answer what they were given, or fail with it."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.asked: list[tuple[str, Any]] = []

    def __getattr__(self, method: str) -> Any:
        async def answer(request: Any, *, timeout: float) -> Any:  # noqa: ASYNC109  # as gRPC's stubs have it
            self.asked.append((method, request))
            given = self._answers[method]
            if isinstance(given, Exception):
                raise given
            return given

        return answer


class Workers:
    """A fleet of such workers."""

    def __init__(self, model: ServedModel, stubs: Sequence[Worker], num_unreachable: int = 0) -> None:
        self.model = model
        self.num_unreachable = num_unreachable
        self._connections: list[Connection] = []
        for stub in stubs:
            self.add(stub)

    def add(self, stub: Worker) -> None:
        # None is a session, which nothing here uses.
        self._connections.append(Connection(self.model, None, stub))  # type: ignore[arg-type]

    def connections(self) -> Sequence[Connection]:
        return self._connections


MODEL = load_model(describe())


def control(*stubs: Worker, num_unreachable: int = 0) -> CacheControl:
    encoder = PromptEncoder(EncodingThreads(1), GatewayMetrics(("acme",), {}), max_prompt_bytes=1000)
    return CacheControl(Workers(MODEL, stubs, num_unreachable), encoder)


def call() -> Call:
    return Call("Test", "acme", "my-call", task=None)


def explanation(tokens: int) -> gateway_pb2.ExplainResponse:
    return gateway_pb2.ExplainResponse(prompt_tokens=40, cached_tokens=tokens)


def pinned(*seconds: float) -> gateway_pb2.ListPinsResponse:
    return gateway_pb2.ListPinsResponse(
        pins=[gateway_pb2.PinnedPrefix(pin_id=str(each), expires_in_seconds=each) for each in seconds]
    )


PROMPT = gateway_pb2.TokenIds(ids=[1, 2, 3])
EXPLAIN = gateway_pb2.ExplainRequest(token_ids=PROMPT, salt="s")
PIN = gateway_pb2.PinRequest(token_ids=PROMPT, salt="s", ttl_seconds=60.0)
ASKED = worker_pb2.CachedPrompt(tenant="acme", salt="s", token_ids=[1, 2, 3])


def test_a_prompt_is_explained_where_most_of_it_is() -> None:
    stubs = [Worker(Explain=explanation(tokens)) for tokens in (16, 39, 0)]
    assert run(control(*stubs).explain(EXPLAIN, call())) == explanation(39)
    assert [stub.asked for stub in stubs] == [[("Explain", ASKED)]] * 3


def test_workers_that_do_not_answer_hold_nothing_of_a_prompt() -> None:
    stubs = [Worker(Explain=status(UNAVAILABLE)), Worker(Explain=explanation(16))]
    assert run(control(*stubs).explain(EXPLAIN, call())) == explanation(16)
    with pytest.raises(NoWorkerError, match="a worker does not answer"):
        run(control(stubs[0]).explain(EXPLAIN, call()))


def test_a_prompt_is_pinned_where_most_of_it_is() -> None:
    answer = gateway_pb2.PinResponse(prompt_tokens=3)
    stubs = [Worker(Explain=explanation(tokens), Pin=answer) for tokens in (16, 32)]
    assert run(control(*stubs).pin(PIN, call())) == answer
    assert [[method for method, _ in stub.asked] for stub in stubs] == [["Explain"], ["Explain", "Pin"]]
    assert stubs[1].asked[1][1] == worker_pb2.PinCommand(prompt=ASKED, ttl_seconds=60.0)


def test_what_a_worker_refuses_reaches_the_client_and_what_is_between_us_does_not() -> None:
    with pytest.raises(CallError, match="nothing is cached") as refused:
        run(control(Worker(Pin=status(FAILED_PRECONDITION, "nothing is cached"))).pin(PIN, call()))
    assert refused.value.code is FAILED_PRECONDITION
    for code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED):
        with pytest.raises(NoWorkerError) as failed:
            run(control(Worker(Pin=status(code, "secret"))).pin(PIN, call()))
        assert "secret" not in str(failed.value)


def test_what_a_refusal_says_to_programs_is_passed_on() -> None:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    packed = pack(code.value[0], "full", field_violation("prompt", "full"), retry_after(1.5))
    trailing = grpc.aio.Metadata((STATUS_DETAILS_KEY, packed))
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, "full")
    with pytest.raises(CallError, match="full") as refused:
        run(control(Worker(Pin=error)).pin(PIN, call()))
    assert (refused.value.code, refused.value.retry_seconds, refused.value.field) == (code, 1.5, "prompt")
    told = unpack(dict(status_of(refused.value, "my-call").metadata)[STATUS_DETAILS_KEY])
    assert told == Details((Violation("prompt", "full"),), 1.5)


UNPIN = gateway_pb2.UnpinRequest(pin_id="a")


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([status(NOT_FOUND), gateway_pb2.UnpinResponse()], None),
        ([gateway_pb2.UnpinResponse(), status(UNAVAILABLE)], None),
        ([status(NOT_FOUND), status(NOT_FOUND)], NOT_FOUND),
        ([status(NOT_FOUND), status(UNAVAILABLE)], UNAVAILABLE),
        ([status(UNAVAILABLE), status(NOT_FOUND)], UNAVAILABLE),
    ],
)
def test_a_pin_is_ended_whoever_holds_it_and_not_there_only_if_all_say_so(
    answers: Sequence[Any], code: grpc.StatusCode | None
) -> None:
    stubs = [Worker(Unpin=answer) for answer in answers]
    if code is None:
        run(control(*stubs).unpin(UNPIN, call()))
    else:
        with pytest.raises(CallError) as refused:
            run(control(*stubs).unpin(UNPIN, call()))
        assert refused.value.code is code
    assert [stub.asked for stub in stubs] == [[("Unpin", worker_pb2.UnpinCommand(tenant="acme", pin_id="a"))]] * 2


def test_a_pin_may_be_at_a_worker_that_cannot_be_asked() -> None:
    with pytest.raises(NoWorkerError, match="1 workers could not be reached, and may hold the pin"):
        run(control(Worker(Unpin=status(NOT_FOUND)), num_unreachable=1).unpin(UNPIN, call()))


def test_the_pins_of_all_workers_are_listed_by_their_time() -> None:
    stubs = [Worker(ListPins=pinned(10.0, 30.0)), Worker(ListPins=pinned(20.0))]
    assert run(control(*stubs).list_pins(gateway_pb2.ListPinsRequest(), call())) == pinned(10.0, 20.0, 30.0)
    with pytest.raises(NoWorkerError):
        run(control(*stubs, Worker(ListPins=status(UNAVAILABLE))).list_pins(gateway_pb2.ListPinsRequest(), call()))


@pytest.mark.parametrize("salt", [None, "", "s"])
def test_a_flush_reaches_every_worker(salt: str | None) -> None:
    stubs = [Worker(Flush=gateway_pb2.FlushResponse(freed_blocks=blocks, ended_pins=1)) for blocks in (2, 3)]
    request = gateway_pb2.FlushRequest(salt=salt)
    done = run(control(*stubs).flush(request, call()))
    assert done == gateway_pb2.FlushResponse(freed_blocks=5, ended_pins=2)
    assert [stub.asked for stub in stubs] == [[("Flush", worker_pb2.FlushCommand(tenant="acme", salt=salt))]] * 2


def test_a_flush_that_may_have_left_something_is_no_success() -> None:
    good = Worker(Flush=gateway_pb2.FlushResponse(freed_blocks=2))
    for fleet in (control(good, Worker(Flush=status(UNAVAILABLE))), control(good, num_unreachable=1)):
        with pytest.raises(NoWorkerError, match="flushed at 1 workers; 1 could not be reached"):
            run(fleet.flush(gateway_pb2.FlushRequest(), call()))


def test_a_worker_that_comes_back_while_the_others_are_asked_was_not_asked() -> None:
    """It may be the same life of it, with all that it held."""
    fleet = Workers(MODEL, [], num_unreachable=1)

    class Returning(Worker):
        def __getattr__(self, method: str) -> Any:
            fleet.num_unreachable = 0
            return super().__getattr__(method)

    encoder = PromptEncoder(EncodingThreads(1), GatewayMetrics(("acme",), {}), max_prompt_bytes=1000)
    fleet.add(Returning(Flush=gateway_pb2.FlushResponse(), Unpin=status(NOT_FOUND)))
    with pytest.raises(NoWorkerError, match="flushed at 1 workers; 1 could not be reached"):
        run(CacheControl(fleet, encoder).flush(gateway_pb2.FlushRequest(), call()))
    fleet.num_unreachable = 1
    with pytest.raises(NoWorkerError, match="1 workers could not be reached, and may hold the pin"):
        run(CacheControl(fleet, encoder).unpin(UNPIN, call()))


def test_stats_add_up_what_the_workers_say() -> None:
    reports = [
        gateway_pb2.WorkerStats(
            incarnation=name,
            pool=gateway_pb2.PoolStats(block_size=16, total_blocks=64),
            tenant=gateway_pb2.TenantStats(running_calls=running, hit_tokens=7),
        )
        for name, running in (("a", 1), ("b", 2))
    ]
    stubs = [*(Worker(Report=report) for report in reports), Worker(Report=status(UNAVAILABLE))]
    stats = run(control(*stubs).stats(gateway_pb2.StatsRequest(), call()))
    assert (stats.model, stats.model_fingerprint, stats.context_length) == ("fake", "f00d", 2048)
    assert stats.tenant == gateway_pb2.TenantStats(running_calls=3, hit_tokens=14)
    assert list(stats.workers) == reports


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("explain", gateway_pb2.ExplainRequest(), "input"),
        ("explain", gateway_pb2.ExplainRequest(token_ids=gateway_pb2.TokenIds(ids=[1000])), "token_ids.ids"),
        ("explain", gateway_pb2.ExplainRequest(prompt="x", salt="s" * 129), "salt"),
        ("pin", gateway_pb2.PinRequest(prompt="x"), "ttl_seconds"),
        ("pin", gateway_pb2.PinRequest(prompt="x", ttl_seconds=86_401.0), "ttl_seconds"),
        ("unpin", gateway_pb2.UnpinRequest(), "pin_id"),
        ("unpin", gateway_pb2.UnpinRequest(pin_id="p" * 129), "pin_id"),
        ("flush", gateway_pb2.FlushRequest(salt="s" * 129), "salt"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_name_and_nobody_is_asked(method: str, request_: Any, field: str) -> None:
    stub = Worker()
    with pytest.raises(FieldError) as refused:
        run(getattr(control(stub), method)(request_, call()))
    assert refused.value.field == field
    assert stub.asked == []


def test_a_model_that_is_not_served_and_no_worker_at_all() -> None:
    with pytest.raises(CallError) as refused:
        run(control(Worker()).explain(gateway_pb2.ExplainRequest(prompt="x", model="other"), call()))
    assert refused.value.code is NOT_FOUND
    with pytest.raises(NoWorkerError):
        run(control().explain(EXPLAIN, call()))
    with pytest.raises(NoWorkerError):
        run(control().flush(gateway_pb2.FlushRequest(), call()))


def test_a_worker_whose_connection_is_closed_under_the_question_has_not_answered() -> None:
    async def test() -> None:
        asked, told, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await told.wait()
            writer.close()
            gone.set()

        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            lost: Any = worker_pb2_grpc.WorkerStub(channel)
            well = Worker(Report=gateway_pb2.WorkerStats(incarnation="well"))
            answer = asyncio.create_task(control(lost, well).stats(gateway_pb2.StatsRequest(), call()))
            await asked.wait()
            await channel.close()
            assert [worker.incarnation for worker in (await answer).workers] == ["well"]
            with pytest.raises(NoWorkerError, match="a worker does not answer"):
                await control(lost).pin(PIN, call())
            told.set()
            await gone.wait()

    run(test())


def test_a_client_that_goes_away_while_it_waits_is_not_answered() -> None:
    class Slow:
        async def Pin(self, *_: object, **__: object) -> None:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.Event().wait()

    slow: Any = Slow()

    async def test() -> None:
        await control(slow).pin(PIN, call())

    with pytest.raises(asyncio.CancelledError):
        run(test())
