"""`prefixgate pin`: keeps what is cached of a prompt, whatever else comes."""

import argparse
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from prefixgate.gateway.client import LookupOptions
from prefixgate.gateway.commands.command import client_command
from prefixgate.gateway.commands.connection import add_connection_arguments, open_client
from prefixgate.gateway.commands.json_form import JSON_HELP, json_form, print_json
from prefixgate.gateway.commands.option_flags import add_option_flags, options_from
from prefixgate.gateway.commands.prompt_arguments import add_prompt_arguments, prompt_from
from prefixgate.gateway.commands.stats import LIFE_CHARACTERS
from prefixgate.gateway.console import harmless, output, say
from prefixgate.proto import gateway_pb2

_ACTIONS = {
    "add": "keep what is cached of a prompt for a time",
    "list": "show the tenant's pins",
    "remove": "end a pin before its time",
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, what in _ACTIONS.items():
        action = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", allow_abbrev=False)
        if name == "add":
            add_prompt_arguments(action)
            action.add_argument("--ttl", metavar="SECONDS", type=float, required=True, help="how long to keep it")
            add_option_flags(action, LookupOptions)
        elif name == "remove":
            action.add_argument("pin_id", metavar="PIN", help="the pin's name, as `list` shows it")
        if name != "remove":
            action.add_argument("--json", action="store_true", help=JSON_HELP)
        add_connection_arguments(action)
        action.set_defaults(parser=action)


def _run(args: argparse.Namespace) -> int:
    act = {"add": _add, "list": _list, "remove": _remove}[args.action]
    act(args)
    return 0


def _add(args: argparse.Namespace) -> None:
    prompt = prompt_from(args)
    with open_client(args) as client:
        answer = client.pin(prompt, args.ttl, **options_from(args, LookupOptions))
    if args.json:
        print_json(json_form(answer))
        return
    pin = answer.pin
    say(
        f"{pin.pin_id}: {pin.pinned_tokens:,} of {answer.prompt_tokens:,} tokens pinned for "
        f"{pin.expires_in_seconds:,.0f} s"
    )


def _list(args: argparse.Namespace) -> None:
    with open_client(args) as client:
        pins = client.list_pins()
    if args.json:
        print_json([json_form(pin) for pin in pins])
    elif pins:
        output().print(_table(pins))
    else:
        say("no pins")


def _remove(args: argparse.Namespace) -> None:
    with open_client(args) as client:
        client.unpin(args.pin_id)
    say(f"{args.pin_id}: removed")


def _table(pins: Sequence[gateway_pb2.PinnedPrefix]) -> Table:
    table = Table("pin", "tokens", "ends in", "salt", "worker")
    for index in (1, 2):
        table.columns[index].justify = "right"
    for pin in pins:
        # Texts, so that a salt cannot bring markup or control characters along.
        table.add_row(
            Text(harmless(pin.pin_id), overflow="fold"),
            f"{pin.pinned_tokens:,}",
            f"{pin.expires_in_seconds:,.0f} s",
            Text(harmless(pin.salt)),
            Text(harmless(pin.incarnation[:LIFE_CHARACTERS])),
        )
    return table


PIN = client_command(
    "pin",
    _run,
    "keep what is cached of a prompt, list pins, remove one",
    """\
A pin keeps the cached beginning of a prompt for a time, whatever else comes. `warm` it first if nobody has asked it
yet. A prompt that is pinned already keeps its pin, whose time is extended.
""",
    _add_arguments,
    is_called_by_actions=True,
)
