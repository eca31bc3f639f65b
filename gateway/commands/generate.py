"""`prefixgate generate`: one call to a running gateway, streamed to the terminal."""

import argparse

from prefixgate.gateway.client import GenerateOptions
from prefixgate.gateway.commands.answer import ShownAnswer, answer_form, cost
from prefixgate.gateway.commands.command import client_command
from prefixgate.gateway.commands.connection import open_client
from prefixgate.gateway.commands.json_form import JSON_HELP, print_json
from prefixgate.gateway.commands.option_flags import add_option_flags, options_from
from prefixgate.gateway.commands.prompt_arguments import add_prompt_arguments, prompt_from
from prefixgate.gateway.console import remark, write_text


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt_arguments(parser)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    add_option_flags(parser, GenerateOptions)


def _run(args: argparse.Namespace) -> int:
    options = options_from(args, GenerateOptions)
    for name in ("logprobs", "prompt_logprobs"):
        if name in options and not args.json:
            args.parser.error(f"--{name.replace('_', '-')}: what it asks for is shown with --json only")
    prompt = prompt_from(args)
    with open_client(args) as client:
        shown = ShownAnswer(client.generate(prompt, **options), quiet=args.json)
        answer = shown.read()
    if args.json:
        print_json(answer_form(answer, shown.first_token_seconds))
        return 0
    write_text("\n")
    for output in answer.outputs[1:]:
        write_text(f"--- output {output.index}\n{output.text}\n")
    remark(f"[{cost(answer, shown.first_token_seconds)}]")
    return 0


GENERATE = client_command(
    "generate",
    _run,
    "ask a running gateway, and stream the answer to the terminal",
    """\
Sends one prompt as a chat message, prints the text as it comes, and then on stderr what the call cost: prompt tokens,
how many came from the cache and how, blocks copied, tokens generated, and the time to the first of them.
""",
    _add_arguments,
)
