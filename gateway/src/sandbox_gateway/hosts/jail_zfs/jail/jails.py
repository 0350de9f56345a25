"""Create, list and remove jails.

A jail exists only while its agent runs. It is created without `persist`, so FreeBSD removes it with its last process,
and its start command kills all other processes when the agent exits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.jail.identity import IDENTITY

_START_COMMAND = (
    "(PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin; export PATH; "
    "python3 -I -S -B /opt/sandbox_agent; kill -KILL -1) </dev/null >/dev/null 2>&1 &"
)
_ABSENT_MESSAGES = ("not found", "is dying", "Invalid jail ID or name")


@dataclass(frozen=True)
class Jail:
    """A row in the output of `jls`. ``is_dying``: the jail was removed, but the kernel still has references to it."""

    name: str
    path: str
    is_dying: bool


def parse_jails(text: str) -> list[Jail]:
    """Parse the output of ``jls --libxo json name path dying``. Raises BackendFailed for anything else."""
    try:
        rows = json.loads(text)["jail-information"]["jail"]
        return [Jail(str(row["name"]), str(row["path"]), str(row["dying"]) == "true") for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BackendFailed(f"the output of `jls` is not a list of jails: {text[:200]!r}") from None


class Jails:
    def __init__(self, run: CommandRunner) -> None:
        self._run = run

    async def list_all(self) -> list[Jail]:
        """Return all jails of this machine, including dying ones."""
        return parse_jails(await self._run("jls", "--libxo", "json", "-d", "name", "path", "dying"))

    async def list_alive_jails(self) -> set[str]:
        """Return the names of the jails that are not dying."""
        return {jail.name for jail in await self.list_all() if not jail.is_dying}

    async def list_under(self, directory: Path) -> dict[str, list[Jail]]:
        """Return the jails whose root directories are in ``directory``, keyed by the name of the root directory."""
        jails_by_root: dict[str, list[Jail]] = {}
        for jail in await self.list_all():
            path = Path(jail.path)
            if path.parent == directory:
                jails_by_root.setdefault(path.name, []).append(jail)
        return jails_by_root

    async def create(self, name: str, root: Path, *, hostname: str, identity: Path | None, interface: str) -> None:
        """Create a jail with the root directory ``root`` and start its agent. A failed call leaves nothing behind.

        ``identity``: the directory to mount at IDENTITY. ``interface``: the network interface to move into the jail.
        """
        mount_params = [f"mount={identity} {root}{IDENTITY} nullfs ro,nosuid 0 0"] if identity else []
        await self._run(
            *("jail", "-c", f"name={name}", f"path={root}", "vnet=new", f"host.hostname={hostname}"),
            *(*mount_params, "mount.devfs", "devfs_ruleset=4"),
            *("enforce_statfs=2", "securelevel=2", "children.max=0", "allow.noset_hostname", "allow.noraw_sockets"),
            *(f"vnet.interface={interface}", "exec.clean", f"exec.start={_START_COMMAND}"),
        )

    async def configure_interface(self, name: str, interface: str, *, address: str, prefix: int, gateway: str) -> None:
        """Set the address and the default route of a jail."""
        await self._run("ifconfig", "-j", name, interface, "inet", f"{address}/{prefix}", "up")
        await self._run("route", "-n", "-j", name, "add", "default", gateway)

    async def configure_loopback(self, name: str) -> None:
        await self._run("ifconfig", "-j", name, "lo0", "inet", "127.0.0.1/8", "up")

    async def remove(self, name: str, interface: str = "") -> None:
        """Kill the processes of a jail, if it exists, take back its network interface, and remove the jail."""
        await self.signal(name, "KILL")
        if interface:
            # If the jail was removed with its last process, its interface is already back on the host.
            absent_messages = ("Device not configured", "does not exist", *_ABSENT_MESSAGES)
            await self._run.run_removal("ifconfig", interface, "-vnet", name, absent_messages=absent_messages)
        await self._run.run_removal("jail", "-R", name, absent_messages=_ABSENT_MESSAGES)

    async def signal(self, name: str, signal: str) -> None:
        """Send a signal to all processes of a jail. Does nothing if there is no such jail or process."""
        try:
            await self._run("pkill", f"-{signal}", "-j", name, silent=True)
        except BackendFailed as error:
            if not any(text in error.message for text in _ABSENT_MESSAGES):
                raise
