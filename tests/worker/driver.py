"""An engine on the witness model, driven step by step."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from grpc import StatusCode

from prefixgate.cache.accounts import TenantShare
from prefixgate.cache.admission import CacheMode
from prefixgate.cache.hashing import BlockHasher, CacheScope
from prefixgate.cache.kv_storage import KVStorage, TorchKVStorage
from prefixgate.cache.prefix_cache import PrefixCache
from prefixgate.worker.cache_control import CacheControl
from prefixgate.worker.engine import Engine
from prefixgate.worker.limits import Limits
from prefixgate.worker.logprobs import TokenLogprob
from prefixgate.worker.model_runner import AheadRunner, ModelRunner, ModelSpec, Row
from prefixgate.worker.observations import Observations
from prefixgate.worker.outbox import News
from prefixgate.worker.request import End, Request, SamplingParams, Usage
from prefixgate.worker.sequence import FinishReason
from prefixgate.worker.witness import WitnessModel, witness_layout
from prefixgate.worker.witness_options import WitnessOptions

T = TypeVar("T")

MODEL = "witness@fingerprint"
MAX_STEPS = 10_000


@dataclass(eq=False)
class Call:
    """What the sink of one call heard."""

    request: Request
    outputs: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, FinishReason] = field(default_factory=dict)
    end: End | None = None
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prefilled: list[int] = field(default_factory=list)
    """Tokens computed, each time that it heard of them."""

    @property
    def code(self) -> StatusCode | None:
        return self.end.code if self.end else None

    @property
    def usage(self) -> Usage:
        return self.request.usage

    def hear(self, news: News) -> None:
        assert self.end is None, "news after the end"
        for index, token_ids in news.token_ids.items():
            assert index not in self.finished, "tokens after an output's end"
            self.outputs.setdefault(index, []).extend(token_ids)
        for index, logprobs in news.logprobs.items():
            self.logprobs.setdefault(index, []).extend(logprobs)
        self.prompt_logprobs += news.prompt_logprobs
        if news.has_prefilled:
            self.prefilled.append(self.request.prefilled_tokens)
        assert not self.finished.keys() & news.finished.keys(), "an output ended twice"
        self.finished |= news.finished
        self.end = news.end


class RecordingRunner:
    """A runner that notes what each step computes and can be made to fail."""

    def __init__(self, inner: ModelRunner, *, is_ahead: bool = False) -> None:
        """With ``is_ahead`` it plays a device that computes while the host goes on."""
        self.inner = inner
        self.is_ahead = is_ahead
        self.spec: ModelSpec = inner.spec
        self.storage: KVStorage = inner.storage
        self.steps: list[list[tuple[int, int]]] = []
        """Of each step, the (start, number of tokens) of its rows."""
        self.steps_ahead: list[int] = []
        """Indexes of those that were launched behind another."""
        self.raises: Callable[[Row], bool] = lambda row: False
        self.spoils: Callable[[Row], bool] = lambda row: False

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        for row in rows:
            if self.raises(row):
                raise RuntimeError("secret of another client")
        self.steps.append([(row.start, len(row.token_ids)) for row in rows])
        logits = self.inner.forward(rows)
        rows_of_lines = [row for row in rows for _ in range(row.num_logits)]
        for line, row in zip(logits, rows_of_lines, strict=True):
            if self.spoils(row):
                line[3] = float("nan")
        return logits

    def forward_ahead(self, rows: Sequence[Row], token_ids: torch.Tensor) -> torch.Tensor:
        self.steps_ahead.append(len(self.steps))
        if isinstance(self.inner, AheadRunner) and self.inner.is_ahead:
            self.steps.append([(row.start, len(row.token_ids)) for row in rows])
            return self.inner.forward_ahead(rows, token_ids)
        known = [row._replace(token_ids=[token]) for row, token in zip(rows, token_ids.tolist(), strict=True)]
        return self.forward(known)

    @property
    def tokens_per_step(self) -> list[int]:
        return [sum(count for _, count in rows) for rows in self.steps]


class WatchedEngine(Engine):
    """An engine whose steps can be waited for from other threads."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stepped = threading.Condition()

    def step(self) -> bool:
        busy = super().step()
        with self.stepped:
            self.stepped.notify_all()
        return busy

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait for a step that leaves no call and no block in use; False after ``timeout`` seconds."""
        with self.stepped:
            return self.stepped.wait_for(self._is_idle, timeout)

    def _is_idle(self) -> bool:
        report = self.report()
        return not (report.running_calls or report.waiting_calls or report.active_blocks)


class Driver:
    """Submits calls, steps, and checks the cache's invariants after each step."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_batch_tokens: int = 512,
        max_running: int = 16,
        max_waiting: int = 1024,
        options: WitnessOptions | None = None,
        shares: Mapping[str, TenantShare] | None = None,
        pin_limit: int = 0,
        hasher: BlockHasher | None = None,
        weights: Mapping[str, float] | None = None,
        runner: ModelRunner | None = None,
        is_ahead: bool = False,
    ) -> None:
        """Run the witness with these options, or another model with a pool of its own.

        ``is_ahead`` has steps launched behind steps that have not landed.
        """
        if runner is None:
            storage = TorchKVStorage(num_blocks, witness_layout())
            storage.poison(range(num_blocks))
            runner = WitnessModel("witness", storage, options or WitnessOptions(context=2048))
        self.runner = RecordingRunner(runner, is_ahead=is_ahead)
        self.cache = PrefixCache(num_blocks, hasher or BlockHasher(bytes(16)), shares=shares, pin_limit=pin_limit)
        self.observations = Observations(["acme", "bolt"])
        self.limits = Limits(max_batch_tokens, max_running, max_waiting)
        self.now = 100.0
        self.engine = WatchedEngine(
            self.runner,
            self.cache,
            self.limits,
            self.observations,
            weights=weights,
            poison=True,
            clock=lambda: self.now,
        )
        self.calls: dict[Request, Call] = {}

    def deliver(self, step: int, news: Sequence[News]) -> None:
        assert len({item.request for item in news}) == len(news), "two news of one call in one step"
        for item in news:
            self.calls[item.request].hear(item)

    def submit(
        self,
        token_ids: Sequence[int],
        max_tokens: int = 4,
        *,
        n: int = 1,
        tenant: str = "acme",
        salt: str = "",
        deadline_seconds: float | None = None,
        time_limit_seconds: float | None = None,
        sampling: SamplingParams | None = None,
        cache_mode: CacheMode = CacheMode.DEFAULT,
        retention: int | None = None,
        priority: int = 0,
        pin_seconds: float | None = None,
        prefill_only: bool = False,
    ) -> Call:
        request = Request(
            token_ids=token_ids,
            scope=CacheScope(tenant, MODEL, salt=salt),
            sampling=sampling or SamplingParams(max_tokens),
            sink=self,
            n=n,
            deadline_seconds=deadline_seconds,
            time_limit_seconds=time_limit_seconds,
            cache_mode=cache_mode,
            retention=retention,
            priority=priority,
            pin_seconds=pin_seconds,
            prefill_only=prefill_only,
        )
        call = Call(request)
        self.engine.submit(request)
        self.calls[request] = call
        return call

    def step(self) -> bool:
        busy = self.engine.step()
        self.cache.check_integrity()
        return busy

    def run(self) -> None:
        """Step until every call has ended."""
        for _ in range(MAX_STEPS):
            if not self.step():
                return
        raise AssertionError(f"calls are left after {MAX_STEPS} steps")

    def ask(self, token_ids: Sequence[int], max_tokens: int = 4, **options: object) -> Call:
        """Submit one call and run until all have ended."""
        call = self.submit(token_ids, max_tokens, **options)  # type: ignore[arg-type]
        self.run()
        assert call.end is not None
        return call

    def warm(self, token_ids: Sequence[int], **options: object) -> Call:
        """Have a prompt computed and nothing more."""
        return self.ask(token_ids, 1, prefill_only=True, **options)

    def control(self, work: Callable[[CacheControl], T], tenant: str = "acme") -> T:
        """Have something done to the cache by the next step, or by the one after where that one runs already."""
        answer = self.engine.questions.ask(tenant, work)
        self.step()
        if not answer.done():
            assert self.runner.is_ahead
            self.step()
        return answer.result(timeout=0)

    def assert_idle(self) -> None:
        """Nothing is live, and nothing is held for anyone."""
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert (sum(self.cache.pool.ref_counts), stats.reserved_blocks, stats.active_blocks) == (0, 0, 0)
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
        report = self.engine.report()
        assert (report.running_calls, report.waiting_calls, report.active_blocks) == (0, 0, 0)


def solo(
    token_ids: Sequence[int],
    max_tokens: int = 4,
    *,
    tenant: str = "acme",
    salt: str = "",
    sampling: SamplingParams | None = None,
    n: int = 1,
    options: WitnessOptions | None = None,
) -> dict[int, list[int]]:
    """Return the outputs of a call that runs alone on a fresh engine with nothing cached."""
    longest = len(token_ids) + (sampling.max_tokens if sampling else max_tokens)
    driver = Driver(n * (longest // 16 + 1), options=options)
    call = driver.ask(token_ids, max_tokens, tenant=tenant, salt=salt, sampling=sampling, n=n)
    assert call.usage.cached_tokens == 0
    return call.outputs


def words(count: int, seed: int = 0) -> list[int]:
    """Return a prompt of printable bytes. Prompts of different seeds have no token in common at any position."""
    return [33 + (seed + position * 11) % 90 for position in range(count)]
