"""One gateway's stream: names of calls, refusals, cancels, and gateways that read slowly or not at all."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from grpc import StatusCode

from prefixgate.proto import generation_pb2, worker_pb2
from prefixgate.worker.session import MAX_BACKLOG_EVENTS, Session
from tests.worker.driver import Driver, solo, words
from tests.worker.hosting import HANG_SECONDS, GatewaySide, Host, on_host

OK: int = StatusCode.OK.value[0]
CANCELLED: int = StatusCode.CANCELLED.value[0]
INVALID: int = StatusCode.INVALID_ARGUMENT.value[0]
ALREADY_EXISTS: int = StatusCode.ALREADY_EXISTS.value[0]
EXHAUSTED: int = StatusCode.RESOURCE_EXHAUSTED.value[0]
VOCABULARY = Driver().runner.spec.vocabulary_size
EOS_IDS = Driver().runner.spec.eos_ids


class TestNames:
    def test_a_name_in_use_ends_the_second_call_and_not_the_first(self) -> None:
        async def scenario(host: Host) -> None:
            gateway = await host.gateway()
            heard = await gateway.submit(7, words(20), 300)
            await gateway.until(heard, tokens=1)
            await gateway.submit(7, words(30, 2), 3)
            await gateway.until(heard, ends=2)
            assert heard.codes == [ALREADY_EXISTS, OK]
            assert heard.outputs == solo(words(20), 300)

        on_host(scenario)

    def test_one_name_on_two_streams_is_two_calls(self) -> None:
        async def scenario(host: Host) -> None:
            first, second = await host.gateway(), await host.gateway()
            left = await first.submit(1, words(20), 50, request_id="same")
            right = await second.submit(1, words(20, 1), 50, request_id="same")
            await first.until(left, ends=1)
            await second.until(right, ends=1)
            assert (left.outputs, right.outputs) == (solo(words(20), 50), solo(words(20, 1), 50))

        on_host(scenario)

    def test_a_cancel_never_hits_the_next_call_of_its_name(self, scaled: Callable[[int], int]) -> None:
        async def scenario(host: Host) -> None:
            gateway, expected = await host.gateway(), solo(words(20), 3)
            for round_ in range(1, scaled(1000) + 1):
                heard = await gateway.submit(1, words(20, 5), 900)
                await gateway.cancel(1)
                await gateway.cancel(1)
                await gateway.until(heard, ends=2 * round_ - 1)
                heard.outputs.clear()
                await gateway.submit(1, words(20), 3)
                await gateway.until(heard, ends=2 * round_)
                assert heard.codes[-2:] == [CANCELLED, OK]
                assert heard.outputs == expected
                heard.outputs.clear()
            await host.until_idle()
            host.driver.assert_idle()

        on_host(scenario)


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "code", "changes"),
        [
            ("tenant", INVALID, {"tenant": ""}),
            ("token_ids", INVALID, {"token_ids": []}),
            ("token_ids", INVALID, {"token_ids": [1, VOCABULARY]}),
            ("token_ids", INVALID, {"token_ids": [2**32 - 1]}),
            ("token_ids", INVALID, {"token_ids": [1] * 2048}),
            ("n", INVALID, {"n": 0}),
            ("n", INVALID, {"n": 17}),
            ("n", INVALID, {"n": 2**32 - 1}),
            ("sampling.max_tokens", INVALID, {"max_tokens": 0}),
            ("sampling.max_tokens", INVALID, {"max_tokens": 2**63 - 1}),
            ("sampling.max_tokens", INVALID, {"max_tokens": 1100}),
            ("sampling.temperature", INVALID, {"sampling": {"temperature": float("nan")}}),
            ("sampling.top_p", INVALID, {"sampling": {"top_p": 0.0}}),
            ("sampling.top_k", INVALID, {"sampling": {"top_k": -1}}),
            ("sampling.stop_ids", INVALID, {"sampling": {"stop_ids": [VOCABULARY]}}),
            ("deadline_seconds", INVALID, {"deadline_seconds": 0.0}),
            ("sampling.min_p", INVALID, {"sampling": {"min_p": -0.1}}),
            ("sampling.logit_bias", INVALID, {"sampling": {"logit_bias": {VOCABULARY: 1.0}}}),
            ("sampling.allowed_ids", INVALID, {"sampling": {"allowed_ids": EOS_IDS, "min_tokens": 1}}),
            ("sampling.logprobs", INVALID, {"sampling": {"logprobs": 21}}),
            ("time_limit_ms", INVALID, {"time_limit_ms": 0}),
            ("priority", INVALID, {"priority": 101}),
            ("cache.ttl_seconds", INVALID, {"cache": {"ttl_seconds": 0.0}}),
            ("cache.ttl_seconds", INVALID, {"cache": {"ttl_seconds": 1.0, "mode": 2}}),
            # The pool of this worker has no room for pins.
            ("cache.ttl_seconds", INVALID, {"cache": {"ttl_seconds": 1.0}}),
            ("n", INVALID, {"prefill_only": True, "n": 2}),
            ("sampling.max_tokens", INVALID, {"prefill_only": True, "max_tokens": 2}),
        ],
    )
    def test_a_bad_field_ends_its_call_by_name_and_no_other(
        self, field: str, code: int, changes: dict[str, Any]
    ) -> None:
        async def scenario(host: Host) -> None:
            gateway = await host.gateway()
            good = await gateway.submit(1, words(20), 5)
            bad = await gateway.submit(2, **({"token_ids": words(20)} | changes))
            await gateway.until(bad, ends=1)
            await gateway.until(good, ends=1)
            assert bad.codes == [code]
            assert bad.ends[0].message.startswith(f"{field}: ")
            assert bad.ends[0].message.isprintable()
            assert bad.ends[0].field == field
            assert good.outputs == solo(words(20), 5)
            assert host.driver.observations.calls_refused == {"invalid_argument": 1}

        on_host(scenario)

    def test_a_full_queue_ends_the_call_that_is_too_many(self) -> None:
        async def scenario(host: Host) -> None:
            gateway = await host.gateway()
            running = await gateway.submit(1, words(20), 900)
            await gateway.until(running, tokens=1)
            await gateway.submit(2, words(20, 1))
            third = await gateway.submit(3, words(20, 2))
            await gateway.until(third, ends=1)
            assert third.codes == [EXHAUSTED]
            assert "lets 1 calls wait" in third.ends[0].message
            assert third.ends[0].retry_seconds >= 1
            assert not gateway.calls[2].ends

        on_host(scenario, Driver(max_running=1, max_waiting=1))

    def test_a_fault_of_ours_tells_nothing_of_its_cause(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fault(*_: object) -> None:
            raise RuntimeError("secret of another client")

        async def scenario(host: Host) -> None:
            gateway = await host.gateway()
            monkeypatch.setattr(host.driver.engine, "submit", fault)
            heard = await gateway.submit(1, words(20))
            await gateway.until(heard, ends=1)
            assert heard.codes == [StatusCode.INTERNAL.value[0]]
            assert heard.ends[0].message == "the call failed in the worker"

        on_host(scenario)


class TestCancels:
    def test_a_cancelled_call_ends_with_its_usage(self) -> None:
        async def scenario(host: Host) -> None:
            gateway = await host.gateway()
            heard = await gateway.submit(1, words(20), 1500)
            await gateway.until(heard, tokens=3)
            await gateway.cancel(1)
            await gateway.until(heard, ends=1)
            assert heard.codes == [CANCELLED]
            usage = heard.ends[0].usage
            assert usage.completion_tokens == len(heard.outputs[0]) < 1500
            assert usage.prompt_tokens == 20

        on_host(scenario, Driver(num_blocks=128))

    def test_a_stopped_output_ends_with_stop_and_the_others_go_on(self) -> None:
        async def scenario(host: Host) -> None:
            gateway = await host.gateway()
            heard = await gateway.submit(1, words(20), 200, n=3)
            await gateway.until(heard, tokens=3)
            await gateway.cancel(1, output=1)
            await gateway.until(heard, ends=1)
            assert heard.codes == [OK]
            stop, length = generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH
            assert heard.finished == {0: length, 1: stop, 2: length}
            assert len(heard.outputs[1]) < 200

        on_host(scenario)

    def test_a_cancel_of_an_unknown_call_is_ignored(self) -> None:
        async def scenario(host: Host) -> None:
            gateway = await host.gateway()
            await gateway.cancel(99)
            heard = await gateway.submit(1, words(20))
            await gateway.cancel(1, output=5)
            await gateway.until(heard, ends=1)
            assert heard.codes == [OK]

        on_host(scenario)

    def test_a_deadline_crosses_the_hop(self) -> None:
        async def scenario(host: Host) -> None:
            gateway = await host.gateway()
            heard = await gateway.submit(1, words(20), 900, deadline_seconds=5.0)
            await gateway.until(heard, tokens=2)
            host.driver.now += 5.0
            await gateway.until(heard, ends=1)
            assert heard.codes == [StatusCode.DEADLINE_EXCEEDED.value[0]]
            await host.until_idle()

        on_host(scenario)

    def test_a_cancel_or_a_deadline_in_the_moment_of_the_end_gives_one_end(self, scaled: Callable[[int], int]) -> None:
        async def scenario(host: Host) -> None:
            gateway, expected = await host.gateway(), solo(words(20), 3)[0]
            calls = []
            for number in range(scaled(5000)):
                heard = await gateway.submit(number + 1, words(20), len(expected), deadline_seconds=5.0)
                # Some before their first token, and some whose end may be on its way.
                await gateway.until(heard, tokens=number % (len(expected) + 1))
                if number % 2:
                    await gateway.cancel(number + 1)
                else:
                    host.driver.now += 5.0
                await gateway.until(heard, ends=1)
                calls.append(heard)
            await host.until_idle()
            host.driver.assert_idle()
            ends = [code for heard in calls for code in heard.codes]
            assert len(ends) == len(calls)
            assert set(ends) <= {OK, CANCELLED, StatusCode.DEADLINE_EXCEEDED.value[0]}
            for heard in calls:
                got = heard.outputs.get(0, [])
                assert got == expected[: len(got)]

        on_host(scenario)


class TestSlowGateways:
    def test_steps_that_could_not_be_sent_become_one_message_with_one_event_a_call(self) -> None:
        async def scenario(host: Host) -> None:
            gateway = await host.gateway()
            calls = [await gateway.submit(number, words(20, number), 50, n=2) for number in range(4)]
            await until_received(gateway)
            while host.driver.step():  # the event loop does not run meanwhile
                pass
            for number, heard in enumerate(calls):
                await gateway.until(heard, ends=1)
                expected = solo(words(20, number), 50)[0]
                assert heard.outputs == dict.fromkeys(range(2), expected)
            assert len(gateway.messages) == 1
            assert len(gateway.messages[0].events) == 4
            assert gateway.messages[0].step == host.driver.engine.report().steps

        on_host(scenario, threaded=False)

    def test_each_step_that_can_be_sent_is_one_message(self) -> None:
        async def scenario(host: Host) -> None:
            gateway = await host.gateway()
            calls = [await gateway.submit(number, words(20, number), 5) for number in range(4)]
            await until_received(gateway)
            for tokens in range(1, 6):
                host.driver.step()
                for heard in calls:
                    await gateway.until(heard, tokens=tokens)
            assert [len(message.events) for message in gateway.messages] == [4] * 5
            steps = [message.step for message in gateway.messages]
            assert steps == sorted(set(steps))

        on_host(scenario, threaded=False)

    def test_from_a_gateway_that_never_reads_no_more_is_read_either(self) -> None:
        pulled = 0

        async def submits() -> AsyncIterator[worker_pb2.SessionRequest]:
            nonlocal pulled
            for call_id in range(3 * MAX_BACKLOG_EVENTS):
                pulled += 1
                yield worker_pb2.SessionRequest(submit=worker_pb2.Submit(call_id=call_id))
                if pulled % 100 == 0:
                    await asyncio.sleep(0)

        async def scenario(host: Host) -> None:
            sent: list[worker_pb2.StepMessage] = []
            blocked, read = asyncio.Event(), asyncio.Event()

            async def send(message: worker_pb2.StepMessage) -> None:
                sent.append(message)
                blocked.set()
                await read.wait()

            session = Session(
                host.driver.engine,
                host.driver.runner.spec,
                max_outputs=1,
                refusal=lambda: None,
                progress=asyncio.Event(),
            )
            running = asyncio.create_task(session.run(submits(), send))
            async with asyncio.timeout(HANG_SECONDS):
                await blocked.wait()
                before = -1
                while pulled != before:
                    before = pulled
                    for _ in range(100):
                        await asyncio.sleep(0)
                assert pulled <= len(sent[0].events) + MAX_BACKLOG_EVENTS + 1 < 3 * MAX_BACKLOG_EVENTS
                read.set()
                await running
            assert pulled == 3 * MAX_BACKLOG_EVENTS

        on_host(scenario, threaded=False)

    def test_a_gateway_that_reads_nothing_holds_up_nobody_else(self) -> None:
        async def scenario(host: Host) -> None:
            deaf = GatewaySide(host.stub, host.model.description)
            hello = worker_pb2.Hello(
                protocol_version=1,
                incarnation=host.model.description.incarnation,
                hash_key_fingerprint=host.model.description.hash_key_fingerprint,
            )
            await deaf.stream.write(worker_pb2.SessionRequest(hello=hello))
            for call_id in range(4):
                await deaf.submit(call_id, words(20, call_id), 300, sampling={"ignore_eos": True})
            gateway = await host.gateway()
            heard = await gateway.submit(1, words(20), 300)
            await gateway.until(heard, ends=1)
            assert heard.outputs == solo(words(20), 300)
            await host.until_idle()
            assert host.driver.observations.calls_ended["ok"] == 5
            deaf.stream.cancel()

        on_host(scenario, Driver(num_blocks=256))


async def until_received(gateway: GatewaySide) -> None:
    """Wait until the worker has read all that was sent so far: a call that it refuses at once comes last."""
    await gateway.until(await gateway.submit(999, []), ends=1)
    gateway.messages.clear()
