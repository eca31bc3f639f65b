"""What is made of a worker's end of a call: its cost, its error, or the completion that the client gets."""

import grpc

from prefixgate.gateway import metrics as table
from prefixgate.gateway.candidate import Choice
from prefixgate.gateway.errors import worker_error
from prefixgate.gateway.live_calls import Call
from prefixgate.gateway.member import Placement
from prefixgate.gateway.metrics import GatewayMetrics
from prefixgate.proto import gateway_pb2, worker_pb2

_WORKER_FAULTS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
"""How a worker ends a call with which nothing is wrong."""


def record_usage(metrics: GatewayMetrics, call: Call, choice: Choice, end: worker_pb2.CallEnd) -> None:
    """Count the prompt of a call that a worker ended, and charge it if it ended well.

    What was forecast of the prompt counts beside what came of it, all of it or none: of calls that ended well, and of
    those that failed after their first token. Of others nobody knows what the cache would have delivered.
    """
    usage = end.usage
    if end.HasField("usage"):
        call.record.usage = usage
    if end.code == grpc.StatusCode.UNAVAILABLE.value[0] and not usage.completion_tokens:
        # Another worker may be asked, where the prompt then counts; where none answers it was of no use to anybody.
        return
    if choice.queried_tokens and (end.code == grpc.StatusCode.OK.value[0] or usage.completion_tokens):
        metrics.count(table.QUERIED_TOKENS, call.tenant, amount=choice.queried_tokens)
        metrics.count(table.REUSABLE_TOKENS, call.tenant, amount=choice.reusable_tokens)
        metrics.count(table.PREDICTED_TOKENS, call.tenant, amount=choice.cached_tokens)
        metrics.count(table.DELIVERED_TOKENS, call.tenant, amount=usage.cached_tokens)
    if end.code == grpc.StatusCode.OK.value[0]:
        call.charge.settle(usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens)
    metrics.count(table.PROMPT_TOKENS, call.tenant, amount=usage.prompt_tokens)
    for source in ("block_hit", "partial_copy", "claimed_tail"):
        metrics.count(table.CACHED_TOKENS, call.tenant, source, amount=getattr(usage, f"{source}_tokens"))


def check_end(end: worker_pb2.CallEnd, placement: Placement) -> None:
    """Note whether the worker is at fault. Raises CallError for a call that it did not end well."""
    if end.code != grpc.StatusCode.OK.value[0]:
        error = worker_error(end.code, end.message, end.retry_seconds, end.field)
        if error.code in _WORKER_FAULTS:
            placement.failed()
        raise error


def completion(end: worker_pb2.CallEnd, call: Call, description: worker_pb2.ModelDescription) -> gateway_pb2.Completion:
    """Make the client's terminal message of a call that went well."""
    return gateway_pb2.Completion(
        usage=end.usage,
        request_id=call.request_id,
        model=description.model,
        incarnation=description.incarnation,
    )
