"""Mount volumes in jails, which are stopped meanwhile, and retry failed unmounts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sandbox_gateway.errors import BackendFailed, Busy, GatewayError, Invalid
from sandbox_gateway.hosts.jail_zfs.command_runner import CommandRunner
from sandbox_gateway.hosts.jail_zfs.jail import mount_point
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.hosts.jail_zfs.jail.mount_table import Mounted, MountTable
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Mount
from sandbox_gateway.tasks import BackgroundTasks, finish_despite_cancellation

_RETRY_FIRST = 0.5
_RETRY_LAST = 30.0
_ROUNDS = 2
"""Rounds of SIGSTOP: the second one stops processes forked during the first."""
_VANISHED = ("No such file or directory", "Not a directory", "Too many levels of symbolic links")

log = Logger("volumes")


@dataclass
class _Stuck:
    mount: Mounted
    reason: str
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class VolumeMounts:
    """The mounts of volumes in jails. ``state`` is the gateway's directory."""

    def __init__(
        self, run: CommandRunner, jails: Jails, table: MountTable, background: BackgroundTasks, state: Path
    ) -> None:
        self._run = run
        self._jails = jails
        self._table = table
        self._background = background
        self._stopped = state / "stopped"
        self._nodes: set[str] = set()
        """Paths where volumes are mounted, or are being mounted."""
        self._stuck: dict[str, _Stuck] = {}

    # -- mounting ---------------------------------------------------------------------------------------------------

    async def mount(self, root: Path, source: Path, mount: Mount) -> None:
        """Mount ``source`` in the jail's ``root`` at the path in ``mount``. Raises Invalid if that is not possible.

        For a running jail, call this inside ``stopped``. If the jail redirects the mount nevertheless, this method
        undoes it.
        """
        node = f"{root}{mount.path}"
        is_new = node not in self._nodes
        self._nodes.add(node)
        try:
            await finish_despite_cancellation(asyncio.to_thread(mount_point.prepare, root, mount.path))
            await finish_despite_cancellation(self._mount(source, node, mount))
        except asyncio.CancelledError:
            if is_new:
                await finish_despite_cancellation(self._undo(source, node))
            raise
        except BaseException:
            if is_new:
                self._nodes.discard(node)
            raise

    async def _undo(self, source: Path, node: str) -> None:
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
                    f"something is already mounted on {mount.path}: choose another path, or unmount it first"
                ) from None
            if any(words in error.message for words in _VANISHED) and f"{source}: " not in error.message:
                raise Invalid(
                    f"no volume can be mounted on {mount.path}, because the sandbox removed the path "
                    "meanwhile: try again"
                ) from None
            raise
        found = [each for each in await self._table.list_all() if each.special == str(source)]
        if any(each.node == node for each in found):
            return
        for stray in found:
            if stray.node not in self._nodes:
                log.error(
                    "the sandbox redirected the mount of a volume: undoing the mount",
                    volume=mount.volume,
                    wanted=node,
                    actual=stray.node,
                )
                await self._table.unmount(stray)
        raise Invalid(
            f"no volume can be mounted on {mount.path}, because the path contains a symbolic link: choose another path"
        )

    def adopt(self, mount: Mounted) -> None:
        """Take over a mount that an earlier gateway process made."""
        self._nodes.add(mount.node)

    async def list_below(self, root: Path, volumes: Path) -> list[Mounted]:
        """Return the mounts of volumes in the directory ``volumes`` below ``root``, deepest and newest first."""
        return [each for each in await self._table.list_below(root) if _is_below(each.special, volumes)]

    # -- unmounting -------------------------------------------------------------------------------------------------

    async def unmount(self, mount: Mounted) -> None:
        """Unmount a volume. Raises Busy if even force fails."""
        try:
            await self._table.unmount(mount)
        except BackendFailed as error:
            raise Busy(f"{mount.node} cannot be unmounted ({error.message}): try again") from None
        self._nodes.discard(mount.node)

    async def unmount_all(self, root: Path) -> None:
        """Unmount everything below the root of a jail that has ended; does not wait for stuck mounts."""
        for mount in await self._table.list_below(root):
            await self.unmount_or_retry(mount)
        self._nodes = {node for node in self._nodes if not _is_below(node, root)}

    async def unmount_or_retry(self, mount: Mounted) -> bool:
        """Unmount a volume. On failure, returns False and retries in the background."""
        try:
            await self.unmount(mount)
            return True
        except Busy as error:
            if mount.handle not in self._stuck:
                log.warning(
                    "a volume could not be unmounted, retrying in the background", node=mount.node, reason=error.message
                )
                self._stuck[mount.handle] = stuck = _Stuck(mount, error.message)
                self._background.start(self._retry(stuck))
            return False

    async def _retry(self, stuck: _Stuck) -> None:
        wait = _RETRY_FIRST
        while not stuck.gone.is_set():
            await asyncio.sleep(wait)
            wait = min(wait * 2, _RETRY_LAST)
            try:
                await self.unmount(stuck.mount)
            except GatewayError as error:
                stuck.reason = error.message
                continue
            log.info("a volume was unmounted after retries", node=stuck.mount.node)
            del self._stuck[stuck.mount.handle]
            stuck.gone.set()

    def stuck(self, matches: Callable[[Mounted], bool]) -> list[str]:
        """Return a sentence for each matching mount that cannot be unmounted yet."""
        return [
            f"{each.reason}; the gateway retries the unmount" for each in self._stuck.values() if matches(each.mount)
        ]

    async def wait_until_unmounted(self, matches: Callable[[Mounted], bool]) -> None:
        """Wait until no matching mount is stuck."""
        for each in list(self._stuck.values()):
            if matches(each.mount):
                await each.gone.wait()

    # -- stopping jails ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def stopped(self, jails: Iterable[str]) -> AsyncIterator[None]:
        """Stop all processes of the jails inside this context.

        A file per stopped jail lets the next gateway resume it after a crash.
        """
        names = sorted(set(jails))
        try:
            for name in names:
                self._stopped.mkdir(mode=0o700, exist_ok=True)
                (self._stopped / name).touch()
                for _ in range(_ROUNDS):
                    await self._jails.signal(name, "STOP")
            yield
        finally:
            await finish_despite_cancellation(self._resume(names))

    async def _resume(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                await self._jails.signal(name, "CONT")
                (self._stopped / name).unlink(missing_ok=True)
            except GatewayError as error:
                log.error(
                    "a stopped jail could not be resumed, the next start of the gateway resumes it",
                    jail=name,
                    reason=error.message,
                )

    async def resume_stopped(self) -> list[str]:
        """Resume jails that are still stopped after a crash. Returns a sentence for each."""
        names = [path.name for path in self._stopped.iterdir()] if self._stopped.is_dir() else []
        await self._resume(names)
        return [f"resumed the jail {name}, which was stopped for a change of its volumes" for name in names]


def _is_below(path: str, directory: Path) -> bool:
    return path.startswith(f"{directory}/")
