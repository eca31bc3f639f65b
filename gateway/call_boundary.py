"""The boundary that every call runs in: one beginning, one end, and one status whatever goes wrong."""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from prefixgate.gateway.call_log import log_call
from prefixgate.gateway.call_trace import UNTRACED, Traces
from prefixgate.gateway.errors import CallError, ErrorStatus, QuotaError, is_being_cancelled, status_of
from prefixgate.gateway.live_calls import Call, LiveCalls
from prefixgate.gateway.metrics import CALLS_ENDED, CALLS_STARTED, CHARGED_TOKENS, LIMIT_REFUSALS, GatewayMetrics
from prefixgate.gateway.quota import Quotas
from prefixgate.gateway.validation import check_request_id
from prefixgate.proto.fields import FieldError

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

_CLIENTS_ENDS = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""How a call ends that its client gave up."""


class CallBoundary:
    """Opens and closes the calls of all methods."""

    def __init__(
        self,
        live: LiveCalls,
        metrics: GatewayMetrics,
        tenant_of: Callable[[], str],
        quotas: Quotas,
        traces: Traces = UNTRACED,
    ) -> None:
        """``tenant_of`` names the tenant of the running call, as its credential proved it."""
        self._live = live
        self._metrics = metrics
        self._tenant_of = tenant_of
        self._quotas = quotas
        self._traces = traces

    @asynccontextmanager
    async def call(self, method: str, context: Context, request_id: str = "") -> AsyncIterator[Call]:
        """Run a handler's body as a call; what it raises becomes the call's status.

        A client's own cancel is passed on, as gRPC loses memory for a handler that returns normally then. Any other
        CancelledError becomes a status, as gRPC would leave the client waiting for one.
        """
        call = Call(method, self._tenant_of(), _own_or_new(request_id))
        call.trace = self._traces.begin(method, context)
        code = grpc.StatusCode.OK
        self._metrics.count(CALLS_STARTED, method, call.tenant)
        try:
            self._live.enter(call)
            call.charge = self._quotas.enter(call.tenant)
            yield call
        except asyncio.CancelledError as error:
            if call.cut_off_by is not None and not context.cancelled():
                status = status_of(call.cut_off_by, call.request_id)
            elif is_being_cancelled():
                code = grpc.StatusCode.CANCELLED
                raise
            else:
                given_up = CallError(grpc.StatusCode.UNAVAILABLE, "the call was given up")
                status = status_of(given_up, call.request_id)
            code = status.code
            await _abort(call, context, status, error)
            code = grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            status = status_of(error, call.request_id)
            code = status.code
            if isinstance(error, QuotaError | FieldError) and error.limit:
                self._metrics.count(LIMIT_REFUSALS, call.tenant, error.limit)
            await _abort(call, context, status, error)
            code = grpc.StatusCode.CANCELLED
            raise asyncio.CancelledError from error
        finally:
            self._live.leave(call)
            self._metrics.count(CHARGED_TOKENS, call.tenant, amount=call.charge.close(by_client=code in _CLIENTS_ENDS))
            self._metrics.count(CALLS_ENDED, method, call.tenant, code.name)
            call.trace.end(call, code)
            log_call(call, code)


async def _abort(call: Call, context: Context, status: ErrorStatus, error: BaseException) -> None:
    """Send a status, and raise what gRPC raises then. Returns only where nothing can be sent any more.

    That is so when the client went away, or ran into its deadline, and this task has not been told yet; and when the
    call was cut off amid its first write, which gRPC goes on with: the server's own end is told to its client then.
    """
    is_unsent = isinstance(error, grpc.aio.InternalError)
    if not (status.is_expected or is_unsent):
        _log_fault(call, error)
    try:
        await context.abort(status.code, status.message, status.metadata)
    except grpc.aio.AbortError:  # what it raises when the status was sent
        if is_unsent:
            _log_fault(call, error)
        raise
    except grpc.aio.InternalError:
        return


def _log_fault(call: Call, error: BaseException) -> None:
    logger.error("%s request=%s failed", call.method, call.request_id, exc_info=error)


def _own_or_new(request_id: str) -> str:
    try:
        check_request_id(request_id)
    except FieldError:
        # The call is about to be refused for it; a name in the refusal still helps.
        request_id = ""
    return request_id or uuid.uuid4().hex
