import asyncio

from prefixgate.proto.pulse import STUCK_SECONDS, Pulse


class Clock:
    """Tells when it is asked for the time, as a beat does."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked = asyncio.Event()

    def __call__(self) -> float:
        self.asked.set()
        return self.now


def test_a_loop_is_stuck_when_it_has_not_turned_for_long_and_not_before() -> None:
    async def scenario() -> None:
        clock = Clock()
        pulse = Pulse(clock)
        stuck = [pulse.is_stuck]
        for seconds in (STUCK_SECONDS, 1):
            clock.now += seconds
            stuck.append(pulse.is_stuck)
        assert stuck == [False, False, True]
        clock.asked.clear()
        beating = asyncio.create_task(pulse.run())
        await clock.asked.wait()
        assert not pulse.is_stuck
        beating.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))
