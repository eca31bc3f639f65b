from prefixgate.proto import gateway_pb2 as _gateway_pb2
from prefixgate.proto import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotPart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SNAPSHOT_PART_NONE: _ClassVar[SnapshotPart]
    SNAPSHOT_PART_SOME: _ClassVar[SnapshotPart]
    SNAPSHOT_PART_LAST: _ClassVar[SnapshotPart]
SNAPSHOT_PART_NONE: SnapshotPart
SNAPSHOT_PART_SOME: SnapshotPart
SNAPSHOT_PART_LAST: SnapshotPart

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelDescription(_message.Message):
    __slots__ = ("model", "fingerprint", "vocabulary_size", "eos_ids", "context_length", "block_size", "max_call_tokens", "hash_key_fingerprint", "incarnation", "tokenizer", "chat_template", "template_tokens", "text_digest", "protocol_version")
    class TemplateTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CALL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_KEY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: str
    vocabulary_size: int
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    context_length: int
    block_size: int
    max_call_tokens: int
    hash_key_fingerprint: bytes
    incarnation: str
    tokenizer: bytes
    chat_template: str
    template_tokens: _containers.ScalarMap[str, str]
    text_digest: bytes
    protocol_version: int
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., eos_ids: _Optional[_Iterable[int]] = ..., context_length: _Optional[int] = ..., block_size: _Optional[int] = ..., max_call_tokens: _Optional[int] = ..., hash_key_fingerprint: _Optional[bytes] = ..., incarnation: _Optional[str] = ..., tokenizer: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., template_tokens: _Optional[_Mapping[str, str]] = ..., text_digest: _Optional[bytes] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("first_number", "events", "snapshot", "load")
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    first_number: int
    events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    snapshot: SnapshotPart
    load: WorkerLoad
    def __init__(self, first_number: _Optional[int] = ..., events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ..., snapshot: _Optional[_Union[SnapshotPart, str]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared", "flushed")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_FIELD_NUMBER: _ClassVar[int]
    stored: TenantBlocks
    removed: TenantBlocks
    cleared: str
    flushed: TenantBlocks
    def __init__(self, stored: _Optional[_Union[TenantBlocks, _Mapping]] = ..., removed: _Optional[_Union[TenantBlocks, _Mapping]] = ..., cleared: _Optional[str] = ..., flushed: _Optional[_Union[TenantBlocks, _Mapping]] = ...) -> None: ...

class TenantBlocks(_message.Message):
    __slots__ = ("tenant", "hashes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    hashes: bytes
    def __init__(self, tenant: _Optional[str] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "draining")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    draining: bool
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    cancel: Cancel
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("gateway", "protocol_version", "incarnation", "hash_key_fingerprint")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HASH_KEY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    protocol_version: int
    incarnation: str
    hash_key_fingerprint: bytes
    def __init__(self, gateway: _Optional[str] = ..., protocol_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., hash_key_fingerprint: _Optional[bytes] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("call_id", "tenant", "request_id", "token_ids", "sampling", "n", "cache", "deadline_seconds", "priority", "time_limit_ms", "prefill_only", "traceparent")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ONLY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    tenant: str
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _generation_pb2.SamplingParams
    n: int
    cache: _generation_pb2.CacheControl
    deadline_seconds: float
    priority: int
    time_limit_ms: int
    prefill_only: bool
    traceparent: str
    def __init__(self, call_id: _Optional[int] = ..., tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., n: _Optional[int] = ..., cache: _Optional[_Union[_generation_pb2.CacheControl, _Mapping]] = ..., deadline_seconds: _Optional[float] = ..., priority: _Optional[int] = ..., time_limit_ms: _Optional[int] = ..., prefill_only: _Optional[bool] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("call_id", "output")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    output: int
    def __init__(self, call_id: _Optional[int] = ..., output: _Optional[int] = ...) -> None: ...

class StepMessage(_message.Message):
    __slots__ = ("step", "events")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    events: _containers.RepeatedCompositeFieldContainer[CallEvent]
    def __init__(self, step: _Optional[int] = ..., events: _Optional[_Iterable[_Union[CallEvent, _Mapping]]] = ...) -> None: ...

class CallEvent(_message.Message):
    __slots__ = ("call_id", "outputs", "end", "prompt_logprobs", "prefill")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    outputs: _containers.RepeatedCompositeFieldContainer[OutputTokens]
    end: CallEnd
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    prefill: Prefill
    def __init__(self, call_id: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[OutputTokens, _Mapping]]] = ..., end: _Optional[_Union[CallEnd, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("cached_tokens", "computed_tokens")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    computed_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ...) -> None: ...

class OutputTokens(_message.Message):
    __slots__ = ("index", "token_ids", "finish_reason", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _generation_pb2.FinishReason
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprob]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprob, _Mapping]]] = ...) -> None: ...

class CallEnd(_message.Message):
    __slots__ = ("code", "message", "usage", "retry_seconds", "field")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    usage: _generation_pb2.Usage
    retry_seconds: float
    field: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., retry_seconds: _Optional[float] = ..., field: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class CachedPrompt(_message.Message):
    __slots__ = ("tenant", "salt", "token_ids")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    salt: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tenant: _Optional[str] = ..., salt: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PinCommand(_message.Message):
    __slots__ = ("prompt", "ttl_seconds")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    prompt: CachedPrompt
    ttl_seconds: float
    def __init__(self, prompt: _Optional[_Union[CachedPrompt, _Mapping]] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class UnpinCommand(_message.Message):
    __slots__ = ("tenant", "pin_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    pin_id: str
    def __init__(self, tenant: _Optional[str] = ..., pin_id: _Optional[str] = ...) -> None: ...

class ListPinsCommand(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class FlushCommand(_message.Message):
    __slots__ = ("tenant", "salt")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    salt: str
    def __init__(self, tenant: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class SurveyRequest(_message.Message):
    __slots__ = ("max_cells",)
    MAX_CELLS_FIELD_NUMBER: _ClassVar[int]
    max_cells: int
    def __init__(self, max_cells: _Optional[int] = ...) -> None: ...

class WorkerSurvey(_message.Message):
    __slots__ = ("incarnation", "pool", "running_calls", "waiting_calls", "oldest_call_seconds", "queried_tokens", "hit_tokens", "generated_tokens", "misses", "evicted_blocks", "copied_blocks", "preemptions", "tenants", "map")
    class MissesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_CALLS_FIELD_NUMBER: _ClassVar[int]
    WAITING_CALLS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_CALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    pool: PoolCounts
    running_calls: int
    waiting_calls: int
    oldest_call_seconds: float
    queried_tokens: int
    hit_tokens: int
    generated_tokens: int
    misses: _containers.ScalarMap[str, int]
    evicted_blocks: int
    copied_blocks: int
    preemptions: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantSurvey]
    map: PoolMap
    def __init__(self, incarnation: _Optional[str] = ..., pool: _Optional[_Union[PoolCounts, _Mapping]] = ..., running_calls: _Optional[int] = ..., waiting_calls: _Optional[int] = ..., oldest_call_seconds: _Optional[float] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., misses: _Optional[_Mapping[str, int]] = ..., evicted_blocks: _Optional[int] = ..., copied_blocks: _Optional[int] = ..., preemptions: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantSurvey, _Mapping]]] = ..., map: _Optional[_Union[PoolMap, _Mapping]] = ...) -> None: ...

class PoolCounts(_message.Message):
    __slots__ = ("total", "free", "active", "cached", "pinned")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    active: int
    cached: int
    pinned: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., active: _Optional[int] = ..., cached: _Optional[int] = ..., pinned: _Optional[int] = ...) -> None: ...

class TenantSurvey(_message.Message):
    __slots__ = ("tenant", "active_blocks", "cached_blocks", "floor_blocks", "cap_blocks", "running_calls", "waiting_calls", "queried_tokens", "hit_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_CALLS_FIELD_NUMBER: _ClassVar[int]
    WAITING_CALLS_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    active_blocks: int
    cached_blocks: int
    floor_blocks: int
    cap_blocks: int
    running_calls: int
    waiting_calls: int
    queried_tokens: int
    hit_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., active_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., floor_blocks: _Optional[int] = ..., cap_blocks: _Optional[int] = ..., running_calls: _Optional[int] = ..., waiting_calls: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class PoolMap(_message.Message):
    __slots__ = ("blocks_per_cell", "stride", "free", "active", "cached", "pinned", "holders", "owner", "sharing")
    BLOCKS_PER_CELL_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    blocks_per_cell: int
    stride: int
    free: _containers.RepeatedScalarFieldContainer[int]
    active: _containers.RepeatedScalarFieldContainer[int]
    cached: _containers.RepeatedScalarFieldContainer[int]
    pinned: _containers.RepeatedScalarFieldContainer[int]
    holders: _containers.RepeatedScalarFieldContainer[int]
    owner: _containers.RepeatedScalarFieldContainer[int]
    sharing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocks_per_cell: _Optional[int] = ..., stride: _Optional[int] = ..., free: _Optional[_Iterable[int]] = ..., active: _Optional[_Iterable[int]] = ..., cached: _Optional[_Iterable[int]] = ..., pinned: _Optional[_Iterable[int]] = ..., holders: _Optional[_Iterable[int]] = ..., owner: _Optional[_Iterable[int]] = ..., sharing: _Optional[_Iterable[int]] = ...) -> None: ...
