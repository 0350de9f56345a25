"""Jails: how one is made, listed and ended. The agent is the one process that a jail is made for.

A jail lasts as long as something runs in it (it is not made to `persist`), and when its agent ends, all else in it is
ended too: so a jail that is listed has its agent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs.commands import Commands

IDENTITY = "/run/sandbox"
"""Where a jail finds who it is: a directory of the host's, mounted read only."""

_START = (
    "(PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin; export PATH; "
    "python3 -I -S -B /opt/sandbox_agent; kill -KILL -1) </dev/null >/dev/null 2>&1 &"
)
_NOT_FOUND = ("not found", "is dying", "Invalid jail ID or name")
_NOT_MOUNTED = ("not a file system root directory", "unknown file system")


@dataclass(frozen=True)
class Jail:
    """As `jls` tells of it. ``dying``: it was removed, and something still holds it."""

    name: str
    path: str
    dying: bool


@dataclass(frozen=True)
class Mounted:
    """A line of the mount table: ``special`` is what is seen at ``node``. ``fsid``: its number, 16 hex digits."""

    special: str
    node: str
    kind: str
    fsid: str = ""
    read_only: bool = False

    @property
    def handle(self) -> str:
        """What `umount` knows it by: its number, for at the same path there may be another mount by now."""
        return self.fsid or self.node


def parse_jails(text: str) -> list[Jail]:
    """Read what ``jls --libxo json name path dying`` prints. Raises BackendFailed for anything else."""
    try:
        rows = json.loads(text)["jail-information"]["jail"]
        return [Jail(str(row["name"]), str(row["path"]), str(row["dying"]) == "true") for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BackendFailed(f"jls answered with what is no list of jails: {text[:200]!r}") from None


def parse_mounts(text: str) -> list[Mounted]:
    """Read what ``mount --libxo json -v`` prints. Raises BackendFailed for anything else."""
    try:
        rows = json.loads(text)["mount"].get("mounted", [])
        return [
            Mounted(
                str(row["special"]),
                str(row["node"]),
                str(row["fstype"]),
                str(row.get("fsid", "")),
                "read-only" in row.get("opts", []),
            )
            for row in rows
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BackendFailed(f"mount answered with what is no table of mounts: {text[:200]!r}") from None


class Jails:
    def __init__(self, run: Commands) -> None:
        self._run = run

    async def listed(self) -> list[Jail]:
        """Every jail of this machine, dying ones as well."""
        return parse_jails(await self._run("jls", "--libxo", "json", "-d", "name", "path", "dying"))

    async def create(self, name: str, root: Path, *, hostname: str, identity: Path | None, interface: str) -> None:
        """Make a jail of the file system ``root``, with its agent running; there is nothing of it on failure.

        ``identity``: the directory to be seen as IDENTITY; ``interface``: what it shall have of the network.
        """
        mounts = [f"mount={identity} {root}{IDENTITY} nullfs ro,nosuid 0 0"] if identity else []
        await self._run(
            *("jail", "-c", f"name={name}", f"path={root}", "vnet=new", f"host.hostname={hostname}"),
            *(*mounts, "mount.devfs", "devfs_ruleset=4"),
            *("enforce_statfs=2", "securelevel=2", "children.max=0", "allow.noset_hostname", "allow.noraw_sockets"),
            *(f"vnet.interface={interface}", "exec.clean", f"exec.start={_START}"),
        )

    async def connect(self, name: str, interface: str, *, address: str, prefix: int, gateway: str) -> None:
        """Give a jail's network its addresses and its route."""
        await self._run("ifconfig", "-j", name, interface, "inet", f"{address}/{prefix}", "up")
        await self._run("route", "-n", "-j", name, "add", "default", gateway)

    async def loopback(self, name: str) -> None:
        await self._run("ifconfig", "-j", name, "lo0", "inet", "127.0.0.1/8", "up")

    async def end(self, name: str, interface: str = "") -> None:
        """Kill what runs in a jail, take its interface back, remove it. One that is not there is no failure."""
        await self.signal(name, "KILL")
        if interface:
            # With the jail's last process the jail itself may have gone, and its interface home.
            absent = ("Device not configured", "does not exist", *_NOT_FOUND)
            await self._run.unless("ifconfig", interface, "-vnet", name, absent=absent)
        await self._run.unless("jail", "-R", name, absent=_NOT_FOUND)

    async def mounts(self, below: Path) -> list[Mounted]:
        """What is mounted below a directory, the deepest and newest first."""
        inside = [each for each in await self.mount_table() if each.node.startswith(f"{below}/")]
        inside.reverse()
        return sorted(inside, key=lambda each: each.node.count("/"), reverse=True)

    async def mount_table(self) -> list[Mounted]:
        """Every mount of this machine, oldest first."""
        return parse_mounts(await self._run("mount", "--libxo", "json", "-v"))

    async def unmount(self, mount: Mounted) -> None:
        """Unmount, by force where it is in use; nothing to do where it is not mounted."""
        try:
            await self._run.unless("umount", mount.handle, absent=_NOT_MOUNTED)
        except BackendFailed:
            await self._run.unless("umount", "-f", mount.handle, absent=_NOT_MOUNTED)

    async def signal(self, name: str, signal: str) -> None:
        """Send a signal to all that runs in a jail; nothing to do where nothing runs, or no jail is."""
        try:
            await self._run("pkill", f"-{signal}", "-j", name, silent=True)
        except BackendFailed as error:
            if not any(words in error.message for words in _NOT_FOUND):
                raise
