"""The table of command lines in docs/jail_zfs.md.

``GROVE_WRITE_DOCS=1 ./dev test tests/unit/gateway/test_command_lines.py`` writes the table.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs import commands
from tests.freebsd_shim.command_lines import checked, find_command_line, format_table, recorded

_PAGE_PATH = Path(__file__).parents[3] / "docs/jail_zfs.md"
_TABLE_BEGIN, _TABLE_END = "<!-- command lines: begin -->\n", "<!-- command lines: end -->\n"


def test_the_page_contains_the_table() -> None:
    text = _PAGE_PATH.read_text()
    head, _, rest = text.partition(_TABLE_BEGIN)
    table, _, tail = rest.partition(_TABLE_END)
    if os.environ.get("GROVE_WRITE_DOCS"):
        _PAGE_PATH.write_text(head + _TABLE_BEGIN + format_table() + _TABLE_END + tail)
        table = format_table()
    assert table == format_table(), "docs/jail_zfs.md is out of date: run this test with GROVE_WRITE_DOCS=1"


@pytest.mark.parametrize(
    ("argv", "form"),
    [
        (["rctl"], "rctl"),
        (["rctl", "-a", "jail:a:nthr:deny=1", "jail:a:maxproc:deny=2"], "rctl -a RULE …"),
        (["route", "-n", "-j", "a", "add", "default", "10.0.0.1"], "route -n -j JAIL add default ADDRESS"),
        (["umount", "-f", "00ff"], "umount -f FSID"),
        (["jail", "-R", "a"], "jail -R JAIL"),
        (["jail", "-r", "a"], None),
        (["rctl", "-a"], None),
        (["umount", "-f"], None),
        (["pkill", "-KILL", "-j", "a"], "pkill -SIGNAL -j JAIL"),
        (["pfctl", "-q", "-a", "sbx/a", "-F", "states"], None),
        (["ifconfig", "a", "inet", "10.0.0.1", "up"], None),
    ],
)
def test_a_command_line_has_the_form_of_the_table(argv: list[str], form: str | None) -> None:
    line = find_command_line(argv)
    assert (line and line.form) == form


def test_a_command_line_that_is_not_in_the_table_is_reported() -> None:
    async def run() -> None:
        with checked():
            await commands.CommandRunner()("true")
            await commands.CommandRunner()("echo", "-x")

    with pytest.raises(AssertionError, match=r"add these command lines .*'true'.*'echo', '-x'"):
        asyncio.run(run())


def test_the_namespace_of_a_test_is_not_part_of_a_command_line() -> None:
    prefix = ("/usr/bin/nsenter", "--net=/proc/self/ns/net")
    with recorded() as recording:
        with pytest.raises(BackendFailed):
            asyncio.run(commands.CommandRunner()(*prefix, "umount", "-f", "00ff"))
        asyncio.run(commands.CommandRunner()(*prefix, "true"))
    assert ([each.form for each in recording.known_lines], recording.unknown_argvs) == (["umount -f FSID"], [["true"]])
