"""The hit rate in its four steps, on a real gateway and worker: each tenant sees its own, and nobody else's blocks."""

import grpc

from tests.integration.asking import Stream, prompt
from tests.integration.scrape import Page
from tests.integration.sidecar import Sidecar

STEPS = ("queried", "reusable", "predicted", "delivered")
TEXT = "Seven blocks and a bit of one, which no other test asks for, so that the first call finds nothing. " * 2


def steps(page: Page, tenant: str) -> list[float]:
    return [page.total(f"prefixgate_gateway_{step}_tokens_total", tenant=tenant) for step in STEPS]


def test_a_tenant_is_told_what_it_can_reuse_and_others_are_not(sidecar: Sidecar) -> None:
    with sidecar.channel() as channel:

        def ask(tenant: str) -> tuple[int, int, list[float]]:
            """Return the length of the prompt, what usage says was cached, and what the steps grew by."""
            before = steps(sidecar.until_idle()[0], tenant)
            stream = Stream(channel, prompt(TEXT, 1), tenant)
            assert stream.rest() is grpc.StatusCode.OK
            assert stream.completion is not None
            usage, after = stream.completion.usage, steps(sidecar.until_idle()[0], tenant)
            grown = [new - old for old, new in zip(before, after, strict=True)]
            return usage.prompt_tokens, usage.cached_tokens, grown

        length, cached, grown = ask("acme")
        assert (cached, grown) == (0, [length, 0, 0, 0])
        length, cached, grown = ask("acme")
        blocks = length // 16 * 16
        assert grown == [length, blocks, blocks, cached]
        assert cached >= blocks - 16
        length, cached, grown = ask("bolt")
        assert (cached, grown) == (0, [length, 0, 0, 0])
