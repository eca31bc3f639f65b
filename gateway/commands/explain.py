"""`prefixgate explain`: where a prompt leaves the cache, and why."""

import argparse

from rich.table import Table

from prefixgate.gateway.client import LookupOptions
from prefixgate.gateway.commands.command import client_command
from prefixgate.gateway.commands.connection import open_client
from prefixgate.gateway.commands.json_form import JSON_HELP, json_form, print_json
from prefixgate.gateway.commands.option_flags import add_option_flags, options_from
from prefixgate.gateway.commands.prompt_arguments import add_prompt_arguments, prompt_from
from prefixgate.gateway.console import output
from prefixgate.proto import gateway_pb2


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt_arguments(parser)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    add_option_flags(parser, LookupOptions)


def _run(args: argparse.Namespace) -> int:
    prompt = prompt_from(args)
    with open_client(args) as client:
        found = client.explain(prompt, **options_from(args, LookupOptions))
    if args.json:
        print_json(json_form(found))
        return 0
    console = output()
    console.print(_table(found))
    console.print(f"First miss: {why_missed(found)}", soft_wrap=True)
    return 0


def _table(found: gateway_pb2.ExplainResponse) -> Table:
    table = Table("tokens", "where they come from")
    table.columns[0].justify = "right"
    for count, source in (
        (found.block_hit_tokens, "whole blocks in the cache, pointed at"),
        (found.partial_copy_tokens, "copied out of a block that goes on differently"),
        (found.claimed_tail_tokens, "taken over with the unfinished block of an earlier call"),
        (found.prompt_tokens - found.cached_tokens, "computed"),
    ):
        table.add_row(f"{count:,}", source, style="dim" if count == 0 else "")
    table.add_section()
    table.add_row(f"{found.prompt_tokens:,}", f"the prompt; {_share(found)} of it cached")
    return table


def why_missed(found: gateway_pb2.ExplainResponse) -> str:
    """Say why the first token that a call would compute is not cached."""
    place = f"token {found.cached_tokens:,}"
    reasons = {
        gateway_pb2.MISS_REASON_NONE: "none; only the last token is computed, as it always is",
        gateway_pb2.MISS_REASON_NEVER_SEEN: f"{place}; nothing like it was cached, as far as is remembered",
        gateway_pb2.MISS_REASON_EVICTED: f"{place}; it was cached and had to make room, not long ago",
        gateway_pb2.MISS_REASON_DIVERGED: (
            f"{place}; what is cached goes on differently from token {found.diverged_at} of its block on, for "
            f"{found.continuation_tokens} tokens"
        ),
    }
    return reasons.get(found.miss_reason, f"{place}; the gateway did not tell why")


def _share(found: gateway_pb2.ExplainResponse) -> str:
    return f"{found.cached_tokens / found.prompt_tokens:.0%}" if found.prompt_tokens else "nothing"


EXPLAIN = client_command(
    "explain",
    _run,
    "tell how much of a prompt is cached, and why the rest is not",
    """\
Looks a prompt up in the cache as a call would find it now, and tells from where each token would come, and why the
first one that would be computed is not cached. Computes nothing and changes nothing.
""",
    _add_arguments,
)
