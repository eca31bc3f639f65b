"""The command `prefixgate`: one subcommand for each thing a user does."""

import argparse
import difflib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from prefixgate.config.flags import add_flags, overrides_from, settings_from
from prefixgate.config.settings import SECTIONS, SettingsError
from prefixgate.config.version import VERSION
from prefixgate.gateway.commands.chat import CHAT
from prefixgate.gateway.commands.command import Command
from prefixgate.gateway.commands.doctor import DOCTOR
from prefixgate.gateway.commands.explain import EXPLAIN
from prefixgate.gateway.commands.flush import FLUSH
from prefixgate.gateway.commands.generate import GENERATE
from prefixgate.gateway.commands.pin import PIN
from prefixgate.gateway.commands.stats import STATS
from prefixgate.gateway.commands.top import TOP
from prefixgate.gateway.commands.warm import WARM
from prefixgate.gateway.console import say
from prefixgate.gateway.serve import SERVE_SETTINGS, serve
from prefixgate.gateway.tenants import digest_api_key, new_api_key
from prefixgate.proto.log_lines import start_logging

EXIT_USAGE = 2

_DESCRIPTION = """\
A gRPC gateway and worker for language models that compute shared prompt prefixes once.

Prompts that begin alike (a system prompt, a document, the turns of a chat) share what the model has already computed
for them: the worker keeps keys and values in blocks of 16 tokens, points every prompt at the blocks that fit, and
copies one only when two texts part inside it. Tenants never share.
"""

_EXAMPLES = """\
examples:
  prefixgate serve                                   gateway and worker on this machine, with a small chat model
  prefixgate generate "What is the capital of France?"
                                                     ask it, and see what came from the cache
  prefixgate chat --system "You are brief."          talk with it; each answer tells what the cache held
  prefixgate serve --model witness --blocks 64       a diagnostic model: no weights, no download
  prefixgate serve --config prefixgate.toml --kv-memory 8GiB
                                                     settings from a file, one of them changed
  prefixgate key                                     a new API key, and the line that configures it

`prefixgate COMMAND --help` lists a command's flags. Those of serve, worker and gateway are keys of the configuration
file too: --max-running 8 is max_running = 8 under [worker].
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. 2 means that it was given something it cannot use."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args, unknown = build_parser().parse_known_args(arguments)
    if unknown:
        _refuse(args.parser, unknown)
    args.arguments = arguments[1:]
    try:
        return int(args.run(args))
    except SettingsError as error:
        sys.stderr.write(f"prefixgate {args.command}: {error}\n")
        return EXIT_USAGE


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="prefixgate", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=_Layout, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"prefixgate {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, run, summary, description, add_arguments in COMMANDS:
        command = commands.add_parser(
            name, help=summary, description=description, formatter_class=_Layout, allow_abbrev=False
        )
        command.set_defaults(run=run, parser=command)
        add_arguments(command)
        if name in COMMAND_SETTINGS:
            add_flags(command, COMMAND_SETTINGS[name])
    return parser


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """Refuse arguments with the usage of the command they were given to; argparse would print the outer one."""
    flag = unknown[0].partition("=")[0]
    near = difflib.get_close_matches(flag, parser.format_help().split(), n=1)
    hint = f" (did you mean {near[0]}?)" if near and near[0].startswith("--") else ""
    parser.error(f"{flag}: there is no such argument{hint}")


class _Layout(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of descriptions and examples."""


def _serve(args: argparse.Namespace) -> int:
    _need_torch()
    return serve(args.config, overrides_from(args), say)


def _worker(args: argparse.Namespace) -> int:
    _need_torch()
    settings_from(args)
    # Another program from here on, so that this package never imports torch.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "prefixgate.worker", *args.arguments])


def _gateway(args: argparse.Namespace) -> int:
    settings = settings_from(args)
    if not settings.gateway.workers:
        raise SettingsError("gateway.workers is not set; it must name the workers, each HOST:PORT or unix:/PATH")
    start_logging(settings.log.format)
    # Here, since no other command needs what it loads.
    from prefixgate.gateway.server import run

    return run(settings, args.config, lambda: settings_from(args), leave=_leave)


def _leave(code: int) -> NoReturn:
    """End the process without waiting for its threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _key(_: argparse.Namespace) -> int:
    key = new_api_key()
    digest = digest_api_key(key.encode())
    say(f"API key, for the client (it is shown this once):\n  {key}")
    say(f'Its digest, for the configuration file:\n  [tenants.NAME]\n  api_keys = ["{digest}"]')
    say(f'Or, where the key is to open the status page:\n  [gateway]\n  operator_keys = ["{digest}"]')
    return 0


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise SettingsError("the worker needs more than the base install: pip install 'prefixgate[worker]'")


COMMANDS = (
    Command(
        "serve",
        _serve,
        "run a gateway and its worker together on this machine",
        """\
Runs a gateway and its worker as two processes joined by a private Unix socket, with a fresh hash key between them.
Clients call gateway.listen; both processes serve Prometheus metrics. Ctrl-C or SIGTERM lets live calls finish, the
gateway first; a second one ends everything at once. A worker that dies is started again, after a pause that grows when
it keeps dying. When the gateway ends by itself, or the worker before it has ever served, the other is stopped too, and
the exit code is 1.
""",
    ),
    Command(
        "worker",
        _worker,
        "run a worker alone: one model, one device, one pool",
        """\
Runs the process that owns a model and its pool of blocks. It serves gateways, not applications: whoever proves to have
its hash key can act for any tenant. Gateway and worker need the same one (hash_key_file, or the variable
PREFIXGATE_HASH_KEY); between machines use TLS too (worker.tls_cert, tls_key, tls_client_ca).
""",
    ),
    Command(
        "gateway",
        _gateway,
        "run a gateway alone, in front of a worker that runs elsewhere",
        """\
Runs the process that applications call. It learns tokenizer, chat template and limits from its worker and holds no
model files. Gateway and worker need the same hash key (hash_key_file, or the variable PREFIXGATE_HASH_KEY).
""",
    ),
    GENERATE,
    CHAT,
    EXPLAIN,
    WARM,
    PIN,
    STATS,
    FLUSH,
    TOP,
    DOCTOR,
    Command(
        "key",
        _key,
        "make an API key for a tenant, or for the status page",
        """\
Makes a random API key and the digest that stands for it in the configuration file. The key itself is stored nowhere.
""",
    ),
)

COMMAND_SETTINGS: Mapping[str, Sequence[str]] = {
    "serve": SERVE_SETTINGS,
    "worker": ("worker", "cache", "tracing.endpoint", "log"),
    "gateway": ("gateway", "limits", "routing", "tracing", "log", "cache.hash_key", "cache.hash_key_file"),
    "doctor": tuple(SECTIONS),
}
"""The settings that each command takes as flags: sections, or keys of them."""
