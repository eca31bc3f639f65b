"""Clients by the dozen: what they ask, how they leave, and what they hear."""

import asyncio
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc import StatusCode

from prefixgate.proto import gateway_pb2, gateway_pb2_grpc, generation_pb2
from prefixgate.proto.transport import CHANNEL_OPTIONS
from tests.integration.sidecar import KEYS, credential

CLIENTS = 64
LONGEST_PROMPT, LONGEST_OUTPUT = 220, 48

_OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
_HEADS = ("", "You are terse. ", "You are the keeper of a lighthouse and speak of nothing but the sea. " * 2)


@dataclass(frozen=True)
class Plan:
    """One call that a client makes."""

    request: gateway_pb2.GenerateRequest
    tenant: str
    streamed: bool = True
    leaves_after: int | None = None
    """Messages of a stream after which the client cancels."""
    leaves_at: float | None = None
    """Seconds after which it does."""
    deadline: float | None = None
    refused: StatusCode | None = None

    @property
    def allowed(self) -> set[StatusCode]:
        """The ends that this call may come to; to OK always, as it may be fast."""
        if self.refused is not None:
            return {self.refused}
        leaves = self.leaves_after is not None or self.leaves_at is not None
        ends = {StatusCode.CANCELLED: leaves, StatusCode.DEADLINE_EXCEEDED: self.deadline is not None}
        return {StatusCode.OK, *(code for code, may in ends.items() if may)}


@dataclass
class Heard:
    """What a client heard of its call."""

    plan: Plan
    code: StatusCode = StatusCode.UNKNOWN
    outputs: dict[int, gateway_pb2.Output] = field(default_factory=dict)
    completion: gateway_pb2.Completion | None = None

    def add(self, message: gateway_pb2.GenerateResponse) -> None:
        """Take one message of a stream."""
        assert self.completion is None, "a message after the completion"
        for delta in message.deltas:
            output = self.outputs.setdefault(delta.index, gateway_pb2.Output(index=delta.index))
            assert not output.finish_reason, "a delta after the last one of its output"
            output.text += delta.text
            output.token_ids.extend(delta.token_ids)
            output.finish_reason, output.matched_stop = delta.finish_reason, delta.matched_stop
        if message.HasField("completion"):
            self.completion = message.completion


def mixed(rng: random.Random, index: int) -> Plan:
    """Make up a call of any kind: shared beginnings, several outputs, stop strings, seeds, and clients that leave."""
    tenant = rng.choice(list(KEYS))
    prompt = rng.choice(_HEADS) + "".join(rng.choices("ab ", k=rng.randrange(1, 60)))
    request = gateway_pb2.GenerateRequest(
        prompt=prompt,
        n=rng.choice([1, 1, 1, 2, 3]),
        stop=rng.sample(["e", "th", "~", "#0", "zzzz"], rng.choice([0, 0, 1, 2])),
        sampling=_sampling(rng),
        request_id=f"call-{index}",
        cache=generation_pb2.CacheControl(salt=rng.choice(["", "", "", "pepper"])),
    )
    manner = rng.random()
    if manner < 0.05:
        request.sampling.max_tokens = 5000
        return Plan(request, tenant, refused=StatusCode.INVALID_ARGUMENT)
    if manner < 0.1:
        return Plan(request, "mallory", refused=StatusCode.UNAUTHENTICATED)
    if manner < 0.25:
        return Plan(request, tenant, leaves_after=rng.randrange(6))
    if manner < 0.35:
        return Plan(request, tenant, streamed=rng.random() < 0.5, leaves_at=rng.uniform(0, 0.3))
    if manner < 0.5:
        return Plan(request, tenant, streamed=rng.random() < 0.5, deadline=rng.uniform(0.001, 0.5))
    return Plan(request, tenant, streamed=rng.random() < 0.7)


def _sampling(rng: random.Random) -> generation_pb2.SamplingParams:
    sampling = generation_pb2.SamplingParams(max_tokens=rng.randrange(1, LONGEST_OUTPUT + 1))
    if rng.random() < 0.3:
        sampling.temperature = rng.choice([0.5, 1.0])
    if rng.random() < 0.7:
        sampling.seed = rng.randrange(3)
    sampling.ignore_eos = rng.random() < 0.3
    return sampling


def short(rng: random.Random, index: int) -> Plan:
    """Make up a call whose prompt fills no block, of a client that often leaves."""
    request = gateway_pb2.GenerateRequest(
        prompt="".join(rng.choices("abc", k=rng.randrange(1, 16))),
        sampling=generation_pb2.SamplingParams(max_tokens=rng.randrange(1, 5)),
        # Names that several live calls have at a time.
        request_id=f"call-{index % 5}",
    )
    leaves = rng.choice([None, None, 0, 1, 2])
    return Plan(request, rng.choice(list(KEYS)), leaves_after=leaves)


def hurried(rng: random.Random, index: int) -> Plan:
    """Make up a call whose deadline comes amid its answer, or about when that ends."""
    request = gateway_pb2.GenerateRequest(
        prompt="".join(rng.choices("abc", k=20)),
        sampling=generation_pb2.SamplingParams(max_tokens=rng.choice([3, 20, 40]), ignore_eos=True),
        request_id=f"call-{index}",
    )
    return Plan(request, rng.choice(list(KEYS)), streamed=rng.random() < 0.6, deadline=rng.uniform(0.005, 0.15))


async def run(address: str, plans: Iterable[Plan], clients: int = CLIENTS) -> list[Heard]:
    """Have so many clients, each with a connection of its own, make the calls, and return all that they heard."""
    waiting, heard = iter(plans), list[Heard]()
    await asyncio.gather(*(_client(address, waiting, heard) for _ in range(clients)))
    return heard


async def _client(address: str, plans: Iterator[Plan], heard: list[Heard]) -> None:
    async with grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, _OWN_CONNECTION]) as channel:
        stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)
        for plan in plans:
            one = await (_stream(stub, plan) if plan.streamed else _complete(stub, plan))
            heard.append(one)


async def _stream(stub: "gateway_pb2_grpc.GatewayAsyncStub", plan: Plan) -> Heard:
    heard, number = Heard(plan), 0
    call = stub.Generate(plan.request, timeout=plan.deadline, metadata=_metadata(plan))
    with _to_its_end(plan, call):
        if plan.leaves_after == 0:
            call.cancel()
        async for message in call:
            heard.add(message)
            number += 1
            if number == plan.leaves_after:
                call.cancel()
    heard.code = await call.code()
    return heard


async def _complete(stub: "gateway_pb2_grpc.GatewayAsyncStub", plan: Plan) -> Heard:
    heard = Heard(plan)
    call = stub.Complete(plan.request, timeout=plan.deadline, metadata=_metadata(plan))
    with _to_its_end(plan, call):
        answer = await call
        heard.outputs = {output.index: output for output in answer.outputs}
        heard.completion = answer.completion
    heard.code = await call.code()
    return heard


@contextmanager
def _to_its_end(plan: Plan, call: Any) -> Iterator[None]:
    """Let a call end in any way; its status tells which. The client leaves when its plan says so."""
    loop = asyncio.get_running_loop()
    leaving = None if plan.leaves_at is None else loop.call_later(plan.leaves_at, call.cancel)
    try:
        yield
    except grpc.aio.AioRpcError:
        pass
    except asyncio.CancelledError:
        if not call.cancelled():
            raise
    finally:
        if leaving is not None:
            leaving.cancel()


def _metadata(plan: Plan) -> grpc.aio.Metadata:
    return grpc.aio.Metadata(*credential(plan.tenant))
