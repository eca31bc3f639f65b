"""What a worker says that a call has cost, counted and charged once."""

import grpc

from prefixgate.gateway import metrics as table
from prefixgate.gateway.live_calls import Call
from prefixgate.gateway.metrics import GatewayMetrics
from prefixgate.proto import worker_pb2


def record_usage(metrics: GatewayMetrics, call: Call, end: worker_pb2.CallEnd) -> None:
    """Count the prompt of a call that a worker ended, and charge it if it ended well."""
    usage = end.usage
    if end.code == grpc.StatusCode.OK.value[0]:
        call.charge.settle(usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens)
    metrics.count(table.PROMPT_TOKENS, call.tenant, amount=usage.prompt_tokens)
    for source in ("block_hit", "partial_copy", "claimed_tail"):
        metrics.count(table.CACHED_TOKENS, call.tenant, source, amount=getattr(usage, f"{source}_tokens"))
