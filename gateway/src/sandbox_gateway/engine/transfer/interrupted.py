"""Keep the received part of an interrupted import, so that another import can continue with the rest.

A host that can continue a ZFS stream has received the complete chunks, and needs a new file with the rest of the
stream. Any other import continues with the rest of the same file.

A partial import is neither a snapshot nor a volume. Only the next import of the same snapshot uses it. It is removed
after a while, and when the gateway starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from sandbox_gateway.engine.context import Context
from sandbox_gateway.errors import Conflict, NotFound
from sandbox_gateway.hosts.base import ImportBase, ImportTarget, ResumableTarget, SnapshotPart
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Snapshot, SnapshotKind, Volume, now
from sandbox_gateway.tasks import clean_up

if TYPE_CHECKING:
    from sandbox_gateway.engine.transfer.container import Decoder
    from sandbox_gateway.engine.transfer.manifest import Manifest, VolumeManifest

KEPT_SECONDS = 24 * 3600.0
_MAX_IMPORTS = 4

log = Logger("engine")


@dataclass(frozen=True)
class Continuation:
    """A request to continue the interrupted import ``id`` with the bytes of its file from ``offset``."""

    id: str
    offset: int


@dataclass(frozen=True, eq=False)
class ReceivedFile:
    """The beginning of a file. ``record``: of the snapshot or volume that is being imported."""

    decoder: Decoder
    record: Snapshot | Volume
    target: ImportTarget
    size: int
    digest: str
    """The number of bytes that were used, and their SHA-256."""
    missing_disk_bytes: int
    missing_memory_bytes: int
    """The bytes that were announced but have not been written, on the disk and in the memory root."""


@dataclass(frozen=True, eq=False)
class InterruptedImport:
    """An import that can be continued, either with a new file for ``resume_token``, or with the rest of ``file``.

    ``snapshot``: the id of the snapshot in the gateway that exported it. ``signer``: a fingerprint.
    """

    id: str
    snapshot: str
    signer: str
    resume_token: str
    expires_at: datetime
    target: ImportTarget
    file: ReceivedFile | None = None
    base: str = ""
    """The id, in that gateway, of the snapshot that the file needs."""


class InterruptedImports:
    def __init__(self, context: Context) -> None:
        self._host = context.host
        self._background = context.background
        self._imports: dict[tuple[str, str], InterruptedImport] = {}
        """The imports, oldest first, keyed by the signer and the id of the snapshot in its gateway."""

    def list(self) -> list[InterruptedImport]:
        return list(self._imports.values())

    async def begin(
        self,
        snapshot: Snapshot,
        manifest: Manifest,
        sizes: Mapping[SnapshotPart, int],
        signer: str,
        *,
        authentic: bool,
        base: ImportBase | None = None,
    ) -> ImportTarget:
        """Begin the import of ``snapshot``, or continue an interrupted one, whose id ``snapshot`` then gets.

        ``base``: the snapshot that the file needs. The caller prevents its removal until the import ends.

        If the file is whole, an interrupted import of the same snapshot is discarded. Raises NotFound if there is
        nothing to continue.
        """
        if manifest.continues:
            interrupted_import = self._imports.get((signer, manifest.snapshot_id))
            if interrupted_import is None or not isinstance(interrupted_import.target, ResumableTarget):
                raise NotFound(
                    "interrupted import",
                    manifest.snapshot_id,
                    message=f"the file continues an interrupted import of snapshot {manifest.snapshot_id}, of which "
                    "this gateway has nothing left: export the snapshot without a resume token",
                )
            del self._imports[signer, manifest.snapshot_id]
            _set_id(snapshot, interrupted_import.id)
            interrupted_import.target.resume(snapshot, sizes)
            return interrupted_import.target
        await self.discard_older(manifest, signer)
        return await self._host.begin_import(snapshot, sizes, line=manifest.line, authentic=authentic, base=base)

    async def discard_older(self, manifest: Manifest | VolumeManifest, signer: str) -> None:
        """Discard the interrupted import of the snapshot, if there is one, because its whole file is imported."""
        interrupted_import = self._imports.get((signer, manifest.snapshot_id))
        if interrupted_import is not None:
            await self._discard(interrupted_import)

    def find_file(self, continuation: Continuation) -> ReceivedFile:
        """Return the file that a request continues. Raises NotFound, or Conflict for another offset."""
        for each in self._imports.values():
            if each.id == continuation.id and each.file is not None:
                if each.file.size == continuation.offset:
                    return each.file
                raise Conflict(
                    f"the import {continuation.id} has received {each.file.size} bytes of its file, so it cannot "
                    f"continue at byte {continuation.offset}: send the file from byte {each.file.size}"
                )
        raise NotFound(
            "interrupted import",
            continuation.id,
            message=f"there is no interrupted import {continuation.id} that could continue with the rest of its file: "
            "import the whole file",
        )

    def take(self, file: ReceivedFile) -> ImportTarget:
        """Remove an import, which then continues, from the interrupted ones. Raises NotFound."""
        for key, each in self._imports.items():
            if each.file is file:
                del self._imports[key]
                return file.target
        raise NotFound("interrupted import", file.record.id)

    async def keep_or_discard(
        self, snapshot: Snapshot, manifest: Manifest, target: ImportTarget, signer: str, *, may_continue: bool
    ) -> None:
        """End an import that failed. ``may_continue``: keep what has arrived, if the host can continue from there."""
        token = await target.suspend() if may_continue and isinstance(target, ResumableTarget) else ""
        if not token:
            await target.discard()
            return
        await self._keep(InterruptedImport(snapshot.id, manifest.snapshot_id, signer, token, _compute_expiry(), target))

    async def keep_file(self, file: ReceivedFile, manifest: Manifest | VolumeManifest, signer: str) -> None:
        """Keep an import whose client has sent only a part of the file."""
        base = "" if manifest.kind == "volume" or manifest.base is None else manifest.base.snapshot_id
        await self._keep(
            InterruptedImport(
                file.record.id, manifest.snapshot_id, signer, "", _compute_expiry(), file.target, file, base
            )
        )

    async def _keep(self, interrupted_import: InterruptedImport) -> None:
        key = (interrupted_import.signer, interrupted_import.snapshot)
        older_import = self._imports.pop(key, None)
        self._imports[key] = interrupted_import
        self._background.start(self._discard_later(key, interrupted_import.expires_at))
        log.info("import interrupted", snapshot=interrupted_import.snapshot, id=interrupted_import.id)
        surplus_imports = self.list()[:-_MAX_IMPORTS] + ([older_import] if older_import is not None else [])
        for each in surplus_imports:
            await self._discard(each)

    async def discard(self, id: str) -> None:
        """Remove what an interrupted import has received. Raises NotFound."""
        for each in self.list():
            if each.id == id:
                await self._discard(each)
                return
        raise NotFound("interrupted import", id)

    async def _discard_later(self, key: tuple[str, str], expires_at: datetime) -> None:
        await asyncio.sleep(KEPT_SECONDS)
        interrupted_import = self._imports.get(key)
        # It may be another import of the same snapshot.
        if interrupted_import is not None and interrupted_import.expires_at == expires_at:
            await clean_up(log, self._discard(interrupted_import))

    async def _discard(self, interrupted_import: InterruptedImport) -> None:
        key = (interrupted_import.signer, interrupted_import.snapshot)
        if self._imports.get(key) is interrupted_import:
            del self._imports[key]
        await interrupted_import.target.discard()


def _compute_expiry() -> datetime:
    return now() + timedelta(seconds=KEPT_SECONDS)


def _set_id(snapshot: Snapshot, id: str) -> None:
    snapshot.id = id
    if snapshot.kind is SnapshotKind.TEMPLATE:
        snapshot.template_id = snapshot.origin = id
