"""The table of fields: what each field of each request must keep to, on both hops.

The gateway checks what a client sent, and the worker checks again what a gateway sent; messages that both hops share
have the same rows on both. `docs/api.md` is made from this table and the comments of the `.proto` files. What depends
on the length of an encoded prompt is in ``proto.checks``.
"""

from collections.abc import Mapping
from typing import Any

import grpc

from prefixgate.proto import gateway_pb2, generation_pb2, worker_pb2
from prefixgate.proto.fields import (
    AnyValue,
    Bound,
    Bounds,
    EnumName,
    IdMap,
    Ids,
    Items,
    Message,
    Number,
    OneOf,
    Row,
    Text,
    invalid,
)

MAX_STOP_IDS = 64
MAX_MESSAGES = 4096
MAX_ROLE_BYTES = 64
MAX_STOP_BYTES = 1024
MAX_TTL_SECONDS = 86_400
MAX_MAP_CELLS = 4096
MAX_TRACEPARENT_BYTES = 55
"""Of the only version that there is."""

_MAX_CHARACTER_BYTES = 4
"""Of UTF-8."""
_ONE = Number(1, 1)
_KEEPING = (generation_pb2.CACHE_MODE_UNSPECIFIED, generation_pb2.CACHE_MODE_DEFAULT)
_NOT_FOUND: int = grpc.StatusCode.NOT_FOUND.value[0]
_FAILED_PRECONDITION: int = grpc.StatusCode.FAILED_PRECONDITION.value[0]


def _check_choice(path: str, sampling: generation_pb2.SamplingParams, bounds: Bounds) -> None:
    """Check that a token is left to sample, also while none may end the output."""
    allowed, excluded = set(sampling.allowed_ids), set(sampling.banned_ids)
    if sampling.min_tokens:
        excluded.update(sampling.stop_ids, () if sampling.ignore_eos else bounds.eos_ids)
    if not (allowed - excluded if allowed else bounds.values[Bound.VOCABULARY_SIZE] - len(excluded)):
        raise invalid(
            f"{path}.{'allowed' if allowed else 'banned'}_ids",
            "leave no token to sample: every one is not allowed, or banned, or would end the output before min_tokens",
        )


def _check_chat_size(path: str, chat: gateway_pb2.Chat, bounds: Bounds) -> None:
    """Check that all that was said is not too long to be encoded."""
    most = bounds.values[Bound.PROMPT_BYTES]
    if _MAX_CHARACTER_BYTES * sum(len(message.content) for message in chat.messages) <= most:
        return  # by far most chats, which need not be encoded to be counted
    size = sum(len(message.content.encode()) for message in chat.messages)
    if size > most:
        limit = bounds.settings.get(Bound.PROMPT_BYTES, "")
        raise invalid(f"{path}.messages", f"hold {size} bytes of content; must be at most {most}", limit)


def _check_kept(path: str, request: gateway_pb2.WarmRequest, bounds: Bounds) -> None:
    """Check that what is computed is kept, as nothing else comes of it."""
    if request.cache.mode not in _KEEPING:
        name = generation_pb2.CacheMode.Name(request.cache.mode)
        raise invalid("cache.mode", f"{name} keeps nothing; must be CACHE_MODE_DEFAULT")


def _check_pinned(path: str, cache: generation_pb2.CacheControl, bounds: Bounds) -> None:
    """Check that what is to be pinned is kept in the first place."""
    if cache.HasField("ttl_seconds") and cache.mode not in _KEEPING:
        name = generation_pb2.CacheMode.Name(cache.mode)
        raise invalid(f"{path}.ttl_seconds", f"{cache.ttl_seconds:g} with {name}, which keeps nothing; leave it unset")


def _check_prefill_only(path: str, submit: worker_pb2.Submit, bounds: Bounds) -> None:
    if submit.prefill_only:
        _ONE.check("n", submit.n, bounds)
        _ONE.check("sampling.max_tokens", submit.sampling.max_tokens, bounds)


def _oneof(message: Any, name: str) -> Row:
    return Row(OneOf([field.name for field in message.DESCRIPTOR.oneofs_by_name[name].fields]), required=True)


SAMPLING = Message(
    {
        "temperature": Row(Number(0, 100), "0"),
        "top_k": Row(Number(1), "no limit", "tokens"),
        "top_p": Row(Number(0, 1, above_low=True), "1", "probability"),
        "seed": Row(AnyValue(), "random"),
        "max_tokens": Row(Number(1), "`default_max_tokens`", "tokens"),
        "stop_ids": Row(Ids(0, MAX_STOP_IDS), "none"),
        "ignore_eos": Row(AnyValue(), "false"),
        "min_p": Row(Number(0, 1), "0", "share"),
        "min_tokens": Row(Number(0), "0", "tokens"),
        "repetition_penalty": Row(Number(0.01, 10), "1", "factor"),
        "presence_penalty": Row(Number(-2, 2), "0", "logit"),
        "frequency_penalty": Row(Number(-2, 2), "0", "logit"),
        "logit_bias": Row(IdMap(Bound.LOGIT_BIASES, Number(-100, 100)), "none", "logit"),
        "allowed_ids": Row(Ids(0, Bound.VOCABULARY_SIZE), "all"),
        "banned_ids": Row(Ids(0, Bound.VOCABULARY_SIZE), "none"),
        "logprobs": Row(Number(0, 20), "none", "tokens"),
        "prompt_logprobs": Row(Number(0, 20), "none", "tokens"),
    },
    _check_choice,
)

CACHE = Message(
    {
        "mode": Row(EnumName("CacheMode", generation_pb2.CacheMode.values()), "CACHE_MODE_DEFAULT"),
        "salt": Row(Text(), "empty"),
        "ttl_seconds": Row(Number(0, MAX_TTL_SECONDS, above_low=True), "no pin", "seconds"),
        "retention": Row(Number(0, 100), "what the blocks have"),
    },
    _check_pinned,
)

CHAT_MESSAGE = Message(
    {
        "role": Row(Text(1, MAX_ROLE_BYTES)),
        "content": Row(Text(0, Bound.PROMPT_BYTES)),
    }
)
CHAT = Message({"messages": Row(Items(1, MAX_MESSAGES, "messages", CHAT_MESSAGE))}, _check_chat_size)
TOKEN_IDS = Message({"ids": Row(Ids(1, Bound.PROMPT_TOKENS))})

_REQUEST_ID = Row(Text(is_printable_ascii=True), "made by the gateway")
_PRIORITY = Row(Number(-100, 100), "0")
_TENANT = Row(Text(1))
_TIME_LIMIT = Row(Number(1), "none", "milliseconds")
_PROMPT = Row(Text(0, Bound.PROMPT_BYTES))

_MODEL = Row(AnyValue("the served model's name"), "the served model", code=_NOT_FOUND)
_SALT = Row(Text(), "empty")
_PIN_ID = Row(Text(1), code=_NOT_FOUND)
_TTL = Row(Number(0, MAX_TTL_SECONDS, above_low=True), unit="seconds")

GENERATE = Message(
    {
        "request_id": _REQUEST_ID,
        "model": _MODEL,
        "n": Row(Number(1, Bound.OUTPUTS), "1", "outputs"),
        "stop": Row(Items(0, Bound.STOPS, "strings", Text(1, MAX_STOP_BYTES)), "none"),
        "cache": Row(CACHE),
        "sampling": Row(SAMPLING),
        "time_limit_ms": _TIME_LIMIT,
        "priority": _PRIORITY,
        "input": _oneof(gateway_pb2.GenerateRequest, "input"),
        "prompt": _PROMPT,
        "token_ids": Row(TOKEN_IDS),
        "chat": Row(CHAT),
    }
)

TOKENIZE = Message(
    {
        "input": _oneof(gateway_pb2.TokenizeRequest, "input"),
        "prompt": _PROMPT,
        "chat": Row(CHAT),
    }
)

EXPLAIN = Message(
    {
        "request_id": _REQUEST_ID,
        "model": _MODEL,
        "salt": _SALT,
        "input": _oneof(gateway_pb2.ExplainRequest, "input"),
        "prompt": _PROMPT,
        "token_ids": Row(TOKEN_IDS),
        "chat": Row(CHAT),
    }
)

WARM = Message(
    {
        "request_id": _REQUEST_ID,
        "model": _MODEL,
        "cache": Row(CACHE),
        "priority": _PRIORITY,
        "input": _oneof(gateway_pb2.WarmRequest, "input"),
        "prompt": _PROMPT,
        "token_ids": Row(TOKEN_IDS),
        "chat": Row(CHAT),
    },
    _check_kept,
)

PIN = Message({**EXPLAIN.rows, "ttl_seconds": _TTL})

SUBMIT = Message(
    {
        "call_id": Row(AnyValue("any that is not in use on this stream"), code=grpc.StatusCode.ALREADY_EXISTS.value[0]),
        "tenant": _TENANT,
        "request_id": Row(Text(), "empty"),
        "token_ids": Row(Ids(1, Bound.PROMPT_TOKENS)),
        "n": Row(Number(1, Bound.OUTPUTS), unit="outputs"),
        "sampling": Row(SAMPLING, required=True),
        "cache": Row(CACHE),
        "deadline_seconds": Row(Number(0, above_low=True), "none", "seconds"),
        "priority": _PRIORITY,
        "time_limit_ms": _TIME_LIMIT,
        "prefill_only": Row(AnyValue(), "false"),
        "traceparent": Row(Text(high=MAX_TRACEPARENT_BYTES), "not traced"),
    },
    _check_prefill_only,
)

_INCARNATION = Row(AnyValue("the worker's own"), code=_FAILED_PRECONDITION)
HELLO = Message(
    {
        "gateway": Row(Text(), "empty"),
        "protocol_version": Row(AnyValue("the worker's own"), code=_FAILED_PRECONDITION),
        "incarnation": _INCARNATION,
        "hash_key_fingerprint": Row(AnyValue("the worker's own"), code=_FAILED_PRECONDITION),
    }
)

CANCEL = Message(
    {
        "call_id": Row(AnyValue("any; one that is not live is ignored")),
        "output": Row(AnyValue("any; one that is not live is ignored"), "the whole call"),
    }
)

CACHED_PROMPT = Message({"tenant": _TENANT, "salt": _SALT, "token_ids": Row(Ids(1, Bound.PROMPT_TOKENS))})

TABLE: Mapping[str, Message] = {
    "GenerateRequest": GENERATE,
    "TokenizeRequest": TOKENIZE,
    "StatsRequest": Message({}),
    "ExplainRequest": EXPLAIN,
    "WarmRequest": WARM,
    "PinRequest": PIN,
    "UnpinRequest": Message({"pin_id": _PIN_ID}),
    "ListPinsRequest": Message({}),
    "FlushRequest": Message({"salt": Row(Text(), "all salts")}),
    "SamplingParams": SAMPLING,
    "CacheControl": CACHE,
    "ChatMessage": CHAT_MESSAGE,
    "Chat": CHAT,
    "TokenIds": TOKEN_IDS,
    "DescribeRequest": Message({}),
    "EventsRequest": Message({"incarnation": _INCARNATION}),
    "ReportRequest": Message({"tenant": Row(Text(), "none")}),
    "SurveyRequest": Message({"max_cells": Row(Number(0, MAX_MAP_CELLS), "no map", "cells")}),
    "SessionRequest": Message({"hello": Row(HELLO), "submit": Row(SUBMIT), "cancel": Row(CANCEL)}),
    "Hello": HELLO,
    "Submit": SUBMIT,
    "Cancel": CANCEL,
    "CachedPrompt": CACHED_PROMPT,
    "PinCommand": Message({"prompt": Row(CACHED_PROMPT, required=True), "ttl_seconds": _TTL}),
    "UnpinCommand": Message({"tenant": _TENANT, "pin_id": _PIN_ID}),
    "ListPinsCommand": Message({"tenant": _TENANT}),
    "FlushCommand": Message({"tenant": _TENANT, "salt": Row(Text(), "all salts")}),
}
"""By the message's name."""
