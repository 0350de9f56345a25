"""Mount volumes in jails and unmount file systems from them. Failed unmounts are retried in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_gateway.errors import BackendFailed, Busy, GatewayError, Invalid
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.jail import mount_point
from sandbox_gateway.hosts.jail_zfs.jail.mount_table import MountEntry, MountTable
from sandbox_gateway.hosts.threads import run_in_thread
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Mount
from sandbox_gateway.tasks import BackgroundTasks, finish_despite_cancellation

_FIRST_RETRY_SECONDS = 0.5
_MAX_RETRY_SECONDS = 30.0
_PATH_CHANGED_MESSAGES = ("No such file or directory", "Not a directory", "Too many levels of symbolic links")

MountFilter = Callable[[MountEntry], bool]
"""A function that returns whether an entry of the mount table matches."""

log = Logger("volumes")


@dataclass
class _StuckMount:
    mount: MountEntry
    reason: str
    unmount_event: asyncio.Event = field(default_factory=asyncio.Event)


class JailMounts:
    """Manages the mounts in jails."""

    def __init__(self, run: CommandRunner, table: MountTable, background: BackgroundTasks) -> None:
        self._run = run
        self._table = table
        self._background = background
        self._nodes: set[str] = set()
        """Paths where volumes are mounted, or are being mounted."""
        self._stuck_mounts: dict[str, _StuckMount] = {}

    # -- mounting ---------------------------------------------------------------------------------------------------

    async def mount(self, root: Path, source: Path, mount: Mount) -> None:
        """Mount ``source`` at ``mount.path`` under the jail's ``root``. Raises Invalid if the path is unsuitable.

        If the jail is running, call this inside ``JailSuspension.suspended``. If a symbolic link still redirects the
        mount, this method removes the mount and raises Invalid.
        """
        node = f"{root}{mount.path}"
        is_new = node not in self._nodes
        self._nodes.add(node)
        try:
            await finish_despite_cancellation(run_in_thread(mount_point.prepare, root, mount.path))
            await finish_despite_cancellation(self._mount(source, node, mount))
        except asyncio.CancelledError:
            if is_new:
                await finish_despite_cancellation(self._undo_mount(source, node))
            raise
        except BaseException:
            if is_new:
                self._nodes.discard(node)
            raise

    async def _undo_mount(self, source: Path, node: str) -> None:
        for each in await self._table.list_all():
            if (each.node, each.special) == (node, str(source)):
                await self.unmount_or_retry(each)
        self._nodes.discard(node)

    async def _mount(self, source: Path, node: str, mount: Mount) -> None:
        options = f"{'ro' if mount.read_only else 'rw'},nosuid,nocover"
        try:
            await self._run("mount", "-t", "nullfs", "-o", options, str(source), node)
        except BackendFailed as error:
            if "Device busy" in error.message:
                raise Invalid(
                    f"something is already mounted on {mount.path}: choose a different path, or unmount it first"
                ) from None
            if any(text in error.message for text in _PATH_CHANGED_MESSAGES) and f"{source}: " not in error.message:
                raise Invalid(
                    f"a volume cannot be mounted on {mount.path}, because the sandbox removed the path during the "
                    "mount: try again"
                ) from None
            raise
        mounts = [each for each in await self._table.list_all() if each.special == str(source)]
        if any(each.node == node for each in mounts):
            return
        for stray in mounts:
            if stray.node not in self._nodes:
                log.error(
                    "the sandbox redirected the mount of a volume: removing the mount",
                    volume=mount.volume,
                    wanted=node,
                    actual=stray.node,
                )
                await self._table.unmount(stray)
        raise Invalid(
            f"a volume cannot be mounted on {mount.path}, because the path contains a symbolic link: "
            "choose a different path"
        )

    def adopt(self, mount: MountEntry) -> None:
        """Take over a mount from an earlier gateway process."""
        self._nodes.add(mount.node)

    async def list_under(self, root: Path, volumes: Path) -> list[MountEntry]:
        """Return the mounts under ``root`` whose source is in the directory ``volumes``, deepest and newest first."""
        return [each for each in await self._table.list_under(root) if _is_under(each.special, volumes)]

    # -- unmounting -------------------------------------------------------------------------------------------------

    async def unmount(self, mount: MountEntry) -> None:
        """Unmount a volume, by force if it is in use. Raises Busy if that fails."""
        try:
            await self._table.unmount(mount)
        except BackendFailed as error:
            raise Busy(f"{mount.node} cannot be unmounted ({error.message}): try again") from None
        self._nodes.discard(mount.node)

    async def unmount_all(self, root: Path) -> None:
        """Unmount everything under the root of a stopped jail. Failed unmounts are retried in the background."""
        for mount in await self._table.list_under(root):
            await self.unmount_or_retry(mount)
        self._nodes = {node for node in self._nodes if not _is_under(node, root)}

    async def unmount_under(self, root: Path) -> None:
        """Unmount everything in a directory. Raises BackendFailed if a mount cannot be removed."""
        for mount in await self._table.list_under(root):
            await self._table.unmount(mount)

    async def sweep(self, directory: Path, in_use: Container[str]) -> list[str]:
        """Unmount everything in instances that are not in ``in_use``. ``directory`` contains all instances.

        Returns a sentence for each mount.
        """
        unmounted_nodes: list[str] = []
        stuck_nodes: list[str] = []
        for mount in await self._table.list_under(directory):
            instance = Path(mount.node).relative_to(directory).parts[0]
            if mount.kind in ("nullfs", "devfs") and instance not in in_use:
                (unmounted_nodes if await self.unmount_or_retry(mount) else stuck_nodes).append(mount.node)
        return [f"removed the mount {node}, which belonged to no running sandbox" for node in unmounted_nodes] + [
            f"the mount {node}, which belongs to no running sandbox, cannot be unmounted; the gateway retries"
            for node in stuck_nodes
        ]

    async def unmount_or_retry(self, mount: MountEntry) -> bool:
        """Unmount a volume and return True. On failure, return False and retry in the background."""
        try:
            await self.unmount(mount)
            return True
        except Busy as error:
            if mount.handle not in self._stuck_mounts:
                log.warning(
                    "a volume could not be unmounted; the gateway retries", node=mount.node, reason=error.message
                )
                self._stuck_mounts[mount.handle] = stuck_mount = _StuckMount(mount, error.message)
                self._background.start(self._retry(stuck_mount))
            return False

    async def _retry(self, stuck_mount: _StuckMount) -> None:
        delay = _FIRST_RETRY_SECONDS
        while not stuck_mount.unmount_event.is_set():
            await asyncio.sleep(delay)
            delay = min(delay * 2, _MAX_RETRY_SECONDS)
            try:
                await self.unmount(stuck_mount.mount)
            except GatewayError as error:
                stuck_mount.reason = error.message
                continue
            log.info("a volume was unmounted after retries", node=stuck_mount.mount.node)
            del self._stuck_mounts[stuck_mount.mount.handle]
            stuck_mount.unmount_event.set()

    def describe_stuck_mounts(self, matches: MountFilter) -> list[str]:
        """Return a sentence for each matching mount that cannot be unmounted yet."""
        return [
            f"{each.reason}; the gateway retries the unmount"
            for each in self._stuck_mounts.values()
            if matches(each.mount)
        ]

    async def wait_until_unmounted(self, matches: MountFilter) -> None:
        """Wait until the last stuck mount that matches has been unmounted."""
        for each in list(self._stuck_mounts.values()):
            if matches(each.mount):
                await each.unmount_event.wait()


def _is_under(path: str, directory: Path) -> bool:
    return path.startswith(f"{directory}/")
