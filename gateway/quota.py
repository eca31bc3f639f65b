"""Quotas: what a tenant, and all tenants together, may use, and what each call uses of it.

A call enters, reserves what it may come to use at most once its prompt is known, and closes with what it did use. It
closes on every path, so that neither a cancel nor a worker's death leaves anything taken.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import grpc

from prefixgate.config.limit_settings import NO_LIMITS, LimitSettings
from prefixgate.gateway.call_limits import Limits, limits_of
from prefixgate.gateway.errors import CallError, QuotaError
from prefixgate.gateway.token_bucket import TokenBucket

_CONCURRENCY_RETRY_SECONDS = 1.0
"""When one of the calls in progress will end is not known."""

Clock = Callable[[], float]


class Account:
    """What one tenant, or all of them, may use and have used. Its size does not depend on the calls."""

    def __init__(self, subject: str, limits: LimitSettings, clock: Clock) -> None:
        """``subject`` names whose it is in refusals."""
        self.subject = subject
        self._clock = clock
        self._limits = NO_LIMITS
        self._requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.num_live = 0
        """Calls that entered and have not closed."""
        self.change(limits)

    def change(self, limits: LimitSettings) -> None:
        """Set other limits. What was used of the old ones counts on."""
        self._limits = limits
        self._requests = self._resized(self._requests, limits.requests_per_minute)
        self.tokens = self._resized(self.tokens, limits.tokens_per_minute)

    def _resized(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None or bucket is None:
            return None if per_minute is None else TokenBucket(per_minute, self._clock)
        bucket.resize(per_minute)
        return bucket

    def check_call(self) -> None:
        """Raise QuotaError where one more call is too many."""
        most = self._limits.max_concurrent_calls
        if most is not None and self.num_live >= most:
            raise self._refusal(
                "max_concurrent_calls",
                f"{self.num_live + 1} calls at the same time; must be at most {most}",
                _CONCURRENCY_RETRY_SECONDS,
            )
        if self._requests is not None and (seconds := self._requests.seconds_until(1)):
            raise self._refusal(
                "requests_per_minute", f"more than {self._requests.capacity} calls within a minute", seconds
            )

    def check_tokens(self, amount: int) -> None:
        """Raise QuotaError where so many tokens are more than is left."""
        if self.tokens is None:
            return
        # A call that is larger than a minute's worth waits for a full bucket, and pays the rest afterwards.
        if seconds := self.tokens.seconds_until(min(amount, self.tokens.capacity)):
            raise self._refusal(
                "tokens_per_minute",
                f"the call may use {amount} tokens, more than is left of {self.tokens.capacity} per minute",
                seconds,
            )

    def enter(self) -> None:
        """Count a call."""
        self.num_live += 1
        if self._requests is not None:
            self._requests.take(1)

    def leave(self) -> None:
        """Count a call out."""
        self.num_live -= 1

    def _refusal(self, limit: str, message: str, seconds: float) -> QuotaError:
        return QuotaError(self.subject, limit, message, seconds)


class _Taken(NamedTuple):
    """What a call took from a bucket beforehand."""

    bucket: TokenBucket
    amount: int


class Charge:
    """What one call uses of its accounts."""

    def __init__(self, accounts: Iterable[Account] = (), limits: Limits = Limits()) -> None:  # noqa: B008  # immutable
        """Made by ``Quotas.enter``; without accounts, of a call that is charged nowhere."""
        self.limits = limits
        """What the call itself may ask for."""
        self._accounts = tuple(accounts)
        self._taken: list[_Taken] = []
        self._prompt_tokens = 0
        self._delivered = 0
        self._abandoned = 0
        self._settled: int | None = None
        self._is_reserved = False
        self._is_open = True

    def reserve(self, prompt_tokens: int, output_tokens: int) -> None:
        """Take what the call can use at most. Raises QuotaError, and has taken nothing then.

        Once: a call that is tried again on another worker uses nothing more.
        """
        if self._is_reserved:
            return
        amount = prompt_tokens + output_tokens
        for account in self._accounts:
            account.check_tokens(amount)
        self._is_reserved = True
        self._prompt_tokens = prompt_tokens
        for account in self._accounts:
            if account.tokens is not None:
                taken = _Taken(account.tokens, min(amount, account.tokens.capacity))
                taken.bucket.take(taken.amount)
                self._taken.append(taken)

    def deliver(self, tokens: int) -> None:
        """Note tokens that the client got."""
        self._delivered += tokens

    def abandon(self, tokens: int) -> None:
        """Note tokens that were generated, and that the call was given up with."""
        self._abandoned += tokens

    def settle(self, uncached_prompt_tokens: int, output_tokens: int) -> None:
        """Note what the call has cost, as the worker counted it at a good end."""
        # Whatever a worker says, a call gives nothing to others.
        self._settled = max(0, uncached_prompt_tokens) + max(0, output_tokens)

    def close(self, *, by_client: bool) -> int:
        """Give back what was not used, and return what was. Once; nothing after that.

        A call whose cost nobody told pays for the tokens that it delivered, and if the client itself gave it up
        (``by_client``), for its whole prompt and all that was generated: else giving up just in time would make prompts
        free, and not reading would make answers free. For what failed on our side nobody pays more than what they got.
        """
        if not self._is_open:
            return 0
        self._is_open = False
        used = self._settled
        if used is None:
            used = self._delivered + (self._prompt_tokens + self._abandoned if by_client else 0)
        for bucket, amount in self._taken:
            bucket.take(used - amount)
        for account in self._accounts:
            account.leave()
        return used


class Quotas:
    """The accounts of all tenants, and the one that they share."""

    def __init__(
        self,
        shared: LimitSettings,
        tenants: Mapping[str, LimitSettings],
        *,
        default_max_tokens: int,
        clock: Clock = time.monotonic,
    ) -> None:
        """``tenants`` has an entry for everyone who can call."""
        self._default_max_tokens = default_max_tokens
        self._clock = clock
        self._shared = Account("all tenants", shared, clock)
        self._tenants: dict[str, Account] = {}
        self._limits: dict[str, Limits] = {}
        self.change(shared, tenants)

    def change(self, shared: LimitSettings, tenants: Mapping[str, LimitSettings]) -> None:
        """Set other limits, and other tenants. Calls in progress go on with what they took."""
        self._shared.change(shared)
        self._limits = {name: limits_of(self._default_max_tokens, shared, own) for name, own in tenants.items()}
        for name in self._tenants.keys() - tenants.keys():
            del self._tenants[name]
        for name, limits in tenants.items():
            if name in self._tenants:
                self._tenants[name].change(limits)
            else:
                self._tenants[name] = Account(f"tenant {name}", limits, self._clock)

    def enter(self, tenant: str) -> Charge:
        """Take a call in; close what is returned. Raises QuotaError, and has counted nothing then."""
        if tenant not in self._tenants:
            # Taken out of the configuration while the request was on its way.
            raise CallError(grpc.StatusCode.UNAUTHENTICATED, "the credential is not known any more")
        # The tenant's own first: what others use is told only to who could have called.
        accounts = (self._tenants[tenant], self._shared)
        for account in accounts:
            account.check_call()
        for account in accounts:
            account.enter()
        return Charge(accounts, self._limits[tenant])
