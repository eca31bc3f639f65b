"""Protocol messages become what the engine works with, with every default filled in."""

from collections.abc import Sequence

import pytest

from prefixgate.cache.admission import CacheMode
from prefixgate.proto import generation_pb2, worker_pb2
from prefixgate.worker.outbox import News
from prefixgate.worker.token_set import TokenSet
from prefixgate.worker.wire import read_submit
from tests.worker.driver import Driver

SPEC = Driver().runner.spec


class Silence:
    def deliver(self, step: int, news: Sequence[News]) -> None:
        """Hear nothing."""


def submit(**sampling: float) -> worker_pb2.Submit:
    return worker_pb2.Submit(
        call_id=5,
        tenant="acme",
        token_ids=[1, 2],
        n=2,
        sampling=generation_pb2.SamplingParams(max_tokens=7, **sampling),  # type: ignore[arg-type]
    )


def test_absent_fields_take_their_defaults() -> None:
    request = read_submit(submit(), SPEC, Silence())
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (7, 0.0, None, 1.0)
    assert (sampling.stop_ids, sampling.ignore_eos) == (frozenset(), False)
    assert (request.call_id, request.n, request.deadline_seconds) == (5, 2, None)
    assert (request.cache_mode, request.retention, request.priority) == (CacheMode.DEFAULT, None, 0)


def test_present_fields_are_taken_as_they_are_zero_included() -> None:
    message = submit(temperature=0.5, top_k=3, top_p=0.25, seed=0)
    message.sampling.stop_ids.extend([4, 4, 9])
    message.deadline_seconds, message.priority = 1.5, -7
    request = read_submit(message, SPEC, Silence())
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.25, 0)
    assert sampling.stop_ids == {4, 9}
    assert (request.deadline_seconds, request.priority) == (1.5, -7)


def test_sampling_fields_are_told_apart_from_absent_ones() -> None:
    plain = read_submit(submit(), SPEC, Silence()).sampling
    assert not plain.edits_logits
    assert (plain.repetition_penalty, plain.logprobs, plain.prompt_logprobs, plain.min_tokens) == (1.0, None, None, 0)
    message = submit(min_p=0.25, min_tokens=3, repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=2.0)
    message.sampling.logit_bias.update({4: -2.5, 9: 1.0})
    message.sampling.allowed_ids.extend([9, 4, 9])
    message.sampling.banned_ids.append(260)
    message.sampling.logprobs = 0
    sampling = read_submit(message, SPEC, Silence()).sampling
    assert (sampling.min_p, sampling.min_tokens, sampling.logprobs) == (0.25, 3, 0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1.0, 2.0)
    assert dict(sampling.logit_bias) == {4: -2.5, 9: 1.0}
    assert (sampling.allowed_ids, sampling.banned_ids) == (TokenSet.of([4, 9]), TokenSet.of([260]))


def test_a_call_for_prompt_logprobs_leaves_the_cache_alone_whatever_its_mode() -> None:
    message = submit(prompt_logprobs=0)
    message.cache.mode = generation_pb2.CACHE_MODE_READ_ONLY
    assert read_submit(message, SPEC, Silence()).cache_mode is CacheMode.BYPASS


def test_a_time_limit_comes_in_seconds() -> None:
    message = submit()
    assert read_submit(message, SPEC, Silence()).time_limit_seconds is None
    message.time_limit_ms = 1500
    assert read_submit(message, SPEC, Silence()).time_limit_seconds == 1.5


@pytest.mark.parametrize("mode", generation_pb2.CacheMode.values())
def test_every_cache_mode_of_the_protocol_is_one_of_the_cache(mode: generation_pb2.CacheMode) -> None:
    message = submit()
    message.cache.mode, message.cache.retention = mode, 0
    request = read_submit(message, SPEC, Silence())
    name = generation_pb2.CacheMode.Name(mode).removeprefix("CACHE_MODE_").lower()
    assert request.cache_mode.value == name.replace("unspecified", "default")
    assert request.retention == 0


def test_calls_without_a_seed_each_get_one_of_their_own() -> None:
    assert len({read_submit(submit(), SPEC, Silence()).sampling.seed for _ in range(50)}) == 50


def test_who_may_share_depends_on_tenant_model_and_salt_and_on_nothing_else() -> None:
    scopes = set()
    for tenant in ("acme", "bolt"):
        for salt in ("", "a"):
            message = submit()
            message.tenant, message.cache.salt = tenant, salt
            scopes.add(read_submit(message, SPEC, Silence()).scope)
            message.request_id = "another"
            scopes.add(read_submit(message, SPEC, Silence()).scope)
    assert len(scopes) == 4
    assert {scope.model for scope in scopes} == {f"{SPEC.name}@{SPEC.fingerprint}"}
