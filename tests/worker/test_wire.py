"""Protocol messages become what the engine works with, with every default filled in."""

from collections.abc import Sequence

import pytest

from prefixgate.cache.admission import CacheMode
from prefixgate.proto import generation_pb2, worker_pb2
from prefixgate.worker.outbox import News
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
    assert (request.cache_mode, request.retention) == (CacheMode.DEFAULT, None)


def test_present_fields_are_taken_as_they_are_zero_included() -> None:
    message = submit(temperature=0.5, top_k=3, top_p=0.25, seed=0)
    message.sampling.stop_ids.extend([4, 4, 9])
    message.deadline_seconds = 1.5
    request = read_submit(message, SPEC, Silence())
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 3, 0.25, 0)
    assert sampling.stop_ids == {4, 9}
    assert request.deadline_seconds == 1.5


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
