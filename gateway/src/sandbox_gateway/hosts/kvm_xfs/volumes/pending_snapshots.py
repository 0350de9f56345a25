"""Take snapshots of one volume, or of several volumes at the same instant."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs import commit_protocol, record_files
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import VOLUME_IMAGE_NAME
from sandbox_gateway.hosts.kvm_xfs.volumes.server_pool import ServerPool
from sandbox_gateway.records import VolumeSnapshot
from sandbox_gateway.tasks import wait_for_all


class PendingSnapshot:
    """An uncommitted snapshot. Call ``prepare``, ``clone_image`` (which is fast), then ``commit`` or ``undo``."""

    def __init__(self, image: Path, final_directory: Path, snapshot: VolumeSnapshot) -> None:
        self.volume = snapshot.volume
        self._image = image
        self._final_directory = final_directory
        self._partial_directory = commit_protocol.get_partial_directory(final_directory)
        self._snapshot = snapshot
        self._has_files = False
        self._stack = contextlib.ExitStack()

    def prepare(self) -> None:
        """Do the slow steps in advance: open descriptors, and flush the image."""
        self._partial_directory.parent.mkdir(mode=0o700, exist_ok=True)
        self._partial_directory.mkdir(mode=0o700)
        self._has_files = True
        self._source = self._open(self._image, os.O_RDONLY)
        self._target = self._open(self._partial_directory / VOLUME_IMAGE_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.fsync(self._source)

    def clone_image(self) -> None:
        reflink.clone_fd(self._source, self._target)

    def commit(self) -> None:
        os.fsync(self._target)
        record_files.write_record(self._partial_directory, self._snapshot)
        commit_protocol.commit(self._final_directory)

    def undo(self) -> None:
        """Remove the snapshot, whether or not it is committed."""
        if self._has_files:
            commit_protocol.undo(self._final_directory)

    def close(self) -> None:
        self._stack.close()

    def _open(self, path: Path, flags: int) -> int:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._stack.callback(os.close, descriptor)
        return descriptor


class PendingSnapshots:
    """Uncommitted snapshots of several volumes, taken at the same instant."""

    def __init__(self, servers: ServerPool, snapshots: Sequence[PendingSnapshot]) -> None:
        self._servers = servers
        self._snapshots = snapshots

    async def prepare(self) -> None:
        """Do the slow steps in advance: write cached data to the images, and open descriptors."""
        await wait_for_all(*(self._prepare(each) for each in self._snapshots))

    async def _prepare(self, snapshot: PendingSnapshot) -> None:
        await self._servers.flush(snapshot.volume)
        await asyncio.to_thread(snapshot.prepare)

    async def clone_images(self) -> None:
        """Freeze all volumes, clone their images, and unfreeze the volumes."""
        async with contextlib.AsyncExitStack() as stack:
            await wait_for_all(
                *(stack.enter_async_context(self._servers.frozen(each.volume)) for each in self._snapshots)
            )
            await asyncio.to_thread(self._call_for_each, PendingSnapshot.clone_image)

    async def commit(self) -> None:
        if self._snapshots:
            await asyncio.to_thread(self._call_for_each, PendingSnapshot.commit)

    async def undo(self) -> None:
        if self._snapshots:
            await asyncio.to_thread(self._call_for_each, PendingSnapshot.undo)

    def close(self) -> None:
        self._call_for_each(PendingSnapshot.close)

    def _call_for_each(self, step: Callable[[PendingSnapshot], None]) -> None:
        for snapshot in self._snapshots:
            step(snapshot)
