"""Find the jails, mounts and processes that prevent mounting or unmounting a file system."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable
from pathlib import Path

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.jail_zfs.command_runner import CommandRunner
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.hosts.jail_zfs.jail.mount_table import MountTable
from sandbox_gateway.log import Logger

_MAX_NAMED = 5
_ROW = re.compile(r"^(?P<user>\S+) +(?P<command>.*) +(?P<pid>\d+) +(?:[a-z]+|\d+) +(?P<mount>/\S*) +\d+ ")
"""A row of `fstat`. A program chooses its own name, so the column may contain anything."""

log = Logger("jail_zfs")


async def describe_holders(run: CommandRunner, jails: Jails, mounts: MountTable, dataset: str, root: Path) -> str:
    """Return the holders of ``dataset``, which is mounted at ``root``, as the end of an error message."""
    found = [
        *await _list_or_log(_list_jails(jails, root)),
        *await _list_or_log(_list_mounts(mounts, dataset, root)),
        *await _list_or_log(_list_processes(run, root)),
    ]
    if not found:
        return "no jail, mount or open file was found that holds it"
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return f"held by {', '.join(found[:_MAX_NAMED])}{more}"


async def _list_or_log(names: Awaitable[Iterable[str]]) -> Iterable[str]:
    """Return ``names``, or nothing on failure. They are part of an error message: a failure must not hide the error."""
    try:
        return await names
    except GatewayError as error:
        log.warning("cannot find the holders of a file system", reason=error.message)
        return []


async def _list_jails(jails: Jails, root: Path) -> Iterable[str]:
    return [
        f"the {'dying ' if each.dying else ''}jail {each.name}"
        for each in await jails.list_all()
        if Path(each.path).is_relative_to(root)
    ]


async def _list_mounts(mounts: MountTable, dataset: str, root: Path) -> Iterable[str]:
    return [
        f"the mount {each.node}"
        for each in await mounts.list_all()
        if each.node.startswith(f"{root}/") or (each.special == dataset and each.node != str(root))
    ]


async def _list_processes(run: CommandRunner, root: Path) -> Iterable[str]:
    return parse_fstat(await run("fstat", "-f", str(root)), root)


def parse_fstat(text: str, root: Path) -> list[str]:
    """Return the processes that `fstat -f` lists with a file of the mount ``root`` itself, each once.

    While the file system is not mounted, `fstat` lists files of the one that contains ``root``.
    """
    rows = [row for line in text.splitlines() if (row := _ROW.match(line)) and row["mount"] == str(root)]
    return list(
        dict.fromkeys(f"the process {_replace_unprintable(row['command'].rstrip())} (pid {row['pid']})" for row in rows)
    )


def _replace_unprintable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:32]
