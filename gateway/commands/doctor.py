"""`prefixgate doctor`: looks at what a start needs, and says what to do."""

import argparse

from rich.table import Table
from rich.text import Text

from prefixgate.config.flags import overrides_from, settings_from
from prefixgate.config.version import VERSION
from prefixgate.gateway.checkup import add_process_argument, checkup
from prefixgate.gateway.commands.command import Command
from prefixgate.gateway.commands.json_form import JSON_HELP, print_json
from prefixgate.gateway.console import harmless, output
from prefixgate.proto.finding import Finding

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_process_argument(parser)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def _run(args: argparse.Namespace) -> int:
    found = list(checkup(args.process, lambda: settings_from(args), args.config, overrides_from(args)))
    is_well = all(finding.level != "problem" for finding in found)
    if args.json:
        print_json(
            {
                "version": VERSION,
                "process": args.process,
                "ok": is_well,
                "findings": [finding.as_dict() for finding in found],
            }
        )
    else:
        console = output()
        console.print(_table(found))
        console.print(Text(_summary(found)))
    return 0 if is_well else 1


def _table(found: list[Finding]) -> Table:
    table = Table("", "check", "found")
    for finding in found:
        cell = Text(harmless(finding.message))
        if finding.remedy:
            cell.append(f"\n→ {harmless(finding.remedy)}", style="bold")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.check, cell)
    return table


def _summary(found: list[Finding]) -> str:
    problems = sum(finding.level == "problem" for finding in found)
    warnings = sum(finding.level == "warning" for finding in found)
    conclusion = "correct what is a problem before you start it" if problems else "ready to start"
    return f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}: {conclusion}"


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


DOCTOR = Command(
    "doctor",
    _run,
    "look at what a start needs, and say what to do",
    """\
Looks at versions, settings, keys and who can read them, addresses, device, model and memory, before anything is
started, and says what to do about each problem. It changes nothing; a port is bound for a moment. Give it the flags
that the command itself will get, and do not run it while that command runs: its addresses are taken then.

The exit code is 0 where nothing stands in the way, warnings or not, and 1 where something does.
""",
    _add_arguments,
)
