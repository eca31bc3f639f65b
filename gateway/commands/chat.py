"""`prefixgate chat`: a conversation, turn by turn."""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from prefixgate.gateway.client import AnswerStream, Client, Conversation, GatewayError, GenerateOptions
from prefixgate.gateway.commands.answer import ShownAnswer, cached
from prefixgate.gateway.commands.command import client_command, reason
from prefixgate.gateway.commands.connection import open_client
from prefixgate.gateway.commands.option_flags import add_option_flags, options_from
from prefixgate.gateway.commands.prompt_arguments import add_system_argument
from prefixgate.gateway.console import remark, write_text

_WITHOUT = ("n", "logprobs", "prompt_logprobs", "request_id")
"""Options that make no sense where one answer after another is shown."""

_PROMPT = "> "


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_system_argument(parser)
    add_option_flags(parser, GenerateOptions, _WITHOUT)


def _run(args: argparse.Namespace) -> int:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (it gives `input` a history and keys to edit with)
        remark("Ctrl-C breaks an answer off, Ctrl-D ends the chat.")
    conversation = Conversation(args.system)
    options = options_from(args, GenerateOptions, _WITHOUT)
    with open_client(args) as client:
        for question in _questions(is_terminal):
            try:
                _turn(client, conversation, question, options)
            except GatewayError as error:
                # At a terminal somebody can go on; in a script the next line may rest on this answer.
                if not is_terminal:
                    raise
                write_text("\n")
                remark(f"[{reason(error, str(args.address))}; the question is forgotten]")
    return 0


def _turn(client: Client, conversation: Conversation, question: str, options: dict[str, Any]) -> None:
    stream = client.chat(conversation, question, **options)
    shown = ShownAnswer(stream)
    with _closed_by_ctrl_c(stream) as closed:
        try:
            usage = shown.read().usage
        except GatewayError:
            if not closed.is_set():
                raise
            # What was shown was said, so that it stays; where nothing was, there was no turn.
            if stream.text:
                conversation.add(question, stream.text)
            write_text("\n")
            remark("[broken off]")
            return
    write_text("\n")
    remark(
        f"[prompt {usage.prompt_tokens} tokens, {cached(usage)}; answer {usage.completion_tokens} tokens; "
        f"first token after {shown.first_token_seconds:.3f} s]"
    )


@contextlib.contextmanager
def _closed_by_ctrl_c(stream: AnswerStream) -> Iterator[threading.Event]:
    """Have Ctrl-C close a stream; the event tells that it did.

    Not by an exception: that can come while gRPC's own code holds a lock, which is then held for good, and the next
    call of the same channel hears nothing any more. For the same reason the stream is closed by another thread.
    """
    closed = threading.Event()

    def close(_number: int, _frame: FrameType | None) -> None:
        closed.set()
        threading.Thread(target=stream.close, daemon=True).start()

    before = signal.signal(signal.SIGINT, close)
    try:
        yield closed
    finally:
        signal.signal(signal.SIGINT, before)


def _questions(is_terminal: bool) -> Iterator[str]:
    """Read questions line by line until their end; empty lines ask nothing."""
    while True:
        try:
            line = input(_PROMPT) if is_terminal else _line()
        except EOFError:
            if is_terminal:
                write_text("\n")
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            # It takes back what was typed so far.
            write_text("\n")
            continue
        if line.strip():
            yield line


def _line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


CHAT = client_command(
    "chat",
    _run,
    "talk with a running gateway's model, turn by turn",
    """\
Asks one question after another, each with the whole conversation before it, and tells after each answer how much of
that came from the cache. Reads lines from standard input where that is no terminal, and ends with it. Ctrl-C breaks an
answer off and keeps what has come of it; Ctrl-D ends the chat.
""",
    _add_arguments,
)
