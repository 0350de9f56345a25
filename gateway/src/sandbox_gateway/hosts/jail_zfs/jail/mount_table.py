"""Read the mount table of this machine, and unmount file systems."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner

_ABSENT_MESSAGES = ("not a file system root directory", "unknown file system")


@dataclass(frozen=True)
class MountEntry:
    """An entry of the mount table: ``special`` is mounted at ``node``. ``fsid``: the file system id, 16 hex digits."""

    special: str
    node: str
    kind: str
    fsid: str = ""
    read_only: bool = False

    @property
    def handle(self) -> str:
        """Return the argument for `umount`: the file system id if known, because another mount may cover the path."""
        return self.fsid or self.node


def parse_mounts(text: str) -> list[MountEntry]:
    """Parse the output of ``mount --libxo json -v``. Raises BackendFailed for anything else."""
    try:
        rows = json.loads(text)["mount"].get("mounted", [])
        return [
            MountEntry(
                str(row["special"]),
                str(row["node"]),
                str(row["fstype"]),
                str(row.get("fsid", "")),
                "read-only" in row.get("opts", []),
            )
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BackendFailed(f"the output of `mount` is not a table of mounts: {text[:200]!r}") from None


class MountTable:
    def __init__(self, run: CommandRunner) -> None:
        self._run = run

    async def list_all(self) -> list[MountEntry]:
        """Return all mounts of this machine, oldest first."""
        return parse_mounts(await self._run("mount", "--libxo", "json", "-v"))

    async def list_under(self, directory: Path) -> list[MountEntry]:
        """Return the mounts under a directory, deepest first and then newest first."""
        mounts = [each for each in await self.list_all() if each.node.startswith(f"{directory}/")]
        mounts.reverse()
        return sorted(mounts, key=lambda each: each.node.count("/"), reverse=True)

    async def unmount(self, mount: MountEntry) -> None:
        """Unmount a file system, by force if it is in use. Does nothing if it is not mounted."""
        try:
            await self._run.run_removal("umount", mount.handle, absent_messages=_ABSENT_MESSAGES)
        except BackendFailed:
            await self._run.run_removal("umount", "-f", mount.handle, absent_messages=_ABSENT_MESSAGES)
