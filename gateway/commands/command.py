"""One command of the command line, and how those that call a gateway end."""

import argparse
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

import grpc

from prefixgate.gateway.client import BrokenStreamError, GatewayError, UnauthenticatedError
from prefixgate.gateway.commands.connection import API_KEY_VARIABLE, add_connection_arguments
from prefixgate.gateway.console import discard_output, harmless


class Command(NamedTuple):
    """What the user types, and what then runs."""

    name: str
    run: Callable[[argparse.Namespace], int]
    """Returns the exit code."""
    summary: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], object] = lambda _: None


def client_command(
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    add_arguments: Callable[[argparse.ArgumentParser], object],
    *,
    is_called_by_actions: bool = False,
) -> Command:
    """Make a command that calls a gateway: with the arguments that say where, and with one end for every failure.

    Those arguments are its actions' own where ``is_called_by_actions``.

    The exit code is what ``run`` returns, 1 after an error, 130 after Ctrl-C, and 141 when nobody reads its output on.
    """

    def add_all(parser: argparse.ArgumentParser) -> None:
        add_arguments(parser)
        if not is_called_by_actions:
            add_connection_arguments(parser)

    def run_to_an_end(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except GatewayError as error:
            return _fail(name, reason(error, str(args.address)))
        # What was given cannot be sent, or a file of the connection cannot be read.
        except (ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                discard_output()
                return 128 + signal.SIGPIPE
            return _fail(name, str(error))
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            return 128 + signal.SIGINT

    return Command(name, run_to_an_end, summary, description, add_all)


def reason(error: GatewayError, address: str) -> str:
    """Say in one line why a call failed, and what can be done where that is known."""
    words = " ".join(error.message.split())
    # The gateway names each call in what it says of it; nothing else does.
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.request_id:
        why = words.rpartition(": ")[2]  # the rest is gRPC's way there
        return f"no gateway answers at {address} ({why}); `prefixgate serve` starts one, --address names another"
    if isinstance(error, BrokenStreamError):
        return f"the answer broke off: {words}"
    if isinstance(error, UnauthenticatedError):
        return f"{error.code.name}: {words}; the key comes from the variable {API_KEY_VARIABLE} or --api-key-file"
    return f"{error.code.name}: {words}"


def _fail(name: str, why: str) -> int:
    sys.stderr.write(f"prefixgate {name}: {harmless(why)}\n")
    return 1
