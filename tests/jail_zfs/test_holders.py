"""Test the parser of `fstat`'s output, which contains program names that a sandbox can choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_gateway.hosts.jail_zfs.jail.holders import parse_fstat

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
