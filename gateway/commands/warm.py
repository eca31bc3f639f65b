"""`prefixgate warm`: computes a prompt into the cache before anybody asks."""

import argparse
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from prefixgate.gateway.client import WarmOptions, WarmStream
from prefixgate.gateway.commands.answer import cached
from prefixgate.gateway.commands.command import client_command
from prefixgate.gateway.commands.connection import open_client
from prefixgate.gateway.commands.json_form import JSON_HELP, json_form, print_json
from prefixgate.gateway.commands.option_flags import add_option_flags, options_from
from prefixgate.gateway.commands.prompt_arguments import add_prompt_arguments, prompt_from
from prefixgate.gateway.console import say
from prefixgate.proto import gateway_pb2

_WITHOUT = ("cache_mode",)
"""It could only be what it is by itself."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt_arguments(parser)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    add_option_flags(parser, WarmOptions, _WITHOUT)


def _run(args: argparse.Namespace) -> int:
    prompt, started = prompt_from(args), time.monotonic()
    with open_client(args) as client, client.warm(prompt, **options_from(args, WarmOptions, _WITHOUT)) as progress:
        end = follow(progress, Console(stderr=True))
    if args.json:
        print_json(json_form(end))
    else:
        computed = end.usage.prompt_tokens - end.usage.cached_tokens
        say(
            f"prompt {end.usage.prompt_tokens} tokens, {cached(end.usage)}; computed {computed} in "
            f"{time.monotonic() - started:.1f} s"
        )
    return 0


def follow(stream: WarmStream, console: Console) -> gateway_pb2.Completion:
    """Read a warming to its end, and show how far it is where that is a terminal."""
    columns = (TextColumn("warming"), BarColumn(), TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("warming", total=None, visible=False)
        for step in stream:
            there = step.cached_tokens + step.computed_tokens
            bar.update(task, total=step.prompt_tokens, completed=there, visible=True)
    return stream.result()


WARM = client_command(
    "warm",
    _run,
    "compute a prompt into the cache without generating",
    """\
Computes a prompt, so that calls that begin like it find it in the cache. Shows at a terminal how far it is. Ctrl-C ends
it early and leaves what is computed.
""",
    _add_arguments,
)
