"""Where a command calls, and as whom."""

import argparse
import os
from pathlib import Path

from prefixgate.config.address import Address, parse_address
from prefixgate.config.settings import GatewaySettings
from prefixgate.gateway.client import Client, Tls

API_KEY_VARIABLE = "PREFIXGATE_API_KEY"


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that all commands share. None takes a key itself: others on the machine can read them."""
    listen = GatewaySettings().listen
    group = parser.add_argument_group("connection")
    add = group.add_argument
    add("--address", metavar="ADDRESS", type=address, default=listen, help=f"the gateway; default {listen}")
    add(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help=f"file that holds the tenant's API key; default: the variable {API_KEY_VARIABLE}, if it is set",
    )
    add("--tls", action="store_true", help="encrypt, and check the gateway's certificate")
    add("--ca", metavar="FILE", type=Path, help="authorities to check it against, PEM; implies --tls")
    add("--cert", metavar="FILE", type=Path, help="certificate that proves the tenant, PEM; implies --tls")
    add("--cert-key", metavar="FILE", type=Path, help="private key of --cert, PEM")
    add("--timeout", metavar="SECONDS", type=seconds_above_zero, help="give a call up after so long; default: never")


def open_client(args: argparse.Namespace) -> Client:
    """Make the client that the arguments describe. Raises OSError and ValueError."""
    wants_tls = args.tls or any((args.ca, args.cert, args.cert_key))
    tls = Tls(args.ca, args.cert, args.cert_key) if wants_tls else None
    return Client(str(args.address), api_key=_api_key(args.api_key_file), tls=tls, timeout=args.timeout)


def _api_key(file: Path | None) -> str:
    return os.environ.get(API_KEY_VARIABLE, "") if file is None else file.read_text().strip()


def address(text: str) -> Address:
    """Read an address for argparse."""
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def tcp_address(text: str) -> Address:
    """Read the address of a host and port for argparse."""
    found = address(text)
    if found.is_unix:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return found


def seconds_above_zero(text: str) -> float:
    """Read a time for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value
