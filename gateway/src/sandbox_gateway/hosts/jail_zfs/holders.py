"""What holds a file system that can be neither mounted nor unmounted: jails, mounts and processes."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable
from pathlib import Path

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.jail_zfs.commands import Commands
from sandbox_gateway.hosts.jail_zfs.jail import Jails
from sandbox_gateway.log import Logger

_MOST = 5
_ROW = re.compile(r"^(?P<user>\S+) +(?P<command>.*) +(?P<pid>\d+) +(?:[a-z]+|\d+) +(?P<mount>/\S*) +\d+ ")
"""Of `fstat`. A program chooses its own name, so that may look like anything."""

log = Logger("jail_zfs")


async def holders_of(run: Commands, jails: Jails, dataset: str, root: Path) -> str:
    """Names what holds ``dataset``, which belongs at ``root``, for an error message."""
    found = [
        *await _found(_jails_in(jails, root)),
        *await _found(_mounts_of(jails, dataset, root)),
        *await _found(_processes_in(run, root)),
    ]
    if not found:
        return "no jail, mount or open file that holds it was found"
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return f"held by {', '.join(found[:_MOST])}{more}"


async def _found(look: Awaitable[Iterable[str]]) -> Iterable[str]:
    """The names are only part of an error message: that one cannot be had must not hide the error."""
    try:
        return await look
    except GatewayError as error:
        log.warning("cannot look for what holds a file system", reason=error.message)
        return []


async def _jails_in(jails: Jails, root: Path) -> Iterable[str]:
    return [
        f"the {'dying ' if each.dying else ''}jail {each.name}"
        for each in await jails.listed()
        if Path(each.path).is_relative_to(root)
    ]


async def _mounts_of(jails: Jails, dataset: str, root: Path) -> Iterable[str]:
    return [
        f"the mount {each.node}"
        for each in await jails.mount_table()
        if each.node.startswith(f"{root}/") or (each.special == dataset and each.node != str(root))
    ]


async def _processes_in(run: Commands, root: Path) -> Iterable[str]:
    return parse_fstat(await run("fstat", "-f", str(root)), root)


def parse_fstat(text: str, root: Path) -> list[str]:
    """The processes that `fstat -f` lists with a file of the mount ``root`` itself, each once.

    While the file system is not mounted, `fstat` lists the files of the one around it.
    """
    rows = [row for line in text.splitlines() if (row := _ROW.match(line)) and row["mount"] == str(root)]
    return list(dict.fromkeys(f"the process {_plain(row['command'].rstrip())} (pid {row['pid']})" for row in rows))


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:32]
