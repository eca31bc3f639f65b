"""What a command sends: a question of a chat, or text as it is."""

import argparse
import sys

from prefixgate.gateway.client import Conversation, Prompt


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the prompt and what it is part of."""
    parser.add_argument("prompt", metavar="PROMPT", help='what to say to the model; "-" reads it from standard input')
    form = parser.add_mutually_exclusive_group()
    add_system_argument(form)
    form.add_argument("--raw", action="store_true", help="send the text as it is, without the model's chat template")


def add_system_argument(parser: argparse._ActionsContainer) -> None:
    """Add the system message."""
    parser.add_argument("--system", metavar="TEXT", default="", help="a system message to begin the chat with")


def prompt_from(args: argparse.Namespace) -> Prompt:
    """Read the prompt that the arguments name."""
    text: str = sys.stdin.read() if args.prompt == "-" else args.prompt
    return text if args.raw else Conversation(args.system).asking(text)
