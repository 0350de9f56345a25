"""Run a command of `lzc`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence

from zfs_core.cli.failures import CommandError, Kind, describe
from zfs_core.cli.parser import make_parser
from zfs_core.cli.report import Report
from zfs_core.exceptions import ZFSError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, print its result, and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    report, options, error = Report(), None, None
    try:
        options = _parse(arguments)
        report.check = getattr(options, "check", False)
        report.assumed_names = frozenset(getattr(options, "assume", ()))
        options.function(options, report)
    except CommandError as failure:
        error = failure
    except ZFSError as failure:
        error = describe(failure)
    except NotImplementedError as failure:
        error = CommandError(Kind.NOT_SUPPORTED, str(failure))
    _print_result(report, error, options)
    return 0 if error is None else error.kind.exit_code


def _parse(arguments: list[str]) -> Namespace:
    # argparse would mix the words after -- with the other arguments.
    position = arguments.index("--") if "--" in arguments else len(arguments)
    options = make_parser().parse_args(arguments[:position])
    command = arguments[position + 1 :]
    if position < len(arguments) and options.subcommand != "send":
        raise CommandError(Kind.INVALID, f"lzc {options.subcommand} takes no command after --: omit it")
    if hasattr(options, "assume") and not hasattr(options, "check"):
        raise CommandError(Kind.INVALID, "--assume is for predictions: add --check, or omit it")
    if options.subcommand == "send":
        if position < len(arguments) and not command:
            raise CommandError(Kind.INVALID, "the command after -- is missing: add it, or omit the --")
        if command and options.file:
            raise CommandError(Kind.INVALID, "pass either --file or a command after --")
        if options.if_absent and not options.file:
            raise CommandError(Kind.INVALID, "--if-absent applies only to a file: add --file, or omit it")
        options.command = command
    return options


def _print_result(report: Report, error: CommandError | None, options: Namespace | None) -> None:
    """Print the result as one line. If a stream occupies standard output, print it to standard error."""
    result = report.as_json()
    if error is not None:
        result["error"] = error.as_json()
        print(f"lzc: {error.message}", file=sys.stderr)
    sends_stream = getattr(options, "subcommand", "") == "send" and not options.file and not options.command  # type: ignore[union-attr]
    print(json.dumps(result), file=sys.stderr if sends_stream else sys.stdout, flush=True)
