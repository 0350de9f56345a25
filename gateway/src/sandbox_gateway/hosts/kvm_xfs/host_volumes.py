"""The volumes of a KVM/XFS host: who has which, captured, rolled back and grown while they do.

Beside the records there is no list of attachments: what each machine that runs has is known from its sandbox, what
a server lets in follows it. To take something away never keeps anybody waiting: it is tried again until it succeeds,
and what stands for it meanwhile (a machine's address) is not given to another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox_gateway.errors import GatewayError, NotFound
from sandbox_gateway.hosts.base import Endpoint, GuestMount, Scan, VolumeState
from sandbox_gateway.hosts.kvm_xfs.layout import Layout, explaining
from sandbox_gateway.hosts.kvm_xfs.volume_server import VolumeServers
from sandbox_gateway.hosts.kvm_xfs.volumes import Ports, Recording, VolumeStore
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Mount, Sandbox, Volume, VolumeSnapshot

log = Logger("volumes")

_RETRY_SECONDS = (1.0, 2.0, 5.0, 15.0, 60.0)
_DETACH_SECONDS = 10.0
_CLOSE_SECONDS = 10.0


@dataclass
class _Share:
    """A volume, who shall have it, and whom its server was told of last."""

    volume: str
    port: int
    clients: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """By instance: its address, and whether it may read only."""
    told: dict[str, bool] | None = None
    """By address. None: nobody knows."""
    stuck: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the server, or the image, changes."""


class VolumeVerbs(ABC):
    """The part of hosts.base.Host that is about volumes."""

    def __init__(self, layout: Layout, servers: VolumeServers) -> None:
        self._store = VolumeStore(layout)
        self._servers = servers
        self._shares: dict[str, _Share] = {}
        self._ports = Ports(())
        self._leaving: set[asyncio.Task[None]] = set()

    @abstractmethod
    def endpoint(self, sandbox: Sandbox) -> Endpoint: ...

    # -- life -------------------------------------------------------------------------------------------------------

    async def _find_volumes(self, scan: Scan) -> None:
        """Before anything else is asked of volumes; ``scan`` knows the sandboxes and their snapshots."""
        self._ports = await asyncio.to_thread(self._store.scan, scan)
        self._shares = {volume.id: _Share(volume.id, volume.host["port"]) for volume in scan.volumes}

    async def _adopt_volumes(self, scan: Scan, addresses: Mapping[str, str]) -> None:
        """Let the servers agree with the records of the machines that run: ``addresses`` by instance."""
        try:
            scan.repaired += await self._servers.open(set(self._shares))
        except GatewayError as error:
            scan.repaired.append(f"the servers of volumes could not be found again: {error.message}")
        for sandbox in scan.sandboxes:
            for mount in sandbox.mounts if sandbox.instance in addresses else []:
                if share := self._shares.get(mount.volume):
                    share.clients[sandbox.instance] = (addresses[sandbox.instance], mount.read_only)
        shares = list(self._shares.values())
        for share, failed in zip(shares, await self._told(shares), strict=True):
            if failed is not None:
                scan.repaired.append(f"volume {share.volume} is not served: {failed}; it is tried again")
                self._later(self._until_told(share))
        for volume in self._store.growing:
            try:
                await self._servers.grow(volume.id)
                await asyncio.to_thread(self._store.save, volume)  # Not before: until then the next start does it anew.
            except (GatewayError, OSError) as error:
                scan.repaired.append(f"volume {volume.id} could not be grown to its end: {error}")

    async def _close_volumes(self) -> None:
        """Servers go on. What could not be taken away until now is taken away by the next gateway."""
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=_CLOSE_SECONDS)
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._servers.close()

    # -- volumes ----------------------------------------------------------------------------------------------------

    async def create_volume(self, volume: Volume, source: VolumeSnapshot | None = None) -> None:
        port = self._ports.take()
        volume.host = {"port": port}
        try:
            with explaining():
                await self._store.create(volume, source)
        except BaseException:
            self._ports.give_back(port)
            raise
        self._shares[volume.id] = _Share(volume.id, port)

    async def grow_volume(self, volume: Volume, size_mb: int) -> None:
        share = self._share(volume.id)
        async with share.lock:
            with explaining():
                await asyncio.to_thread(self._store.grow, volume.id, size_mb)
                await self._servers.grow(volume.id)
                grown = volume.model_copy(update={"size_mb": size_mb})
                await asyncio.to_thread(self._store.save, grown)
            volume.size_mb = size_mb

    async def remove_volume(self, volume: Volume) -> None:
        share = self._share(volume.id)
        async with share.lock:
            with explaining():
                await asyncio.to_thread(self._store.remove, volume.id)
            del self._shares[volume.id]
        self._later(self._removed(share))

    async def _removed(self, share: _Share) -> None:
        """Nobody uses the server any more, and its image has no name: it may take its time."""
        await self._until_done(share, lambda: self._servers.stop(share.volume))
        self._ports.give_back(share.port)

    async def volume_state(self, volume: Volume) -> VolumeState:
        share = self._share(volume.id)
        stuck = [share.stuck] if share.stuck else []
        try:
            return VolumeState(await self._servers.used_bytes(volume.id, self._store.whole_image(volume.id)), stuck)
        except GatewayError as error:
            return VolumeState(0, [*stuck, error.message])

    async def capture_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        with explaining():
            async with self._recording([snapshot]) as recordings:
                await recordings.take()
                await recordings.commit()

    async def remove_volume_snapshot(self, snapshot: VolumeSnapshot) -> None:
        with explaining():
            await asyncio.to_thread(self._store.remove_snapshot, snapshot)

    async def rollback_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        share = self._share(volume.id)
        async with share.lock:
            with explaining():
                await asyncio.to_thread(self._store.stage, volume, snapshot)
                try:
                    share.told = None
                    await self._servers.stop(volume.id)
                    await asyncio.to_thread(self._store.swap, volume.id)
                    await self._tell(share)
                except BaseException:
                    await self._back(share)
                    raise
                finally:
                    await asyncio.to_thread(self._store.settle, volume.id)

    async def _back(self, share: _Share) -> None:
        """After a rollback that failed: the old image again, and the clients it had."""
        share.told = None
        try:
            # An image that is served still is not taken away from its clients: what they write would be lost.
            await self._servers.stop(share.volume)
            await asyncio.to_thread(self._store.swap_back, share.volume)
        except (GatewayError, OSError) as error:
            log.error("volume left as it is", volume=share.volume, reason=str(error))
        self._later(self._until_told(share))

    # -- capturing --------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _recording(self, snapshots: Sequence[VolumeSnapshot]) -> AsyncIterator[Recordings]:
        """Within, ``take`` and ``commit`` them; where that, or anything after it, fails, nothing of them remains."""
        async with contextlib.AsyncExitStack() as stack:
            for id in sorted({snapshot.volume for snapshot in snapshots}):
                await stack.enter_async_context(self._share(id).lock)
            recordings = Recordings(self._servers, [self._store.recording(snapshot) for snapshot in snapshots])
            try:
                await recordings.prepare()
                yield recordings
            except BaseException:
                await recordings.undo()
                raise
            finally:
                recordings.close()

    # -- who has them -----------------------------------------------------------------------------------------------

    async def attach(self, sandbox: Sandbox, mount: Mount) -> None:
        share = self._share(mount.volume)
        before = share.clients.get(sandbox.instance)
        try:
            await self._admit(sandbox, [mount], self.endpoint(sandbox).address)
        except BaseException:
            share.clients.pop(sandbox.instance, None)
            if before is not None:
                share.clients[sandbox.instance] = before
            self._later(self._until_told(share))
            raise

    async def detach(self, sandbox: Sandbox, mount: Mount) -> None:
        if share := self._shares.get(mount.volume):
            share.clients.pop(sandbox.instance, None)
            await asyncio.wait([self._later(self._until_told(share))], timeout=_DETACH_SECONDS)

    def _present(self, sandbox: Sandbox) -> list[Mount]:
        """Its mounts of volumes that are there: it is started without one whose record is damaged."""
        for mount in sandbox.mounts:
            if mount.volume not in self._shares:
                log.warning("not mounted: the volume is missing", sandbox=sandbox.id, volume=mount.volume)
        return [mount for mount in sandbox.mounts if mount.volume in self._shares]

    def guest_mounts(self, sandbox: Sandbox) -> list[GuestMount]:
        return [
            self._servers.mounts(share.volume, share.port, mount.path, mount.read_only)
            for mount in sandbox.mounts
            if (share := self._shares.get(mount.volume))
        ]

    async def _admit(self, sandbox: Sandbox, mounts: Sequence[Mount], address: str) -> None:
        """Let an instance have volumes: when this returns, they are served to its address.

        What is half done on failure is the caller's to undo, with ``_dismiss``.
        """
        shares = [self._share(mount.volume) for mount in mounts]
        for share, mount in zip(shares, mounts, strict=True):
            share.clients[sandbox.instance] = (address, mount.read_only)
        await _all(self._tell_alone(share) for share in shares)

    def _dismiss(self, instance: str, then: Callable[[], Awaitable[None]]) -> bool:
        """Take all its volumes away from an instance whose machine has ended, and do ``then`` what waits for that.

        Returns at once; False: it had none, and nothing is done.
        """
        shares = [share for share in self._shares.values() if share.clients.pop(instance, None)]
        if shares:
            self._later(self._dismissed(shares, then))
        return bool(shares)

    async def _dismissed(self, shares: Sequence[_Share], then: Callable[[], Awaitable[None]]) -> None:
        await asyncio.gather(*(self._until_told(share) for share in shares))
        await then()

    async def _told(self, shares: Sequence[_Share]) -> list[BaseException | None]:
        """Tell the servers of volumes; what went wrong with each."""
        return await asyncio.gather(*(self._tell_alone(share) for share in shares), return_exceptions=True)

    async def _until_told(self, share: _Share) -> None:
        await self._until_done(share, lambda: self._tell_alone(share))

    async def _until_done(self, share: _Share, work: Callable[[], Awaitable[None]]) -> None:
        for delay in itertools.chain(_RETRY_SECONDS, itertools.repeat(_RETRY_SECONDS[-1])):
            try:
                await work()
                break
            except Exception as error:
                share.stuck = f"who has volume {share.volume} cannot be changed: {error}; it is tried again"
                log.warning("volume not told", volume=share.volume, reason=str(error))
            await asyncio.sleep(delay)

    async def _tell_alone(self, share: _Share) -> None:
        async with share.lock:
            await self._tell(share)

    async def _tell(self, share: _Share) -> None:
        """Let the server know who shall have the volume; nobody: it ends. Its lock is held."""
        if share is not self._shares.get(share.volume):
            return  # Removed meanwhile.
        wanted = dict(share.clients.values())
        if share.told != wanted:
            share.told = None
            if not wanted or not self._store.image(share.volume).exists():
                await self._servers.stop(share.volume)
            if wanted:
                image = self._store.whole_image(share.volume)
                await self._servers.serve(share.volume, image, share.port, wanted)
            share.told = wanted
        share.stuck = ""

    def _share(self, volume: str) -> _Share:
        if share := self._shares.get(volume):
            return share
        raise NotFound("volume", volume)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task


class Recordings:
    """Snapshots of volumes in the making, all of one instant."""

    def __init__(self, servers: VolumeServers, recordings: Sequence[Recording]) -> None:
        self._servers = servers
        self._recordings = recordings

    async def prepare(self) -> None:
        """Write back what can be written back ahead, so that nothing stands still for it."""
        await _all(self._prepare(each) for each in self._recordings)

    async def _prepare(self, recording: Recording) -> None:
        await self._servers.flush(recording.volume)
        await asyncio.to_thread(recording.prepare)

    async def take(self) -> None:
        """Let all of them stand still, clone them, let them go on."""
        async with contextlib.AsyncExitStack() as stack:
            await _all(stack.enter_async_context(self._servers.frozen(each.volume)) for each in self._recordings)
            await asyncio.to_thread(self._each, Recording.take)

    async def commit(self) -> None:
        if self._recordings:
            await asyncio.to_thread(self._each, Recording.commit)

    async def undo(self) -> None:
        if self._recordings:
            await asyncio.to_thread(self._each, Recording.undo)

    def close(self) -> None:
        self._each(Recording.close)

    def _each(self, step: Callable[[Recording], None]) -> None:
        for recording in self._recordings:
            step(recording)


async def _all(works: Iterable[Awaitable[None]]) -> None:
    """Wait for all of them, then raise what went wrong first."""
    done = await asyncio.gather(*works, return_exceptions=True)
    if failed := next((error for error in done if error is not None), None):
        raise failed
