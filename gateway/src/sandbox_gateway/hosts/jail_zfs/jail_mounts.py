"""Volumes in jails: what is mounted where, jails that stand still meanwhile, and mounts that do not let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_gateway.errors import BackendFailed, Busy, GatewayError, Invalid
from sandbox_gateway.hosts.jail_zfs import nullfs
from sandbox_gateway.hosts.jail_zfs.commands import Commands, together
from sandbox_gateway.hosts.jail_zfs.jail import Jails, Mounted
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Mount

_RETRY_FIRST = 0.5
_RETRY_LAST = 30.0
_ROUNDS = 2
"""Of SIGSTOP: what was forked while the first went through the jail's processes is met by the second."""
_VANISHED = ("No such file or directory", "Not a directory", "Too many levels of symbolic links")

log = Logger("volumes")


@dataclass
class _Stuck:
    mount: Mounted
    reason: str
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class JailMounts:
    """``state``: a directory of ours; ``later``: starts work that goes on in the background."""

    def __init__(
        self, run: Commands, jails: Jails, state: Path, later: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._run = run
        self._jails = jails
        self._stopped = state / "stopped"
        self._later = later
        self._nodes: set[str] = set()
        """Where volumes are mounted, or are just being mounted."""
        self._stuck: dict[str, _Stuck] = {}

    # -- mounting ---------------------------------------------------------------------------------------------------

    async def mount(self, root: Path, source: Path, mount: Mount) -> None:
        """Mount ``source`` in the jail's ``root`` as ``mount`` says. Invalid: its path cannot be mounted on.

        A jail that runs should be ``still``: what it changes meanwhile is found out afterwards, and undone.
        """
        node = f"{root}{mount.path}"
        fresh = node not in self._nodes
        self._nodes.add(node)
        try:
            await together(asyncio.to_thread(nullfs.prepare, root, mount.path))
            await together(self._mount(source, node, mount))
        except asyncio.CancelledError:
            if fresh:
                await asyncio.shield(self._take_back(source, node))
            raise
        except BaseException:
            if fresh:
                self._nodes.discard(node)
            raise

    async def _take_back(self, source: Path, node: str) -> None:
        for each in await self._jails.mount_table():
            if (each.node, each.special) == (node, str(source)):
                await self.let_go(each)
        self._nodes.discard(node)

    async def _mount(self, source: Path, node: str, mount: Mount) -> None:
        options = f"{'ro' if mount.read_only else 'rw'},nosuid,nocover"
        try:
            await self._run("mount", "-t", "nullfs", "-o", options, str(source), node)
        except BackendFailed as error:
            if "Device busy" in error.message:
                raise Invalid(f"something is mounted on {mount.path} already") from None
            if any(words in error.message for words in _VANISHED) and f"{source}: " not in error.message:
                raise Invalid(f"no volume can be mounted on {mount.path}: it went away meanwhile") from None
            raise
        found = [each for each in await self._jails.mount_table() if each.special == str(source)]
        if any(each.node == node for each in found):
            return
        for astray in found:
            if astray.node not in self._nodes:
                log.error("a mount was led astray and is undone", volume=mount.volume, wanted=node, was=astray.node)
                await self._jails.unmount(astray)
        raise Invalid(f"no volume can be mounted on {mount.path}: a link was put in its way in the sandbox")

    def know(self, mount: Mounted) -> None:
        """It was mounted by a gateway before this one."""
        self._nodes.add(mount.node)

    async def below(self, root: Path, volumes: Path) -> list[Mounted]:
        """What is mounted of ``volumes`` below ``root``, the deepest and newest first."""
        return [each for each in await self._jails.mounts(root) if _is_below(each.special, volumes)]

    # -- unmounting -------------------------------------------------------------------------------------------------

    async def unmount(self, mount: Mounted) -> None:
        """Raises Busy if it does not let go, even by force."""
        try:
            await self._jails.unmount(mount)
        except BackendFailed as error:
            raise Busy(f"{mount.node} does not let itself be unmounted ({error.message}): try again") from None
        self._nodes.discard(mount.node)

    async def release(self, root: Path) -> None:
        """Unmount all below the root of a jail that has ended; what is stuck holds nobody up."""
        for mount in await self._jails.mounts(root):
            await self.let_go(mount)
        self._nodes = {node for node in self._nodes if not _is_below(node, root)}

    async def let_go(self, mount: Mounted) -> bool:
        """Unmount it; or, where that fails, again and again in the background: then False."""
        try:
            await self.unmount(mount)
            return True
        except Busy as error:
            if mount.handle not in self._stuck:
                log.warning("does not unmount, is tried again", node=mount.node, reason=error.message)
                self._stuck[mount.handle] = stuck = _Stuck(mount, error.message)
                self._later(self._try_again(stuck))
            return False

    async def _try_again(self, stuck: _Stuck) -> None:
        wait = _RETRY_FIRST
        while not stuck.gone.is_set():
            await asyncio.sleep(wait)
            wait = min(wait * 2, _RETRY_LAST)
            try:
                await self.unmount(stuck.mount)
            except GatewayError as error:
                stuck.reason = error.message
                continue
            log.info("unmounted at last", node=stuck.mount.node)
            del self._stuck[stuck.mount.handle]
            stuck.gone.set()

    def stuck(self, is_meant: Callable[[Mounted], bool]) -> list[str]:
        """A sentence for each of them."""
        return [f"{each.reason}; it is tried again" for each in self._stuck.values() if is_meant(each.mount)]

    async def freed(self, is_meant: Callable[[Mounted], bool]) -> None:
        """Wait until none of them is stuck any more."""
        for each in list(self._stuck.values()):
            if is_meant(each.mount):
                await each.gone.wait()

    # -- jails that stand still -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def still(self, jails: Iterable[str]) -> AsyncIterator[None]:
        """What runs in the jails does not run inside this; all of it goes on afterwards.

        A file says which stand still, so that a gateway that is started after a crash lets them go on.
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
            await asyncio.shield(self._go_on(names))

    async def _go_on(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                await self._jails.signal(name, "CONT")
                (self._stopped / name).unlink(missing_ok=True)
            except GatewayError as error:
                log.error("a jail stands still; the next start of the gateway lets it go on", jail=name, why=error)

    async def wake(self) -> list[str]:
        """Let go on what a crash left standing still; a sentence for each."""
        names = [path.name for path in self._stopped.iterdir()] if self._stopped.is_dir() else []
        await self._go_on(names)
        return [f"the jail {name} goes on: it was stopped for a change of its volumes" for name in names]


def _is_below(path: str, directory: Path) -> bool:
    return path.startswith(f"{directory}/")
