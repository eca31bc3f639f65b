"""How a gateway stands at one moment, and what happened between two."""

import time
from dataclasses import dataclass
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from prefixgate.gateway.client import Client
from prefixgate.proto import gateway_pb2

_PAGE_SECONDS = 5.0
_MAX_PAGE_BYTES = 16 << 20


class PageError(Exception):
    """The metrics page cannot be had; the text says why."""


@dataclass(frozen=True, slots=True)
class Page:
    """What the gateway's metrics page says of all tenants together."""

    completion_tokens: float
    prompt_tokens: float
    cached_tokens: float
    live_calls: float
    waiting_calls: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment."""

    seconds: float
    """On a clock that has no beginning."""
    stats: gateway_pb2.StatsResponse
    page: Page | None
    """None where it was not asked for or cannot be had."""
    page_problem: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """What happened between two moments."""

    seconds: float
    queried_tokens: int | None
    """Prompt tokens of the tenant that were looked up; None where a worker came, went or restarted in between."""
    hit_tokens: int | None
    completion_rate: float | None
    """Tokens a second, all tenants; None without both pages, or where the gateway restarted in between."""
    prompt_rate: float | None


def take(client: Client, page_url: str) -> Snapshot:
    """Ask a gateway for its figures, and its page for those of the operator. Raises GatewayError."""
    stats, seconds = client.stats(), time.monotonic()
    if not page_url:
        return Snapshot(seconds, stats, None)
    try:
        return Snapshot(seconds, stats, read_page(page_url))
    except PageError as error:
        return Snapshot(seconds, stats, None, str(error))


def read_page(url: str) -> Page:
    """Read a metrics page. Raises PageError."""
    try:
        with urlopen(url, timeout=_PAGE_SECONDS) as response:
            text = response.read(_MAX_PAGE_BYTES).decode()
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    except (URLError, OSError) as error:
        raise PageError(f"{url}: {getattr(error, 'reason', error)}") from error
    except ValueError as error:
        raise PageError(f"{url}: is no metrics page") from error
    names = ("completion_tokens_total", "prompt_tokens_total", "cached_tokens_total", "live_calls", "waiting_calls")
    values = [totals.get(f"prefixgate_gateway_{name}") for name in names]
    if values[names.index("live_calls")] is None:
        raise PageError(f"{url}: is not a gateway's page")
    return Page(*(value or 0.0 for value in values))


def change(before: Snapshot, after: Snapshot) -> Change:
    """Compare two moments."""
    seconds = after.seconds - before.seconds
    queried = hits = None
    if _lives(before) == _lives(after):
        queried = after.stats.tenant.queried_tokens - before.stats.tenant.queried_tokens
        hits = after.stats.tenant.hit_tokens - before.stats.tenant.hit_tokens
    old, new = before.page, after.page
    if old is None or new is None or new.prompt_tokens < old.prompt_tokens or seconds <= 0:
        return Change(seconds, queried, hits, None, None)
    return Change(
        seconds,
        queried,
        hits,
        (new.completion_tokens - old.completion_tokens) / seconds,
        (new.prompt_tokens - old.prompt_tokens) / seconds,
    )


def _lives(snapshot: Snapshot) -> list[str]:
    return sorted(worker.incarnation for worker in snapshot.stats.workers)
