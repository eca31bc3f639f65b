"""An engine over a loaded model with an empty cache, as benchmarks step it."""

from collections.abc import Sequence

from grpc import StatusCode

from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.engine import Engine
from prefixgate.worker.limits import Limits
from prefixgate.worker.model_runner import ModelRunner
from prefixgate.worker.observations import Observations
from prefixgate.worker.outbox import News
from prefixgate.worker.request import Request, SamplingParams

TENANT = "benchmark"
LIMITS = Limits(max_batch_tokens=512, max_running=64, max_waiting=1024)
"""Those of a worker without settings."""


class BenchEngine:
    """An engine with an empty cache over a runner's pool, and what its calls heard."""

    def __init__(self, runner: ModelRunner, limits: Limits = LIMITS, *, poison: bool = False) -> None:
        self.runner = runner
        self.limits = limits
        self.cache = PrefixCache(runner.storage.num_blocks, BlockHasher(bytes(16)))
        self.observations = Observations([TENANT])
        self.engine = Engine(runner, self.cache, limits, self.observations, poison=poison)
        self.heard = 0
        """Tokens that all calls together heard."""
        self._tokens: dict[Request, list[int]] = {}

    def deliver(self, step: int, news: Sequence[News]) -> None:
        """Take the news of a step."""
        for item in news:
            if item.end is not None and item.end.code is not StatusCode.OK:
                raise RuntimeError(f"a call ended with {item.end}")
            for token_ids in item.token_ids.values():
                self._tokens[item.request].extend(token_ids)
                self.heard += len(token_ids)

    def submit(self, prompt: list[int], max_tokens: int, n: int = 1) -> Request:
        """Queue a greedy call that ends at ``max_tokens``."""
        scope = CacheScope(TENANT, self.runner.spec.name)
        request = Request(prompt, scope, SamplingParams(max_tokens, ignore_eos=True), self, n=n)
        self._tokens[request] = []
        self.engine.submit(request)
        return request

    def run(self) -> None:
        """Step until every call has ended."""
        while self.engine.step():
            pass

    def take(self, request: Request) -> list[int]:
        """Return what a call heard, all of its outputs together, and forget it."""
        return self._tokens.pop(request)

    def generate(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Serve calls that arrive together, to their ends."""
        requests = [self.submit(prompt, max_tokens) for prompt in prompts]
        self.run()
        return [self.take(request) for request in requests]
