"""Write the image of an imported volume."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from sandbox_gateway.hosts.base import SnapshotPart
from sandbox_gateway.hosts.kvm_xfs.volumes.file_system import repair_imported_image
from sandbox_gateway.hosts.kvm_xfs.volumes.store import VolumeStore
from sandbox_gateway.hosts.os_errors import translated_os_errors
from sandbox_gateway.hosts.positional_writes import write_all
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Volume
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

log = Logger("volumes")


class VolumeImageTarget:
    """The image of a volume that is being imported: an implementation of hosts.base.ImportTarget.

    ``on_commit`` and ``on_discard`` are called at the end of ``commit`` and ``discard``.
    """

    def __init__(
        self, store: VolumeStore, volume: Volume, *, on_commit: Callable[[], None], on_discard: Callable[[], None]
    ) -> None:
        self._store = store
        self._volume = volume
        self._on_commit = on_commit
        self._on_discard = on_discard
        self._descriptor = -1

    def create(self, size: int) -> None:
        """Create an image of ``size`` bytes, which is a single hole. Raises GatewayError."""
        with translated_os_errors():
            image = self._store.begin_import(self._volume)
            self._descriptor = os.open(image, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._descriptor, size)

    def write(self, part: SnapshotPart, offset: int, data: bytes) -> None:
        with translated_os_errors():
            write_all(self._descriptor, data, offset)

    async def commit(self) -> None:
        self._close()
        await repair_imported_image(self._store.partial_image(self._volume))
        with translated_os_errors():
            await finish_despite_cancellation(asyncio.to_thread(self._store.commit_import, self._volume))
        self._on_commit()

    async def discard(self) -> None:
        self._close()
        await clean_up(log, asyncio.to_thread(self._store.discard_import, self._volume))
        self._on_discard()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
