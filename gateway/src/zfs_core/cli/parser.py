"""The command line of `lzc`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from zfs_core.cli import filesystems, properties, removal, snapshots, streams, values
from zfs_core.cli.failures import CommandError, Kind
from zfs_core.cli.report import Report
from zfs_core.process import TRANSFER_TIMEOUT_SECONDS

_EPILOG = "exit codes:\n  0   the command succeeded, whether or not it changed anything\n" + "\n".join(
    f"  {kind.exit_code:<3} {kind.word}: {kind.meaning}" for kind in Kind
)
_IF_ABSENT = "succeed without a change if it already exists"
_IF_PRESENT = "succeed without a change if it does not exist"
_NO_ASSIGNMENTS: list[tuple[str, str]] = []


class Parser(argparse.ArgumentParser):
    """A parser that raises CommandError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(Kind.INVALID, f"{message.removeprefix('argument ')} (see {self.prog} --help)")


_Commands = argparse._SubParsersAction


def make_parser() -> Parser:
    parser = Parser(
        prog="lzc",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Change and query ZFS. Each command compares the desired state with the current one, and prints\n"
        "one JSON object with 'changed' and, after a failure, with 'error'.",
        epilog=_EPILOG,
    )
    _add_check_option(parser)
    commands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    _add_filesystem_commands(commands)
    _add_snapshot_commands(commands)
    _add_hold_commands(commands)
    _add_removal_commands(commands)
    _add_property_commands(commands)
    _add_stream_commands(commands)
    return parser


def _add_command(
    commands: _Commands[Parser], name: str, text: str, function: Callable[[argparse.Namespace, Report], None]
) -> Parser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
    parser.set_defaults(function=function)
    _add_check_option(parser)
    return parser


def _add_check_option(parser: Parser) -> None:
    # Without SUPPRESS, the subcommand's default would overwrite an option that precedes the subcommand.
    parser.add_argument(
        "--check", action="store_true", default=argparse.SUPPRESS, help="change nothing, and print what would change"
    )
    parser.add_argument(
        "--assume",
        metavar="NAME",
        type=values.parse_existing_name,
        action="append",
        default=argparse.SUPPRESS,
        help="with --check, assume that this dataset or snapshot exists; may be repeated",
    )


def _add_flag(parser: Parser, name: str, text: str) -> None:
    parser.add_argument(name, action="store_true", help=text)


def _add_set_option(parser: Parser) -> None:
    parser.add_argument(
        "--set",
        metavar="PROPERTY=VALUE",
        type=values.parse_assignment,
        action="append",
        default=_NO_ASSIGNMENTS,
        help="set a property of a new dataset or snapshot; may be repeated",
    )


def _add_filesystem_commands(commands: _Commands[Parser]) -> None:
    parser = _add_command(commands, "create", "create a filesystem or a volume", filesystems.create)
    parser.add_argument("name", metavar="NAME", type=values.parse_new_filesystem)
    _add_flag(parser, "--if-absent", _IF_ABSENT)
    _add_flag(parser, "--parents", "also create missing parents")
    parser.add_argument(
        "--volume", metavar="SIZE", type=values.parse_volume_size, help="create a volume of this size, such as 10G"
    )
    _add_set_option(parser)

    parser = _add_command(commands, "clone", "create a filesystem from a snapshot", filesystems.clone)
    parser.add_argument("snapshot", metavar="SNAPSHOT", type=values.parse_snapshot)
    parser.add_argument("name", metavar="NAME", type=values.parse_new_filesystem)
    _add_flag(parser, "--if-absent", f"{_IF_ABSENT} as a clone of this snapshot")
    _add_set_option(parser)

    text = "make a clone independent of its origin; do nothing if it is not a clone"
    parser = _add_command(commands, "promote", text, filesystems.promote)
    parser.add_argument("name", metavar="NAME", type=values.parse_filesystem)

    parser = _add_command(commands, "rename", "rename a filesystem or a volume", filesystems.rename)
    parser.add_argument("name", metavar="NAME", type=values.parse_filesystem)
    parser.add_argument("new_name", metavar="NEW_NAME", type=values.parse_new_filesystem)
    _add_flag(parser, "--if-present", "succeed without a change if only NEW_NAME exists")


def _add_snapshot_commands(commands: _Commands[Parser]) -> None:
    parser = _add_command(
        commands, "snapshot", "take either all snapshots or none; they must be in one pool", snapshots.snapshot
    )
    parser.add_argument("snapshots", metavar="SNAPSHOT", nargs="+", type=values.parse_new_snapshot)
    _add_flag(parser, "--if-absent", "take only the snapshots that do not exist")
    _add_flag(parser, "--recursive", "also take snapshots of all descendant filesystems and volumes")
    _add_set_option(parser)

    text = "create a bookmark, from which changes can be sent without the snapshot"
    parser = _add_command(commands, "bookmark", text, snapshots.bookmark)
    parser.add_argument("source", metavar="SNAPSHOT", type=values.parse_snapshot)
    parser.add_argument("name", metavar="BOOKMARK", type=values.parse_bookmark)
    _add_flag(parser, "--if-absent", f"{_IF_ABSENT} as a bookmark of this snapshot")

    text = "roll a filesystem back to a snapshot; do nothing if nothing has been written since"
    parser = _add_command(commands, "rollback", text, snapshots.rollback)
    parser.add_argument("snapshot", metavar="SNAPSHOT", type=values.parse_snapshot)
    _add_flag(parser, "--destroy-newer", "destroy newer snapshots and bookmarks of the filesystem")


def _add_hold_commands(commands: _Commands[Parser]) -> None:
    parser = _add_command(commands, "hold", "prevent the removal of snapshots", snapshots.hold)
    parser.add_argument("tag", metavar="TAG", type=values.parse_tag)
    parser.add_argument("snapshots", metavar="SNAPSHOT", nargs="+", type=values.parse_snapshot)
    _add_flag(parser, "--if-absent", "hold only snapshots that do not have this hold")
    _add_flag(parser, "--recursive", "also hold the snapshots with the same names of all descendants")

    parser = _add_command(commands, "release", "release holds of snapshots", snapshots.release)
    parser.add_argument("tag", metavar="TAG", type=values.parse_tag)
    parser.add_argument("snapshots", metavar="SNAPSHOT", nargs="+", type=values.parse_snapshot)
    _add_flag(parser, "--if-present", "ignore snapshots that do not exist or do not have this hold")
    _add_flag(parser, "--recursive", "also release the snapshots with the same names of all descendants")

    text = "print the holds of snapshots, with their creation times"
    parser = _add_command(commands, "holds", text, snapshots.holds)
    parser.add_argument("snapshots", metavar="SNAPSHOT", nargs="+", type=values.parse_snapshot)


def _add_removal_commands(commands: _Commands[Parser]) -> None:
    parser = _add_command(commands, "destroy", "destroy filesystems, volumes, snapshots or bookmarks", removal.destroy)
    parser.add_argument("names", metavar="NAME", nargs="+", type=values.parse_existing_name)
    _add_flag(parser, "--if-present", "ignore names that do not exist")
    _add_flag(
        parser,
        "--recursive",
        "also destroy all descendants, or their snapshots with the same names; never destroys clones elsewhere",
    )
    _add_flag(parser, "--defer", "destroy held and cloned snapshots later, when their last hold or clone is removed")

    parser = _add_command(commands, "exists", "print whether all names exist", removal.exists)
    parser.add_argument("names", metavar="NAME", nargs="+", type=values.parse_existing_name)
    _add_flag(parser, "--require", "fail if any of them does not exist")


def _add_property_commands(commands: _Commands[Parser]) -> None:
    parser = _add_command(
        commands, "list", "list datasets, and snapshots from the oldest to the newest", properties.list_command
    )
    parser.add_argument("roots", metavar="NAME", nargs="+", type=values.parse_filesystem)
    parser.add_argument(
        "--type",
        dest="types",
        metavar="TYPES",
        type=values.parse_dataset_types,
        default=["filesystem", "volume"],
        help="filesystem, volume, snapshot, bookmark, or several of them with commas (default: filesystem,volume)",
    )
    parser.add_argument(
        "--depth", metavar="N", type=values.parse_count, help="how many levels under NAME to list (default: all)"
    )
    parser.add_argument(
        "--properties",
        metavar="NAMES",
        type=values.parse_property_names,
        default=[],
        help="also print these properties",
    )

    parser = _add_command(commands, "get", "print properties, with numbers in bytes", properties.get)
    parser.add_argument("properties", metavar="PROPERTIES", type=values.parse_property_names)
    parser.add_argument("names", metavar="NAME", nargs="+", type=values.parse_existing_name)
    _add_flag(parser, "--if-present", "omit names that do not exist, and properties that this ZFS does not have")
    _add_flag(parser, "--recursive", "also print the properties of all descendants")

    parser = _add_command(commands, "set", "set properties to values", properties.set_command)
    parser.usage = "lzc set [options] PROPERTY=VALUE... NAME..."
    parser.add_argument("words", metavar="PROPERTY=VALUE|NAME", nargs="+", type=values.parse_assignment_or_name)

    parser = _add_command(commands, "inherit", "remove properties, so that they are inherited", properties.inherit)
    parser.add_argument("properties", metavar="PROPERTIES", type=values.parse_property_names)
    parser.add_argument("names", metavar="NAME", nargs="+", type=values.parse_existing_name)


def _add_stream_commands(commands: _Commands[Parser]) -> None:
    text = "write a snapshot as a stream to standard output, to a file, or to the command after --"
    parser = _add_command(commands, "send", text, streams.send)
    parser.usage = "lzc send [options] [SNAPSHOT] [-- COMMAND ...]"
    parser.add_argument("snapshot", metavar="SNAPSHOT", nargs="?", type=values.parse_snapshot)
    parser.add_argument(
        "--from",
        dest="base",
        metavar="SNAPSHOT|BOOKMARK",
        type=values.parse_base,
        help="send only the changes since this snapshot",
    )
    for flag, text in (("raw", "send encrypted data as it is"), ("compressed", "send compressed data as it is")):
        name = "compress" if flag == "compressed" else flag
        parser.add_argument(f"--{flag}", dest="flags", action="append_const", const=name, help=text)
    parser.add_argument("--resume-token", metavar="TOKEN", help="send the rest of an interrupted stream")
    parser.add_argument("--file", type=Path, help="a new file for the stream, which only its owner can read")
    _add_flag(parser, "--if-absent", "succeed without a change if the file already exists")
    _add_timeout_option(parser)

    parser = _add_command(
        commands, "receive", "create a snapshot from a stream on standard input or in a file", streams.receive
    )
    parser.add_argument("target", metavar="SNAPSHOT|FILESYSTEM", type=values.parse_receive_target)
    parser.add_argument("--file", type=Path, help="the file that contains the stream")
    _add_flag(parser, "--if-absent", "succeed without a change if the snapshot in the stream already exists")
    _add_flag(
        parser, "--force", "discard changes of the filesystem since its newest snapshot, if that is the stream's base"
    )
    _add_flag(parser, "--destroy-newer", "with --force, also destroy snapshots that are newer than the stream's base")
    _add_flag(parser, "--replace", "with --force, let a stream without a base replace all data of the filesystem")
    _add_flag(parser, "--resumable", "keep the received part if the stream is interrupted")
    parser.add_argument(
        "--origin", metavar="SNAPSHOT", type=values.parse_snapshot, help="the snapshot of which it becomes a clone"
    )
    _add_set_option(parser)
    _add_timeout_option(parser)


def _add_timeout_option(parser: Parser) -> None:
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=values.parse_seconds,
        default=TRANSFER_TIMEOUT_SECONDS,
        help=f"stop after this time (default: {TRANSFER_TIMEOUT_SECONDS:g})",
    )
