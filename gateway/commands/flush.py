"""`prefixgate flush`: forgets what is cached for the tenant."""

import argparse

from prefixgate.gateway.commands.command import client_command
from prefixgate.gateway.commands.connection import open_client
from prefixgate.gateway.commands.json_form import JSON_HELP, json_form, print_json
from prefixgate.gateway.console import say


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    # A word for each, and none for everything: a salt that was left out by mistake would cost all the others.
    what.add_argument("--all", action="store_true", help="forget all that is cached for the tenant, under every salt")
    what.add_argument("--salt", metavar="TEXT", help="forget what is cached under this salt; empty: under none")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def _run(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        done = client.flush(salt=args.salt)
    if args.json:
        print_json(json_form(done))
    else:
        say(f"{done.freed_blocks:,} blocks freed, {done.ended_pins:,} pins ended")
    return 0


FLUSH = client_command(
    "flush",
    _run,
    "forget what is cached for the tenant",
    """\
Forgets what is cached at all workers, and ends the pins on it. What calls in progress hold is forgotten too, and freed
when they end. No other tenant's is touched.
""",
    _add_arguments,
)
