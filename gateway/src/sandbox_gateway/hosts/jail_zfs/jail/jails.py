"""Create, list and remove jails.

A jail exists only while its agent runs: it is created without `persist`, so it lasts as long as a process runs in it,
and when the agent ends, all other processes are killed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs.command_runner import CommandRunner

IDENTITY = "/run/sandbox"
"""Directory in a jail with its identity: a directory of the host, mounted read-only."""

_START = (
    "(PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin; export PATH; "
    "python3 -I -S -B /opt/sandbox_agent; kill -KILL -1) </dev/null >/dev/null 2>&1 &"
)
_NOT_FOUND = ("not found", "is dying", "Invalid jail ID or name")


@dataclass(frozen=True)
class Jail:
    """A row of `jls`. ``dying``: the jail was removed, but something still holds it."""

    name: str
    path: str
    dying: bool


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
        """Return every jail of this machine, including dying ones."""
        return parse_jails(await self._run("jls", "--libxo", "json", "-d", "name", "path", "dying"))

    async def list_alive(self) -> set[str]:
        """Return the names of the jails that are not dying."""
        return {jail.name for jail in await self.list_all() if not jail.dying}

    async def list_below(self, directory: Path) -> dict[str, list[Jail]]:
        """Return the jails whose roots are in ``directory``, by the name of their root."""
        found: dict[str, list[Jail]] = {}
        for jail in await self.list_all():
            path = Path(jail.path)
            if path.parent == directory:
                found.setdefault(path.name, []).append(jail)
        return found

    async def create(self, name: str, root: Path, *, hostname: str, identity: Path | None, interface: str) -> None:
        """Create a jail on the file system ``root`` and start its agent. On failure nothing remains.

        ``identity``: the directory to mount at IDENTITY; ``interface``: moves into the jail.
        """
        mounts = [f"mount={identity} {root}{IDENTITY} nullfs ro,nosuid 0 0"] if identity else []
        await self._run(
            *("jail", "-c", f"name={name}", f"path={root}", "vnet=new", f"host.hostname={hostname}"),
            *(*mounts, "mount.devfs", "devfs_ruleset=4"),
            *("enforce_statfs=2", "securelevel=2", "children.max=0", "allow.noset_hostname", "allow.noraw_sockets"),
            *(f"vnet.interface={interface}", "exec.clean", f"exec.start={_START}"),
        )

    async def configure_interface(self, name: str, interface: str, *, address: str, prefix: int, gateway: str) -> None:
        """Set the address and the default route of a jail."""
        await self._run("ifconfig", "-j", name, interface, "inet", f"{address}/{prefix}", "up")
        await self._run("route", "-n", "-j", name, "add", "default", gateway)

    async def configure_loopback(self, name: str) -> None:
        await self._run("ifconfig", "-j", name, "lo0", "inet", "127.0.0.1/8", "up")

    async def remove(self, name: str, interface: str = "") -> None:
        """Kill the processes of a jail, reclaim its interface and remove the jail, if it exists."""
        await self.signal(name, "KILL")
        if interface:
            # The jail may have ended with its last process, which returns its interface to the host.
            absent = ("Device not configured", "does not exist", *_NOT_FOUND)
            await self._run.run_unless_absent("ifconfig", interface, "-vnet", name, absent=absent)
        await self._run.run_unless_absent("jail", "-R", name, absent=_NOT_FOUND)

    async def signal(self, name: str, signal: str) -> None:
        """Send a signal to all processes of a jail, if it exists and has any."""
        try:
            await self._run("pkill", f"-{signal}", "-j", name, silent=True)
        except BackendFailed as error:
            if not any(words in error.message for words in _NOT_FOUND):
                raise
