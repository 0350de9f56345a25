"""Test the parsers of the jail commands' output, and the creation and removal of jails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jail, Jails, parse_jails
from sandbox_gateway.hosts.jail_zfs.jail.mount_table import MountEntry, MountTable, parse_mounts
from sandbox_gateway.hosts.jail_zfs.jail.rctl import format_rules, parse_usage, parse_usages
from sandbox_gateway.records import Resources
from tests.support.jail_world import JailZfsWorld, make_shim_environment, run_shim

T = TypeVar("T")
SAMPLE_OUTPUT = (
    '{"__version":"2","jail-information":{"jail":[{"jid":"5","name":"N","path":"/P","dying":"false"},'
    '{"jid":"6","name":"M","path":"/Q R","dying":"true"}]}}'
)


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def test_jails_are_parsed() -> None:
    assert parse_jails(SAMPLE_OUTPUT) == [Jail("N", "/P", False), Jail("M", "/Q R", True)]
    assert parse_jails('{"__version": "2", "jail-information": {"jail": []}}') == []


@given(st.integers(0, len(SAMPLE_OUTPUT) - 1))
def test_a_truncated_list_of_jails_is_refused(length: int) -> None:
    with pytest.raises(BackendFailed, match="not a list of jails"):
        parse_jails(SAMPLE_OUTPUT[:length])


@given(st.lists(st.tuples(st.text(min_size=1), st.text(), st.booleans())))
def test_jails_with_any_name_are_listed(rows: list[tuple[str, str, bool]]) -> None:
    records = [{"name": name, "path": path, "dying": str(dying).lower()} for name, path, dying in rows]
    assert parse_jails(json.dumps({"jail-information": {"jail": records}})) == [Jail(*row) for row in rows]


@given(st.text())
def test_arbitrary_text_is_parsed_or_rejected(text: str) -> None:
    try:
        parse_jails(text)
    except BackendFailed as error:
        assert len(error.message) < 2000
    try:
        parse_mounts(text)
    except BackendFailed as error:
        assert len(error.message) < 2000
    parse_usage(text)


def test_mounts_are_parsed() -> None:
    entries_json = (
        '{"special":"zroot/a","node":"/a","fstype":"zfs","opts":["local"]},'
        '{"special":"/b c","node":"/a/d e","fstype":"nullfs","opts":["local","read-only"],"fsid":"01ff000029000000"},'
        '{"special":"devfs","node":"/a/dev","fstype":"devfs","fsid":"02ff000071000000"}'
    )
    assert parse_mounts('{"mount": {"mounted": [' + entries_json + "]}}") == [
        MountEntry("zroot/a", "/a", "zfs"),
        MountEntry("/b c", "/a/d e", "nullfs", "01ff000029000000", read_only=True),
        MountEntry("devfs", "/a/dev", "devfs", "02ff000071000000"),
    ]
    assert parse_mounts('{"mount": {}}') == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"mount": []}', '{"mount": {"mounted": [{"special": "x"}]}}', "{"])
def test_an_invalid_mount_table_is_refused(text: str) -> None:
    with pytest.raises(BackendFailed, match="not a table of mounts"):
        parse_mounts(text)


def test_rctl_rules_are_formatted_and_usage_is_parsed() -> None:
    assert format_rules("sbx-1", Resources(cpus=2, memory_mb=256), 100, 100_000) == [
        "jail:sbx-1:maxproc:deny=100",
        "jail:sbx-1:nthr:deny=400",
        "jail:sbx-1:openfiles:deny=25000",
        "jail:sbx-1:vmemoryuse:deny=268435456",
        "jail:sbx-1:pcpu:deny=200",
    ]
    assert parse_usage("cputime=0\nmemoryuse=4096\nodd\nx=-1\n") == {"cputime": 0, "memoryuse": 4096}


@pytest.fixture
def jails(jail_zfs_world: JailZfsWorld) -> Jails:
    return Jails(CommandRunner(make_shim_environment()))


@pytest.fixture
def mount_table(jail_zfs_world: JailZfsWorld) -> MountTable:
    return MountTable(CommandRunner(make_shim_environment()))


def test_removing_a_missing_jail_succeeds(jails: Jails, mount_table: MountTable, tmp_path: Path) -> None:
    run_async(jails.remove("nowhere", "nowhere-b"))
    run_async(mount_table.unmount(MountEntry("", str(tmp_path), "nullfs")))
    run_async(mount_table.unmount(MountEntry("", str(tmp_path / "missing"), "nullfs")))
    run_async(mount_table.unmount(MountEntry("", "", "nullfs", "00ff00ff00ff00ff")))
    run_async(jails.signal("nowhere", "STOP"))
    assert run_async(mount_table.list_under(tmp_path)) == []


def test_a_failed_jail_creation_leaves_nothing_behind(jails: Jails, mount_table: MountTable, tmp_path: Path) -> None:
    for name in ("dev", "bin"):
        (tmp_path / name).mkdir()
    with pytest.raises(BackendFailed, match="interface missing-b does not exist"):
        run_async(jails.create("odd", tmp_path, hostname="odd", identity=None, interface="missing-b"))
    with pytest.raises(BackendFailed, match="No such file or directory"):
        run_async(jails.create("odd", tmp_path / "nowhere", hostname="odd", identity=None, interface="missing-b"))
    assert run_async(mount_table.list_under(tmp_path)) == []
    assert "odd" not in run_shim("jls", "-d", "name").split()


def test_the_usage_of_several_jails_is_parsed() -> None:
    text = "cputime=0\nmemoryuse=4096\npcpu=7\ncputime=1\nmemoryuse=8192\npcpu=0\n"
    first_usage, second_usage = (
        {"cputime": 0, "memoryuse": 4096, "pcpu": 7},
        {"cputime": 1, "memoryuse": 8192, "pcpu": 0},
    )
    assert parse_usages(text) == [first_usage, second_usage] and parse_usages("") == []
