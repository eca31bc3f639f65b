"""What `prefixgate top` shows."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prefixgate.gateway.commands.snapshot import Change, Snapshot, change
from prefixgate.gateway.commands.stats import LIFE_CHARACTERS, hit_rate
from prefixgate.gateway.console import harmless
from prefixgate.proto import gateway_pb2

_BAR_CELLS = 40
_WORKER_BAR_CELLS = 16


def frame(address: str, before: Snapshot, now: Snapshot, problem: str = "") -> RenderableType:
    """Draw one moment, with what happened since another. ``problem`` says why it is not a newer one."""
    stats = now.stats
    head = Text.assemble(
        ("prefixgate", "bold"),
        f"  {address}  ",
        (harmless(stats.model), "bold"),
        f"  context {stats.context_length:,} tokens",
    )
    parts: list[RenderableType] = [head, _figures(before, now), _workers(now)]
    if problem:
        parts.append(Text(harmless(problem), style="red"))
    return Group(*parts)


def _figures(before: Snapshot, now: Snapshot) -> Table:
    tenant, since = now.stats.tenant, change(before, now)
    figures = Table.grid(padding=(0, 2))
    figures.add_column(style="bold")
    figures.add_column()
    total = sum(worker.pool.total_blocks for worker in now.stats.workers)
    figures.add_row("pool", _pool(tenant, total, _BAR_CELLS))
    figures.add_row("", _pool_words(tenant, total))
    figures.add_row("hit rate", _lately(since))
    ever = hit_rate(tenant.hit_tokens, tenant.queried_tokens)
    figures.add_row("", f"{ever} of {tenant.queried_tokens:,} prompt tokens since the workers started")
    figures.add_row("calls", f"{tenant.running_calls:,} running, {tenant.waiting_calls:,} waiting")
    figures.add_row("pins", f"{tenant.pins:,}, of {tenant.pinned_blocks:,} blocks")
    figures.add_row("gateway", _gateway(now))
    if since.completion_rate is not None and since.prompt_rate is not None:
        figures.add_row("tokens", f"{since.completion_rate:,.0f}/s out, {since.prompt_rate:,.0f}/s in, of all tenants")
    return figures


def _lately(since: Change) -> str:
    if since.queried_tokens is None or since.hit_tokens is None:
        return "not known: a worker came, went or restarted"
    if not since.seconds:
        return "not known yet"
    if not since.queried_tokens:
        return f"nothing was looked up in {since.seconds:.1f} s"
    return (
        f"{hit_rate(since.hit_tokens, since.queried_tokens)} of {since.queried_tokens:,} prompt tokens in "
        f"{since.seconds:.1f} s"
    )


def _pool(tenant: gateway_pb2.TenantStats, total: int, cells: int) -> Text:
    """Draw a tenant's part of a pool; each kind of block has a character of its own, for eyes without colour."""
    active = _cells(tenant.active_blocks, total, cells)
    cached = min(_cells(tenant.cached_blocks, total, cells), cells - active)
    rest = cells - active - cached
    return Text.assemble(("█" * active, "yellow"), ("▒" * cached, "green"), ("·" * rest, "dim"))


def _cells(blocks: int, total: int, cells: int) -> int:
    """Tell how much of the bar some blocks take: what is there is seen, however little it is."""
    return min(cells, max(round(cells * blocks / total), 1)) if blocks and total else 0


def _pool_words(tenant: gateway_pb2.TenantStats, total: int) -> Text:
    rest = max(total - tenant.active_blocks - tenant.cached_blocks, 0)
    return Text.assemble(
        ("█", "yellow"),
        f" {tenant.active_blocks:,} held  ",
        ("▒", "green"),
        f" {tenant.cached_blocks:,} cached  ",
        ("·", "dim"),
        f" {rest:,} free or others'  of {total:,} blocks",
    )


def _gateway(now: Snapshot) -> Text:
    page = now.page
    if page is None:
        return Text(now.page_problem or "its metrics page was not asked for; --http names it", style="dim")
    return Text(f"{page.live_calls:,.0f} calls of all tenants, {page.waiting_calls:,.0f} of them without a token yet")


def _workers(now: Snapshot) -> Table:
    table = Table("worker", "pool", box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("held", "cached", "blocks", "running", "waiting", "hit rate"):
        table.add_column(title, justify="right")
    for worker in now.stats.workers:
        tenant, total = worker.tenant, worker.pool.total_blocks
        table.add_row(
            Text(harmless(worker.incarnation[:LIFE_CHARACTERS])),
            _pool(tenant, total, _WORKER_BAR_CELLS),
            f"{tenant.active_blocks:,}",
            f"{tenant.cached_blocks:,}",
            f"{total:,}",
            f"{tenant.running_calls:,}",
            f"{tenant.waiting_calls:,}",
            hit_rate(tenant.hit_tokens, tenant.queried_tokens),
        )
    return table
