"""Find the jails, mounts and processes that prevent mounting or unmounting a file system."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterable
from pathlib import Path

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.hosts.jail_zfs.jail.mount_table import MountTable
from sandbox_gateway.log import Logger

_MAX_LISTED_HOLDERS = 5
_FSTAT_ROW = re.compile(r"^(?P<user>\S+) +(?P<command>.*) +(?P<pid>\d+) +(?:[a-z]+|\d+) +(?P<mount>/\S*) +\d+ ")
"""A row of `fstat`. The command column may contain any text, because a program chooses its own name."""

log = Logger("jail_zfs")


class Holders:
    """Finds the jails, mounts and processes that use a file system."""

    def __init__(self, run: CommandRunner, jails: Jails, table: MountTable) -> None:
        self._run = run
        self._jails = jails
        self._table = table

    async def describe(self, dataset: str, root: Path) -> str:
        """Describe the holders of ``dataset``, which is mounted at ``root``, as a clause for an error message."""
        holders = [
            *await _list_or_log(self._list_jails(root)),
            # Before the mounts, which can be many: those of all file systems below ``root``.
            *await _list_or_log(self._list_processes(root)),
            *await _list_or_log(self._list_mounts(dataset, root)),
        ]
        if not holders:
            return "no jail, mount or process that uses it was found"
        suffix = f" and {len(holders) - _MAX_LISTED_HOLDERS} more" if len(holders) > _MAX_LISTED_HOLDERS else ""
        return f"it is in use by {', '.join(holders[:_MAX_LISTED_HOLDERS])}{suffix}"

    async def _list_jails(self, root: Path) -> Iterable[str]:
        return [
            f"the {'dying ' if each.is_dying else ''}jail {each.name}"
            for each in await self._jails.list_all()
            if Path(each.path).is_relative_to(root)
        ]

    async def _list_mounts(self, dataset: str, root: Path) -> Iterable[str]:
        return [
            f"the mount {each.node}"
            for each in await self._table.list_all()
            if (each.node == str(root)) != (each.special == dataset)
            or each.node.startswith(f"{root}/")
            or Path(each.special).is_relative_to(root)
        ]

    async def _list_processes(self, root: Path) -> Iterable[str]:
        output = await self._run("fstat", "-f", str(root))
        # A guest may have hundreds of thousands of open files.
        return await asyncio.to_thread(parse_fstat, output, root)


async def _list_or_log(names: Awaitable[Iterable[str]]) -> Iterable[str]:
    """Return ``names``, or an empty list on failure, so that a second error does not hide the one being reported."""
    try:
        return await names
    except GatewayError as error:
        log.warning("cannot find the holders of a file system", reason=error.message)
        return []


def parse_fstat(text: str, root: Path) -> list[str]:
    """Return the processes in the output of `fstat -f` that have a file open on the mount ``root``, without duplicates.

    While nothing is mounted at ``root``, `fstat` lists files of the file system that contains the directory ``root``.
    """
    rows = [row for line in text.splitlines() if (row := _FSTAT_ROW.match(line)) and row["mount"] == str(root)]
    return list(
        dict.fromkeys(f"the process {_replace_unprintable(row['command'].rstrip())} (pid {row['pid']})" for row in rows)
    )


def _replace_unprintable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)[:32]
