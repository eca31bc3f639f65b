"""What a call may ask for beside its prompt: the fields of the requests, by name."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

from google.protobuf.message import Message

from prefixgate.proto import generation_pb2

CacheMode = Literal["default", "read_only", "bypass"]

# Parts whose own fields are the options, the prompt, and "mode", which would not say of what beside all the others.
_NOT_OPTIONS = frozenset({"sampling", "cache", "mode", "prompt", "token_ids", "chat"})


class LookupOptions(TypedDict, total=False):
    """Options of ``explain`` and ``pin``, as ``gateway.proto`` explains them."""

    model: str
    salt: str
    request_id: str


class WarmOptions(LookupOptions, total=False):
    """Options of ``warm``, as ``gateway.proto`` explains them."""

    priority: int
    cache_mode: CacheMode
    ttl_seconds: float
    retention: int


class GenerateOptions(WarmOptions, total=False):
    """Options of ``generate`` and ``complete``, as ``gateway.proto`` and ``generation.proto`` explain them."""

    n: int
    stop: Sequence[str]
    time_limit_ms: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_ids: Sequence[int]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_ids: Sequence[int]
    banned_ids: Sequence[int]
    logprobs: int
    prompt_logprobs: int


def set_options(request: Message, options: LookupOptions) -> None:
    """Write options into a request: each into the field of its name, of the request itself, its sampling or its cache.

    Raises TypeError for an option that this kind of call has not, and TypeError or ValueError for a value that the
    field cannot hold. Bounds are the gateway's to check.
    """
    for name, value in options.items():
        message, field = _place(request, name)
        try:
            _set(message, field, value)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{name}: {value!r} is not allowed: {error}") from error


def _place(request: Message, name: str) -> tuple[Message, str]:
    own = request.DESCRIPTOR.fields_by_name
    if name in _NOT_OPTIONS:
        raise TypeError(f"{name}: there is no such option of this call")
    field = "mode" if name == "cache_mode" else name
    if field in own:
        return request, field
    for part in ("sampling", "cache"):
        inner = own[part].message_type if part in own else None
        if inner is not None and field in inner.fields_by_name:
            return cast("Message", getattr(request, part)), field
    raise TypeError(f"{name}: there is no such option of this call")


def _set(message: Message, field: str, value: Any) -> None:
    if field == "mode":
        setattr(message, field, generation_pb2.CacheMode.Value(f"CACHE_MODE_{value.upper()}"))
    elif field == "logit_bias":
        getattr(message, field).update(value)
    elif message.DESCRIPTOR.fields_by_name[field].is_repeated:
        # Text is a sequence too, of its characters; nobody means that.
        if isinstance(value, str):
            raise TypeError("a list is wanted")
        getattr(message, field).extend(value)
    else:
        setattr(message, field, value)
