"""Protocol messages to the engine's objects and back."""

import secrets

from grpc import StatusCode

from prefixgate.cache.admission import CacheMode
from prefixgate.cache.hashing import CacheScope
from prefixgate.proto import generation_pb2, worker_pb2
from prefixgate.proto.transport import PROTOCOL_VERSION, text_digest
from prefixgate.worker.logprobs import TokenLogprob
from prefixgate.worker.model_runner import ModelSpec
from prefixgate.worker.outbox import News, Sink
from prefixgate.worker.report import EngineReport
from prefixgate.worker.request import End, Request, SamplingParams, Usage
from prefixgate.worker.sequence import FinishReason
from prefixgate.worker.token_set import TokenSet

_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.TIME_LIMIT: generation_pb2.FINISH_REASON_TIME_LIMIT,
}

_MODES = {
    generation_pb2.CACHE_MODE_UNSPECIFIED: CacheMode.DEFAULT,
    generation_pb2.CACHE_MODE_DEFAULT: CacheMode.DEFAULT,
    generation_pb2.CACHE_MODE_READ_ONLY: CacheMode.READ_ONLY,
    generation_pb2.CACHE_MODE_BYPASS: CacheMode.BYPASS,
}


def describe(
    spec: ModelSpec, *, block_size: int, max_call_blocks: int, hash_key_fingerprint: bytes, incarnation: str
) -> worker_pb2.ModelDescription:
    """Tell a gateway all that it needs to serve the model."""
    text = spec.text
    return worker_pb2.ModelDescription(
        model=spec.name,
        fingerprint=spec.fingerprint,
        vocabulary_size=spec.vocabulary_size,
        eos_ids=spec.eos_ids,
        context_length=spec.context_length,
        block_size=block_size,
        max_call_tokens=max_call_blocks * block_size,
        hash_key_fingerprint=hash_key_fingerprint,
        incarnation=incarnation,
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        template_tokens=text.template_tokens,
        text_digest=text_digest(text.tokenizer, text.chat_template),
        protocol_version=PROTOCOL_VERSION,
    )


def scope_of(spec: ModelSpec, tenant: str, salt: str) -> CacheScope:
    """Tell with whom a call shares. The tenant is what the gateway verified; the salt can only narrow it."""
    return CacheScope(tenant, f"{spec.name}@{spec.fingerprint}", salt=salt)


def read_submit(submit: worker_pb2.Submit, spec: ModelSpec, sink: Sink) -> Request:
    """Make a request of a checked submit, with every default filled in."""
    return Request(
        token_ids=list(submit.token_ids),
        scope=scope_of(spec, submit.tenant, submit.cache.salt),
        sampling=_read_sampling(submit.sampling),
        sink=sink,
        call_id=submit.call_id,
        request_id=submit.request_id,
        traceparent=submit.traceparent,
        n=submit.n,
        deadline_seconds=submit.deadline_seconds if submit.HasField("deadline_seconds") else None,
        time_limit_seconds=submit.time_limit_ms / 1e3 if submit.HasField("time_limit_ms") else None,
        priority=submit.priority,
        cache_mode=_cache_mode(submit),
        retention=submit.cache.retention if submit.cache.HasField("retention") else None,
        pin_seconds=submit.cache.ttl_seconds if submit.cache.HasField("ttl_seconds") else None,
        prefill_only=submit.prefill_only,
    )


def _cache_mode(submit: worker_pb2.Submit) -> CacheMode:
    # What is cached is not computed, and has no logits. Nor is anything kept, so that such a call's numbers depend on
    # nobody else's blocks: publishing could exchange one of its own for an equal one.
    return CacheMode.BYPASS if submit.sampling.HasField("prompt_logprobs") else _MODES[submit.cache.mode]


def _read_sampling(sampling: generation_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(64),
        stop_ids=frozenset(sampling.stop_ids),
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(sampling.logit_bias.items()),
        allowed_ids=TokenSet.of(sampling.allowed_ids),
        banned_ids=TokenSet.of(sampling.banned_ids),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )


def add_news(event: worker_pb2.CallEvent, news: News) -> None:
    """Add what a call gained in one step to what an event tells of it already."""
    outputs = {output.index: output for output in event.outputs}
    for index in sorted(news.token_ids.keys() | news.finished.keys()):
        output = outputs.get(index) or event.outputs.add(index=index)
        output.token_ids.extend(news.token_ids.get(index, ()))
        output.logprobs.extend(map(_logprob, news.logprobs.get(index, ())))
        if index in news.finished:
            output.finish_reason = _REASONS[news.finished[index]]
    event.prompt_logprobs.extend(map(_logprob, news.prompt_logprobs))
    if news.has_prefilled:
        event.prefill.cached_tokens = news.request.usage.cached_tokens
        event.prefill.computed_tokens = news.request.prefilled_tokens
    if news.end is not None:
        write_end(event, news.end, news.request.usage)


def _logprob(found: TokenLogprob) -> generation_pb2.TokenLogprob:
    return generation_pb2.TokenLogprob(
        token_id=found.token_id,
        logprob=found.logprob,
        rank=found.rank,
        top=[generation_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in found.top],
    )


def write_end(event: worker_pb2.CallEvent, end: End, usage: Usage | None = None) -> None:
    """Make an event a call's last one."""
    event.end.code = code_number(end.code)
    event.end.message = end.message
    event.end.retry_seconds = end.retry_seconds
    event.end.field = end.field
    if usage is not None:
        event.end.usage.CopyFrom(
            generation_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                block_hit_tokens=usage.block_hit_tokens,
                partial_copy_tokens=usage.partial_copy_tokens,
                claimed_tail_tokens=usage.claimed_tail_tokens,
                copied_blocks=usage.copied_blocks,
                completion_tokens=usage.completion_tokens,
                queue_seconds=usage.queue_seconds,
                first_token_seconds=usage.first_token_seconds,
                pinned_tokens=usage.pinned_tokens,
            )
        )


def code_number(code: StatusCode) -> int:
    """Return the number by which a status travels."""
    number: int = code.value[0]
    return number


def write_load(report: EngineReport, *, draining: bool) -> worker_pb2.WorkerLoad:
    """Tell how much an engine has to do."""
    return worker_pb2.WorkerLoad(running=report.running_sequences, waiting=report.waiting_sequences, draining=draining)
