"""Run a command of `lzc`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TextIO

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
    except OSError as failure:
        error = _describe_system_error(failure)
    try:
        _print_result(report, error, options)
    except OSError as failure:
        _abandon_output(failure)
        return Kind.FAILED.exit_code
    return 0 if error is None else error.kind.exit_code


def _describe_system_error(error: OSError) -> CommandError:
    names = [repr(str(name)) for name in (error.filename, error.filename2) if name is not None]
    subject = " and ".join(names) or "a system call"
    remedy = "check the files, the permissions and the limits of this process"
    return CommandError(Kind.FAILED, f"{subject} failed: {error.strerror or error}: {remedy}")


def _abandon_output(error: OSError) -> None:
    """Report that the result cannot be written, for example because its reader has exited."""
    with contextlib.suppress(OSError):
        print(f"lzc: the result cannot be written: {error.strerror or error}", file=sys.stderr, flush=True)
    _discard_output(sys.stdout)


def _discard_output(stream: TextIO) -> None:
    """Send to the null device what could not be written. Otherwise, Python tries again and fails when it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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
        try:
            print(f"lzc: {error.message}", file=sys.stderr)
        except OSError:  # The result must also arrive if nobody reads standard error.
            _discard_output(sys.stderr)
    sends_stream = getattr(options, "subcommand", "") == "send" and not options.file and not options.command  # type: ignore[union-attr]
    print(json.dumps(result), file=sys.stderr if sends_stream else sys.stdout, flush=True)
