"""Manage the volumes of a KVM/XFS host and their clients. Capture, roll back and grow volumes while they are mounted.

Only the records of sandboxes store which volumes are attached; the servers' clients are derived from them. If access to
a volume cannot be revoked, the gateway retries in the background until it succeeds. The machine's address is not reused
before then.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sandbox_gateway.errors import GatewayError, NotFound
from sandbox_gateway.hosts.base import GuestMount, Scan, VolumeState
from sandbox_gateway.hosts.kvm_xfs.files.layout import Layout
from sandbox_gateway.hosts.kvm_xfs.part_files import PartFiles
from sandbox_gateway.hosts.kvm_xfs.quarantine import Quarantine
from sandbox_gateway.hosts.kvm_xfs.record_files import RecordReader
from sandbox_gateway.hosts.kvm_xfs.volumes.image_import import VolumeImageTarget
from sandbox_gateway.hosts.kvm_xfs.volumes.pending_snapshots import PendingSnapshots
from sandbox_gateway.hosts.kvm_xfs.volumes.ports import Ports
from sandbox_gateway.hosts.kvm_xfs.volumes.server_pool import ServerPool
from sandbox_gateway.hosts.kvm_xfs.volumes.store import VolumeStore
from sandbox_gateway.hosts.os_errors import translated_os_errors
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Mount, Sandbox, Volume, VolumeSnapshot
from sandbox_gateway.tasks import BackgroundTasks, finish_despite_cancellation, wait_for_all

log = Logger("volumes")

_RETRY_DELAYS_SECONDS = (1.0, 2.0, 5.0, 15.0, 60.0)
_DETACH_TIMEOUT_SECONDS = 10.0
_CLOSE_TIMEOUT_SECONDS = 10.0


@dataclass
class _Share:
    """A volume, its intended clients, and the current clients of its server."""

    volume: str
    port: int
    clients: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """(address, read-only) of each client, keyed by instance."""
    current_clients: dict[str, bool] | None = None
    """Whether each current client of the server is read-only, keyed by address. None: unknown."""
    update_failure: str = ""
    """A sentence about the last update of the clients, if it failed."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Locked while the server or the image changes."""


class KvmVolumes:
    """Manages the volumes of one gateway: their images, their servers, and the machines that mount them."""

    def __init__(self, layout: Layout, quarantine: Quarantine, servers: ServerPool) -> None:
        self._store = VolumeStore(layout, quarantine)
        self._servers = servers
        self._shares: dict[str, _Share] = {}
        self._ports = Ports(())
        self._background = BackgroundTasks(log)

    # -- start and stop ---------------------------------------------------------------------------------------------

    async def find(self, scan: Scan, reader: RecordReader | None = None) -> None:
        """Find the volumes and add them to ``scan``, which must already contain the sandboxes and snapshots.

        Call this method first.
        """
        self._ports = await asyncio.to_thread(self._store.scan, scan, reader or RecordReader())
        self._shares = {volume.id: _Share(volume.id, volume.host["port"]) for volume in scan.volumes}

    async def adopt(self, scan: Scan, addresses: Mapping[str, str]) -> None:
        """Adopt the servers, and make the running machines their clients. ``addresses`` is keyed by instance."""
        try:
            scan.repaired += await self._servers.open(set(self._shares))
        except GatewayError as failure:
            scan.repaired.append(f"the volume servers could not be adopted: {failure.message}")
        for sandbox in scan.sandboxes:
            for mount in sandbox.mounts if sandbox.instance in addresses else []:
                if share := self._shares.get(mount.volume):
                    share.clients[sandbox.instance] = (addresses[sandbox.instance], mount.read_only)
        shares = list(self._shares.values())
        for share, error in zip(shares, await self._update_all(shares), strict=True):
            if error is not None:
                scan.repaired.append(f"volume {share.volume} cannot be served: {error}; the gateway retries")
                self._background.start(self._update_with_retries(share))
        for volume in self._store.growing_volumes:
            try:
                await self._servers.grow(volume.id)
                # This step is the last: if it fails, the next start repeats everything.
                await asyncio.to_thread(self._store.save, volume)
            except (GatewayError, OSError) as failure:
                scan.repaired.append(f"the interrupted growth of volume {volume.id} could not be completed: {failure}")

    async def close(self) -> None:
        """Stop watching the servers, which keep running. The next gateway completes pending revocations."""
        await self._background.wait(_CLOSE_TIMEOUT_SECONDS)
        await self._background.cancel()
        await self._servers.close()

    # -- volumes ----------------------------------------------------------------------------------------------------

    async def create(self, volume: Volume, source: VolumeSnapshot | None = None) -> None:
        port = self._ports.take()
        volume.host = {"port": port}
        try:
            with translated_os_errors():
                await self._store.create(volume, source)
        except BaseException:
            self._ports.release(port)
            raise
        self._shares[volume.id] = _Share(volume.id, port)

    async def open_snapshot(self, snapshot: VolumeSnapshot) -> PartFiles:
        with translated_os_errors():
            return await asyncio.to_thread(self._store.open_snapshot, snapshot)

    async def begin_import(self, volume: Volume, size: int) -> VolumeImageTarget:
        port = self._ports.take()
        volume.host = {"port": port}

        def add_share() -> None:
            self._shares[volume.id] = _Share(volume.id, port)

        def release() -> None:
            self._shares.pop(volume.id, None)
            self._ports.release(port)

        target = VolumeImageTarget(self._store, volume, on_commit=add_share, on_discard=release)
        try:
            await finish_despite_cancellation(asyncio.to_thread(target.create, size))
        except BaseException:
            await target.discard()
            raise
        return target

    async def grow(self, volume: Volume, size_mb: int) -> None:
        share = self._require_share(volume.id)
        async with share.lock:
            with translated_os_errors():
                await asyncio.to_thread(self._store.grow, volume.id, size_mb)
                await self._servers.grow(volume.id)
                record = volume.model_copy(update={"size_mb": size_mb})
                await asyncio.to_thread(self._store.save, record)
            volume.size_mb = size_mb

    async def remove(self, volume: Volume) -> None:
        share = self._require_share(volume.id)
        async with share.lock:
            with translated_os_errors():
                await asyncio.to_thread(self._store.remove, volume.id)
            del self._shares[volume.id]
        self._background.start(self._retire(share))

    async def _retire(self, share: _Share) -> None:
        """Stop the server of a removed volume, retrying until this succeeds, then free its port."""
        await self._retry(share, lambda: self._servers.stop(share.volume))
        self._ports.release(share.port)

    async def state(self, volume: Volume) -> VolumeState:
        share = self._require_share(volume.id)
        failures = [share.update_failure] if share.update_failure else []
        try:
            return VolumeState(
                await self._servers.count_used_bytes(volume.id, self._store.require_image(volume.id)), failures
            )
        except GatewayError as error:
            return VolumeState(0, [*failures, error.message])

    async def capture(self, snapshot: VolumeSnapshot) -> None:
        with translated_os_errors():
            async with self.pending_snapshots([snapshot]) as pending:
                await pending.clone_images()
                await pending.commit()

    async def remove_snapshot(self, snapshot: VolumeSnapshot) -> None:
        with translated_os_errors():
            await asyncio.to_thread(self._store.remove_snapshot, snapshot)

    async def rollback(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        share = self._require_share(volume.id)
        async with share.lock:
            with translated_os_errors():
                await asyncio.to_thread(self._store.stage, volume, snapshot)
                try:
                    # The generation must never be older than the contents.
                    await asyncio.to_thread(self._store.save, volume)
                    share.current_clients = None
                    await self._servers.stop(volume.id)
                    await asyncio.to_thread(self._store.swap, volume.id)
                    await self._update_locked(share)
                except BaseException:
                    await self._restore(share)
                    raise
                finally:
                    await asyncio.to_thread(self._store.remove_staged_files, volume.id)

    async def _restore(self, share: _Share) -> None:
        """Restore the old image and its clients after a failed rollback."""
        share.current_clients = None
        try:
            # If the server cannot be stopped, keep the current image, so that its clients' writes are not lost.
            await self._servers.stop(share.volume)
            await asyncio.to_thread(self._store.swap_back, share.volume)
        except (GatewayError, OSError) as error:
            log.error("a failed rollback could not be undone", volume=share.volume, reason=str(error))
        self._background.start(self._update_with_retries(share))

    # -- captures ---------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def pending_snapshots(self, snapshots: Sequence[VolumeSnapshot]) -> AsyncIterator[PendingSnapshots]:
        """Prepare snapshots. Inside this context, call ``clone_images`` and ``commit``.

        On failure, all snapshots are removed.
        """
        async with contextlib.AsyncExitStack() as stack:
            for id in sorted({snapshot.volume for snapshot in snapshots}):
                await stack.enter_async_context(self._require_share(id).lock)
            pending = PendingSnapshots(
                self._servers, [self._store.create_pending_snapshot(snapshot) for snapshot in snapshots]
            )
            try:
                await pending.prepare()
                yield pending
            except BaseException:
                await pending.undo()
                raise
            finally:
                pending.close()

    # -- clients ----------------------------------------------------------------------------------------------------

    async def attach(self, sandbox: Sandbox, mount: Mount, address: str) -> None:
        """Give the running instance at ``address`` access to a volume."""
        share = self._require_share(mount.volume)
        previous_client = share.clients.get(sandbox.instance)
        try:
            await self.allow(sandbox, [mount], address)
        except BaseException:
            share.clients.pop(sandbox.instance, None)
            if previous_client is not None:
                share.clients[sandbox.instance] = previous_client
            self._background.start(self._update_with_retries(share))
            raise

    async def detach(self, sandbox: Sandbox, mount: Mount) -> None:
        if share := self._shares.get(mount.volume):
            share.clients.pop(sandbox.instance, None)
            await asyncio.wait(
                [self._background.start(self._update_with_retries(share))], timeout=_DETACH_TIMEOUT_SECONDS
            )

    def list_available_mounts(self, sandbox: Sandbox) -> list[Mount]:
        """Return the mounts of a sandbox whose volumes exist. A sandbox starts without its missing volumes."""
        for mount in sandbox.mounts:
            if mount.volume not in self._shares:
                log.warning("a volume was not mounted because it is missing", sandbox=sandbox.id, volume=mount.volume)
        return [mount for mount in sandbox.mounts if mount.volume in self._shares]

    def list_guest_mounts(self, sandbox: Sandbox) -> list[GuestMount]:
        return [
            self._servers.create_guest_mount(share.volume, share.port, mount.path, mount.read_only)
            for mount in sandbox.mounts
            if (share := self._shares.get(mount.volume))
        ]

    async def allow(self, sandbox: Sandbox, mounts: Sequence[Mount], address: str) -> None:
        """Give an instance access to volumes. On return, the servers accept its address.

        On failure, the caller must call ``revoke_all``.
        """
        shares = [self._require_share(mount.volume) for mount in mounts]
        for share, mount in zip(shares, mounts, strict=True):
            share.clients[sandbox.instance] = (address, mount.read_only)
        await wait_for_all(*(self._update(share) for share in shares))

    def revoke_all(self, instance: str, callback: Callable[[], Awaitable[None]]) -> bool:
        """Start revoking the access of an instance whose machine has stopped, and call ``callback`` afterwards.

        Returns immediately. Returns False, without calling ``callback``, if the instance had no volumes.
        """
        shares = [share for share in self._shares.values() if share.clients.pop(instance, None)]
        if shares:
            self._background.start(self._complete_revocation(shares, callback))
        return bool(shares)

    async def _complete_revocation(self, shares: Sequence[_Share], callback: Callable[[], Awaitable[None]]) -> None:
        await asyncio.gather(*(self._update_with_retries(share) for share in shares))
        await callback()

    async def _update_all(self, shares: Sequence[_Share]) -> list[BaseException | None]:
        """Update the clients of several servers. Returns an error or None for each server."""
        return await asyncio.gather(*(self._update(share) for share in shares), return_exceptions=True)

    async def _update_with_retries(self, share: _Share) -> None:
        await self._retry(share, lambda: self._update(share))

    async def _retry(self, share: _Share, work: Callable[[], Awaitable[None]]) -> None:
        for delay in itertools.chain(_RETRY_DELAYS_SECONDS, itertools.repeat(_RETRY_DELAYS_SECONDS[-1])):
            try:
                await work()
                break
            except Exception as error:
                share.update_failure = (
                    f"the clients of volume {share.volume} cannot be changed: {error}; the gateway retries"
                )
                log.warning("the clients of a volume could not be updated", volume=share.volume, reason=str(error))
            await asyncio.sleep(delay)

    async def _update(self, share: _Share) -> None:
        async with share.lock:
            await self._update_locked(share)

    async def _update_locked(self, share: _Share) -> None:
        """Update the clients of a server, and stop a server without clients. The caller must hold the lock."""
        if share is not self._shares.get(share.volume):
            return  # The volume has been removed.
        intended_clients = dict(share.clients.values())
        if share.current_clients != intended_clients:
            share.current_clients = None
            if not intended_clients or not self._store.image(share.volume).exists():
                await self._servers.stop(share.volume)
            if intended_clients:
                image = self._store.require_image(share.volume)
                await self._servers.serve(share.volume, image, share.port, intended_clients)
            share.current_clients = intended_clients
        share.update_failure = ""

    def _require_share(self, volume: str) -> _Share:
        if share := self._shares.get(volume):
            return share
        raise NotFound("volume", volume)
