"""`prefixgate top`: a gateway as it lives."""

import argparse
import contextlib
import functools
import time
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console, RenderableType
from rich.live import Live

from prefixgate.config.address import parse_address
from prefixgate.config.settings import GatewaySettings
from prefixgate.gateway.client import Client, GatewayError
from prefixgate.gateway.commands.command import client_command, reason
from prefixgate.gateway.commands.connection import open_client, seconds_above_zero, tcp_address
from prefixgate.gateway.commands.snapshot import Snapshot, take
from prefixgate.gateway.commands.top_view import frame
from prefixgate.gateway.console import output


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = GatewaySettings()
    parser.add_argument(
        "--interval", metavar="SECONDS", type=seconds_above_zero, default=1.0, help="between two looks; default 1"
    )
    parser.add_argument("--once", action="store_true", help="look twice, print what is seen, and end")
    parser.add_argument(
        "--http",
        metavar="ADDRESS",
        type=tcp_address,
        help=f"where the gateway serves its metrics; default {defaults.http} where --address is not given",
    )


def _run(args: argparse.Namespace) -> int:
    console, url = output(), _page_url(args)
    with open_client(args) as client:
        before = take(client, url)
        if args.once:
            time.sleep(args.interval)
            console.print(frame(str(args.address), before, take(client, url)))
            return 0
        try:
            _watch(client, url, before, args, console)
        except KeyboardInterrupt:
            # The way to leave it.
            return 0


def _watch(client: Client, url: str, before: Snapshot, args: argparse.Namespace, console: Console) -> NoReturn:
    """Look again and again: at a terminal on a screen of its own, elsewhere one look below the other."""
    address, problem = str(args.address), ""
    now = before
    with contextlib.ExitStack() as screens:
        show: Callable[[RenderableType], None] = console.print
        if console.is_terminal:
            live = screens.enter_context(Live(console=console, screen=True, auto_refresh=False))
            show = functools.partial(live.update, refresh=True)
        while True:
            show(frame(address, before, now, problem))
            time.sleep(args.interval)
            try:
                before, now, problem = now, take(client, url), ""
            except GatewayError as error:
                problem = f"{reason(error, address)}; trying again"


def _page_url(args: argparse.Namespace) -> str:
    """Tell where the metrics page is. That of another gateway than the one asked would only mislead."""
    defaults = GatewaySettings()
    page = args.http
    if page is None and str(args.address) == defaults.listen:
        page = parse_address(defaults.http)
    return "" if page is None else f"http://{page}/metrics"


TOP = client_command(
    "top",
    _run,
    "watch a running gateway: pool, hit rate, calls and tokens",
    """\
Shows your part of the pool, your hit rate since the last look and since the workers started, your calls, and each
worker; and of all tenants together what the gateway's metrics page tells, where that can be reached. Ctrl-C ends it.
""",
    _add_arguments,
)
