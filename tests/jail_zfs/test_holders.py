"""Test the parser of `fstat`'s output, which contains program names that a sandbox can choose."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from sandbox_gateway.hosts.jail_zfs.jail.holders import Holders, parse_fstat
from sandbox_gateway.hosts.jail_zfs.jail.mount_table import MountEntry

HEADER = "USER     CMD          PID   FD MOUNT      INUM MODE         SZ|DV R/W"
ROOT = Path("/p/sandboxes/x")


def _format_row(command: str = "sh", pid: int = 12, fd: str = "  wd", mount: str = str(ROOT)) -> str:
    return f"root     {command:<10} {pid:>5} {fd} {mount:<8}     34 drwxr-xr-x     22  r"


def test_each_process_is_listed_once() -> None:
    text = "\n".join(
        [HEADER, _format_row(), _format_row(fd="root"), _format_row(fd="   3"), _format_row("python3", 7, "text")]
    )
    assert parse_fstat(text, ROOT) == ["the process sh (pid 12)", "the process python3 (pid 7)"]


def test_files_on_other_mounts_are_ignored() -> None:
    rows = [_format_row(mount=mount) for mount in ("/p/sandboxes", "/p/sandboxes/x/dev", "/p/sandboxes/xy", "/")]
    assert parse_fstat("\n".join([HEADER, *rows]), ROOT) == []


@pytest.mark.parametrize(
    ("command", "expected"),
    [("a b", "a b"), ("", ""), ("\x1b[2J", "?[2J"), ("x" * 40, "x" * 32), ("7 8 wd / 9 r", "7 8 wd / 9 r")],
)
def test_unusual_command_names_are_parsed(command: str, expected: str) -> None:
    assert parse_fstat(_format_row(command), ROOT) == [f"the process {expected} (pid 12)"]


@pytest.mark.parametrize("text", ["", "fstat: no\n", "root sh", f"{HEADER}\nroot     sh  -  - bad    -"])
def test_invalid_rows_are_skipped(text: str) -> None:
    assert parse_fstat(text, ROOT) == []


class _MountTable:
    """A mount table with the mount of the volume ``p/volumes/v`` and one more, on a host without jails."""

    def __init__(self, special: str, node: str) -> None:
        self._mounts = [MountEntry("p/volumes/v", "/p/volumes/v", "zfs"), MountEntry(special, node, "any")]

    async def list_all(self) -> list[MountEntry]:
        return self._mounts


class _Jails:
    async def list_all(self) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("special", "node", "is_holder"),
    [
        ("/p/volumes/v", "/p/sandboxes/x/data", True),
        ("/p/volumes/v/sub", "/p/sandboxes/x/data", True),
        ("tmpfs", "/p/volumes/v", True),
        ("devfs", "/p/volumes/v/dev", True),
        ("p/volumes/v", "/elsewhere", True),
        ("p/volumes/v", "/p/volumes/v", False),
        ("/p/volumes/v2", "/p/sandboxes/x/data", False),
        ("p/volumes/v2", "/p/volumes/v2", False),
        ("devfs", "/p/sandboxes/x/dev", False),
    ],
)
def test_mounts_of_inside_and_over_a_file_system_use_it(special: str, node: str, is_holder: bool) -> None:
    async def run(*_argv: str) -> str:
        return HEADER

    holders = Holders(cast("Any", run), cast("Any", _Jails()), cast("Any", _MountTable(special, node)))
    description = asyncio.run(holders.describe("p/volumes/v", Path("/p/volumes/v")))
    assert description == (
        f"it is in use by the mount {node}" if is_holder else "no jail, mount or process that uses it was found"
    )
