"""Cache control over two workers: what is asked reaches who holds it, and nothing is said to be done that is not."""

from collections.abc import Iterator

import grpc
import pytest

from prefixgate.proto import gateway_pb2
from tests.integration.fleet import RunningFleet
from tests.integration.tenant import PROMPT_TOKENS, Tenant, new_prompt

MODEL = "witness"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with RunningFleet(tmp_path_factory.mktemp("fleet"), [MODEL, MODEL], "--blocks=64") as running:
        yield running


@pytest.fixture
def acme(fleet: RunningFleet) -> Iterator[Tenant]:
    with fleet.channel() as channel:
        yield Tenant(channel, "acme")


def spread(tenant: Tenant) -> list[str]:
    """Warm prompts that have nothing in common, until both workers hold some."""
    prompts = []
    for _ in range(30):
        prompts.append(new_prompt())
        tenant.warm(prompts[-1])
        lives = {tenant.explain(prompt).incarnation for prompt in prompts}
        if len(lives) == 2:
            return prompts
    raise AssertionError("all went to one worker")


def test_what_each_worker_holds_is_found_pinned_listed_and_flushed(acme: Tenant) -> None:
    prompts = spread(acme)
    chosen = [prompts[0], prompts[-1]]
    assert [acme.explain(prompt).cached_tokens for prompt in prompts] == [PROMPT_TOKENS - 1] * len(prompts)
    pins = [acme.pin(prompt) for prompt in chosen]
    assert len({pin.incarnation for pin in pins}) == 2
    assert [pin.incarnation for pin in pins] == [acme.explain(prompt).incarnation for prompt in chosen]
    assert sorted(acme.pin_ids()) == sorted(pin.pin_id for pin in pins)
    assert (acme.stats().pins, acme.stats().pinned_blocks) == (2, 12)
    acme.unpin(pins[1].pin_id)
    assert acme.pin_ids() == [pins[0].pin_id]
    done = acme.flush()
    assert done.ended_pins == 1
    assert done.freed_blocks >= 6 * len(prompts)
    assert {acme.explain(prompt).miss_reason for prompt in prompts} == {gateway_pb2.MISS_REASON_NEVER_SEEN}


def test_a_worker_that_is_away_is_not_said_to_be_flushed(fleet: RunningFleet, acme: Tenant) -> None:
    prompts = spread(acme)
    fleet.workers[1].kill()
    fleet.until("up", 1.0, 0.0)
    code, details = acme.refusal("Flush", gateway_pb2.FlushRequest())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "flushed at 1 workers; 1 could not be reached" in details
    assert {acme.explain(prompt).cached_tokens for prompt in prompts} == {0}
    fleet.restart(1, MODEL)
    assert acme.flush() == gateway_pb2.FlushResponse()
