from prefixgate.proto import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_NONE: _ClassVar[MissReason]
    MISS_REASON_NEVER_SEEN: _ClassVar[MissReason]
    MISS_REASON_EVICTED: _ClassVar[MissReason]
    MISS_REASON_DIVERGED: _ClassVar[MissReason]
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_NONE: MissReason
MISS_REASON_NEVER_SEEN: MissReason
MISS_REASON_EVICTED: MissReason
MISS_REASON_DIVERGED: MissReason

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "token_ids", "chat", "model", "sampling", "n", "stop", "cache", "request_id", "priority", "time_limit_ms")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    token_ids: TokenIds
    chat: Chat
    model: str
    sampling: _generation_pb2.SamplingParams
    n: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    cache: _generation_pb2.CacheControl
    request_id: str
    priority: int
    time_limit_ms: int
    def __init__(self, prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., model: _Optional[str] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., n: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., cache: _Optional[_Union[_generation_pb2.CacheControl, _Mapping]] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., time_limit_ms: _Optional[int] = ...) -> None: ...

class OutputDelta(_message.Message):
    __slots__ = ("index", "text", "token_ids", "finish_reason", "matched_stop", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _generation_pb2.FinishReason
    matched_stop: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., matched_stop: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("usage", "request_id", "model", "incarnation")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    usage: _generation_pb2.Usage
    request_id: str
    model: str
    incarnation: str
    def __init__(self, usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("deltas", "completion", "prompt_logprobs")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[OutputDelta]
    completion: Completion
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, deltas: _Optional[_Iterable[_Union[OutputDelta, _Mapping]]] = ..., completion: _Optional[_Union[Completion, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("index", "text", "token_ids", "finish_reason", "matched_stop", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _generation_pb2.FinishReason
    matched_stop: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., matched_stop: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ("outputs", "completion", "prompt_logprobs")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    completion: Completion
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., completion: _Optional[_Union[Completion, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("prompt", "chat")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    chat: Chat
    def __init__(self, prompt: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("model", "model_fingerprint", "context_length", "tenant", "workers")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_fingerprint: str
    context_length: int
    tenant: TenantStats
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStats]
    def __init__(self, model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., context_length: _Optional[int] = ..., tenant: _Optional[_Union[TenantStats, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStats, _Mapping]]] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("incarnation", "pool", "tenant")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    pool: PoolStats
    tenant: TenantStats
    def __init__(self, incarnation: _Optional[str] = ..., pool: _Optional[_Union[PoolStats, _Mapping]] = ..., tenant: _Optional[_Union[TenantStats, _Mapping]] = ...) -> None: ...

class PoolStats(_message.Message):
    __slots__ = ("block_size", "total_blocks", "pin_limit_blocks")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PIN_LIMIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    total_blocks: int
    pin_limit_blocks: int
    def __init__(self, block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., pin_limit_blocks: _Optional[int] = ...) -> None: ...

class TenantStats(_message.Message):
    __slots__ = ("running_calls", "waiting_calls", "active_blocks", "cached_blocks", "floor_blocks", "cap_blocks", "pins", "pinned_blocks", "queried_tokens", "hit_tokens")
    RUNNING_CALLS_FIELD_NUMBER: _ClassVar[int]
    WAITING_CALLS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running_calls: int
    waiting_calls: int
    active_blocks: int
    cached_blocks: int
    floor_blocks: int
    cap_blocks: int
    pins: int
    pinned_blocks: int
    queried_tokens: int
    hit_tokens: int
    def __init__(self, running_calls: _Optional[int] = ..., waiting_calls: _Optional[int] = ..., active_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., floor_blocks: _Optional[int] = ..., cap_blocks: _Optional[int] = ..., pins: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("prompt", "token_ids", "chat", "model", "salt", "request_id")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    token_ids: TokenIds
    chat: Chat
    model: str
    salt: str
    request_id: str
    def __init__(self, prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., model: _Optional[str] = ..., salt: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "block_hit_tokens", "partial_copy_tokens", "claimed_tail_tokens", "miss_reason", "diverged_at", "continuation_tokens", "incarnation")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_COPY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    DIVERGED_AT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    block_hit_tokens: int
    partial_copy_tokens: int
    claimed_tail_tokens: int
    miss_reason: MissReason
    diverged_at: int
    continuation_tokens: int
    incarnation: str
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., block_hit_tokens: _Optional[int] = ..., partial_copy_tokens: _Optional[int] = ..., claimed_tail_tokens: _Optional[int] = ..., miss_reason: _Optional[_Union[MissReason, str]] = ..., diverged_at: _Optional[int] = ..., continuation_tokens: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("prompt", "token_ids", "chat", "model", "cache", "request_id", "priority")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    token_ids: TokenIds
    chat: Chat
    model: str
    cache: _generation_pb2.CacheControl
    request_id: str
    priority: int
    def __init__(self, prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., model: _Optional[str] = ..., cache: _Optional[_Union[_generation_pb2.CacheControl, _Mapping]] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class WarmProgress(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "computed_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ...) -> None: ...

class WarmResponse(_message.Message):
    __slots__ = ("progress", "completion")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    progress: WarmProgress
    completion: Completion
    def __init__(self, progress: _Optional[_Union[WarmProgress, _Mapping]] = ..., completion: _Optional[_Union[Completion, _Mapping]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("prompt", "token_ids", "chat", "model", "salt", "request_id", "ttl_seconds")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    token_ids: TokenIds
    chat: Chat
    model: str
    salt: str
    request_id: str
    ttl_seconds: float
    def __init__(self, prompt: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., model: _Optional[str] = ..., salt: _Optional[str] = ..., request_id: _Optional[str] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class PinnedPrefix(_message.Message):
    __slots__ = ("pin_id", "salt", "pinned_tokens", "expires_in_seconds", "incarnation")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    salt: str
    pinned_tokens: int
    expires_in_seconds: float
    incarnation: str
    def __init__(self, pin_id: _Optional[str] = ..., salt: _Optional[str] = ..., pinned_tokens: _Optional[int] = ..., expires_in_seconds: _Optional[float] = ..., incarnation: _Optional[str] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pin", "prompt_tokens")
    PIN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    pin: PinnedPrefix
    prompt_tokens: int
    def __init__(self, pin: _Optional[_Union[PinnedPrefix, _Mapping]] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("pin_id",)
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    def __init__(self, pin_id: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinnedPrefix]
    def __init__(self, pins: _Optional[_Iterable[_Union[PinnedPrefix, _Mapping]]] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("salt",)
    SALT_FIELD_NUMBER: _ClassVar[int]
    salt: str
    def __init__(self, salt: _Optional[str] = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("freed_blocks", "ended_pins")
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENDED_PINS_FIELD_NUMBER: _ClassVar[int]
    freed_blocks: int
    ended_pins: int
    def __init__(self, freed_blocks: _Optional[int] = ..., ended_pins: _Optional[int] = ...) -> None: ...
