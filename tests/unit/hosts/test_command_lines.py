"""The tables of command lines in docs/jail_zfs.md.

``GROVE_WRITE_DOCS=1 ./dev test tests/unit/hosts/test_command_lines.py`` writes the tables.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs import commands
from sandbox_gateway.hosts.jail_zfs.jail import rootfs
from tests.freebsd_shim.command_lines import checked, find_command_line, format_role_table, format_table, recorded

_PAGE_PATH = Path(__file__).parents[3] / "docs/jail_zfs.md"


@pytest.mark.parametrize(
    ("title", "expected_table"),
    [("command lines", format_table()), ("command lines of the role", format_role_table())],
    ids=["gateway", "role"],
)
def test_the_page_contains_the_table(title: str, expected_table: str) -> None:
    begin, end = f"<!-- {title}: begin -->\n", f"<!-- {title}: end -->\n"
    text = _PAGE_PATH.read_text()
    head, _, rest = text.partition(begin)
    table, _, tail = rest.partition(end)
    if os.environ.get("GROVE_WRITE_DOCS"):
        _PAGE_PATH.write_text(head + begin + expected_table + end + tail)
        table = expected_table
    assert table == expected_table, "docs/jail_zfs.md is out of date: run this test with GROVE_WRITE_DOCS=1"


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
        (["zfs", "clone", "-o", "a:b=-x", "-o", "c:d=1", "p/a@b", "p/c"], "zfs clone [-o PROPERTY=VALUE] …"),
        (["zfs", "clone", "-p", "p/a@b", "p/c"], None),
        (
            ["zfs", "get", "-Hp", "-r", "-o", "name,value", "all", "p"],
            "zfs get [-H] [-p] [-r] [-s SOURCES] [-o COLUMNS] …",
        ),
        (["zfs", "destroy", "-r", "p/a"], None),
        (["zfs", "destroy", "-dR", "p/a"], None),
        (["zfs", "rename", "-u", "p/a", "p/b"], "zfs rename [-u] …"),
        (["zfs", "snapshot", "-o"], None),
        (
            ["zfs", "program", "-j", "-t", "1", "-m", "2", "--", "p", "-", "-x"],
            "zfs program [-n] [-j] [-t LIMIT] [-m LIMIT] …",
        ),
        (["zfs", "jail", "1", "p/a"], None),
        (["zpool", "sync", "-f", "p"], "zpool sync [-f] …"),
        (["zpool", "destroy", "p"], None),
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


@pytest.mark.parametrize("is_directory", [True, False], ids=["directory", "tarball"])
def test_the_commands_that_build_a_template_are_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_directory: bool
) -> None:
    argvs: list[Sequence[str]] = []

    async def run(argv: Sequence[str], *_: Any, **__: Any) -> None:
        argvs.append(argv)

    for name in ("run_async", "run_logged"):
        monkeypatch.setattr(rootfs, name, run)
    root, source = tmp_path / "root", tmp_path / "source"
    (root / "etc").mkdir(parents=True)
    (root / "etc/master.passwd").touch()
    source.mkdir() if is_directory else source.touch()
    monkeypatch.setattr(rootfs, "create_home", lambda *_: None)

    async def build() -> None:
        with checked():
            await rootfs._unpack(source, root, lambda line: None)
            await rootfs._install_packages(root, ["python3", "git"], lambda line: None)
            await rootfs._add_user(root)

    asyncio.run(build())
    assert [argv[0] for argv in argvs] == ["cp" if is_directory else "tar", "pkg", "pw"]


def test_the_namespace_of_a_test_is_not_part_of_a_command_line() -> None:
    prefix = ("/usr/bin/nsenter", "--net=/proc/self/ns/net")
    with recorded() as recording:
        with pytest.raises(BackendFailed):
            asyncio.run(commands.CommandRunner()(*prefix, "umount", "-f", "00ff"))
        asyncio.run(commands.CommandRunner()(*prefix, "true"))
    assert ([each.form for each in recording.known_lines], recording.unknown_argvs) == (["umount -f FSID"], [["true"]])
