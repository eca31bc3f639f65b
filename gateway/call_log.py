"""The line that is logged of each call when it has ended."""

import logging

import grpc

from prefixgate.gateway.live_calls import Call
from prefixgate.proto.log_lines import Value, with_fields

logger = logging.getLogger(__name__)

_SOURCES = ("block_hit", "partial_copy", "claimed_tail")


def log_call(call: Call, code: grpc.StatusCode) -> None:
    """Log how a call ended: whose it was, what it cost and how long it took, and nothing of what was said.

    Does not raise: it comes last in a call, and must not make another end of it.
    """
    try:
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s %s", call.method, code.name, extra=with_fields(_fields(call)))
    except Exception:
        logger.exception("The end of a call could not be logged")


def _fields(call: Call) -> dict[str, Value | list[str]]:
    record = call.record
    fields: dict[str, Value | list[str]] = {"tenant": call.tenant, "request_id": call.request_id}
    if record.prompt_tokens is not None:
        fields["prompt_tokens"] = record.prompt_tokens
    usage = record.usage
    if usage is not None:
        fields["computed_tokens"] = usage.prompt_tokens - usage.cached_tokens
        fields |= {f"{source}_tokens": getattr(usage, f"{source}_tokens") for source in _SOURCES}
    if record.attempts:
        fields |= {"completion_tokens": record.completion_tokens, "worker": record.worker, "attempts": record.attempts}
    if record.finish_reasons:
        fields["finish"] = [reason for _, reason in sorted(record.finish_reasons.items())]
    if usage is not None:
        fields["queue_seconds"] = round(usage.queue_seconds, 6)
    if record.first_token_seconds is not None:
        fields["first_token_seconds"] = round(record.first_token_seconds, 6)
    fields["seconds"] = round(call.age_seconds, 6)
    if call.trace.trace_id:
        fields["trace_id"] = call.trace.trace_id
    return fields
