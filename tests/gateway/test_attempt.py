"""One try at a worker: what was generated for a call is known when it is given up, taken or not."""

from types import SimpleNamespace
from typing import Any

from prefixgate.config.limit_settings import NO_LIMITS
from prefixgate.gateway.attempt import Attempt
from prefixgate.gateway.live_calls import Call
from prefixgate.gateway.metrics import GatewayMetrics
from prefixgate.gateway.quota import Quotas
from prefixgate.gateway.served_model import load_model
from prefixgate.gateway.worker_call import WorkerCall
from prefixgate.proto import gateway_pb2, worker_pb2
from tests.gateway.fake_worker import describe
from tests.gateway.rig import run


def tokens(count: int) -> worker_pb2.CallEvent:
    return worker_pb2.CallEvent(outputs=[worker_pb2.OutputTokens(index=0, token_ids=[64] * count)])


def test_a_client_who_gives_up_pays_for_what_it_did_not_read_and_our_failures_are_free() -> None:
    """Else reading nothing, and giving up at the end, would have whole answers generated for nothing."""

    async def charged(*, by_client: bool) -> int:
        call = Call("Generate", "acme", "my-call", task=None)
        call.charge = Quotas(NO_LIMITS, {"acme": NO_LIMITS}, default_max_tokens=9).enter("acme")
        call.charge.reserve(10, 1000)
        cancels: list[worker_pb2.Cancel] = []
        worker_call = WorkerCall(1, cancels.append)
        session = SimpleNamespace(submit=lambda _: worker_call)
        placement: Any = SimpleNamespace(
            worker="w",
            choice=None,
            connection=SimpleNamespace(model=load_model(describe()), session=session),
            answered=lambda: None,
        )
        submit = worker_pb2.Submit(n=1)
        attempt = Attempt(gateway_pb2.GenerateRequest(), submit, call, placement, GatewayMetrics(("acme",), {}))
        worker_call.deliver(tokens(3))
        await attempt.receive()
        worker_call.deliver(tokens(200))
        worker_call.deliver(tokens(100))
        attempt.close()
        assert cancels == [worker_pb2.Cancel(call_id=1)]
        return call.charge.close(by_client=by_client)

    assert run(charged(by_client=True)) == 10 + 3 + 300
    assert run(charged(by_client=False)) == 3
