"""`prefixgate stats`: what is served, and how the calling tenant stands."""

import argparse

from rich.table import Table
from rich.text import Text

from prefixgate.gateway.commands.command import client_command
from prefixgate.gateway.commands.connection import open_client
from prefixgate.gateway.commands.json_form import JSON_HELP, json_form, print_json
from prefixgate.gateway.console import harmless, output
from prefixgate.proto import gateway_pb2

LIFE_CHARACTERS = 8
"""Of a worker's life as it is shown; enough to tell a few apart."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def _run(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        stats = client.stats()
    if args.json:
        print_json(json_form(stats))
        return 0
    console = output()
    console.print(Text(f"{harmless(stats.model)}, context of {stats.context_length:,} tokens"))
    console.print(_table(stats))
    return 0


def _table(stats: gateway_pb2.StatsResponse) -> Table:
    parts = [worker.tenant for worker in stats.workers]
    several = len(parts) > 1
    heads = [worker.incarnation[:LIFE_CHARACTERS] for worker in stats.workers]
    table = Table("worker")
    for head in [*heads, *(["all"] if several else [])]:
        table.add_column(Text(harmless(head)), justify="right")
    parts += [stats.tenant] if several else []
    for title, name in (
        ("running calls", "running_calls"),
        ("waiting calls", "waiting_calls"),
        ("blocks held by calls and pins", "active_blocks"),
        ("blocks cached", "cached_blocks"),
        ("blocks kept for you", "floor_blocks"),
        ("blocks at most", "cap_blocks"),
        ("pins", "pins"),
        ("blocks that pins hold", "pinned_blocks"),
        ("prompt tokens looked up", "queried_tokens"),
        ("of these from the cache", "hit_tokens"),
    ):
        table.add_row(title, *(f"{getattr(part, name):,}" for part in parts))
    table.add_row("hit rate", *(hit_rate(part.hit_tokens, part.queried_tokens) for part in parts))
    table.add_section()
    pools = [worker.pool for worker in stats.workers]
    for title, name in (
        ("tokens in a block", "block_size"),
        ("blocks of the pool", "total_blocks"),
        ("blocks that pins of all may hold", "pin_limit_blocks"),
    ):
        table.add_row(title, *(f"{getattr(pool, name):,}" for pool in pools), *([""] if several else []))
    return table


def hit_rate(hits: float, queried: float) -> str:
    """Write a share of prompt tokens; nothing was looked up yet where it is a dash."""
    return f"{hits / queried:.1%}" if queried else "–"


STATS = client_command(
    "stats",
    _run,
    "tell what is served, and how you stand",
    """\
Tells what the gateway serves, and how the calling tenant stands at each worker: its calls, its part of the pool, its
pins, and how many of its prompt tokens came from the cache since the worker started.
""",
    _add_arguments,
)
