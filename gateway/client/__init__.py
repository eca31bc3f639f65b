"""A client of the gateway: typed, synchronous and asynchronous, light to import.

The one package whose ``__init__`` is not empty: it is what applications import, and behind it stands nothing but gRPC
and the messages.
"""

from prefixgate.gateway.client.answer import Answer, Delta, FinishReason, Output, TokenLogprob, Usage
from prefixgate.gateway.client.async_client import AsyncClient
from prefixgate.gateway.client.async_stream import AsyncAnswerStream, AsyncWarmStream
from prefixgate.gateway.client.attempts import RetryPolicy
from prefixgate.gateway.client.client import Client
from prefixgate.gateway.client.errors import (
    BrokenStreamError,
    CallCancelledError,
    DeadlineExceededError,
    FieldViolation,
    GatewayError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from prefixgate.gateway.client.options import CacheMode, GenerateOptions, LookupOptions, WarmOptions
from prefixgate.gateway.client.prompt import Conversation, Message, Prompt
from prefixgate.gateway.client.stream import AnswerStream, WarmStream
from prefixgate.gateway.client.tls import Tls

__all__ = [
    "Answer",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncClient",
    "AsyncWarmStream",
    "BrokenStreamError",
    "CacheMode",
    "CallCancelledError",
    "Client",
    "Conversation",
    "DeadlineExceededError",
    "Delta",
    "FieldViolation",
    "FinishReason",
    "GatewayError",
    "GenerateOptions",
    "InvalidRequestError",
    "LookupOptions",
    "Message",
    "NotFoundError",
    "Output",
    "OverloadedError",
    "PermissionDeniedError",
    "Prompt",
    "RetryPolicy",
    "Tls",
    "TokenLogprob",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "WarmOptions",
    "WarmStream",
]
