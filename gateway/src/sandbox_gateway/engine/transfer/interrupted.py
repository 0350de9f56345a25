"""Keep the received part of an interrupted import, so that another import can continue with the rest of the stream.

A partial import is not a snapshot. Only the next import of the same snapshot uses it. It is removed after a while, and
when the gateway starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from sandbox_gateway.engine.context import Context
from sandbox_gateway.errors import NotFound
from sandbox_gateway.hosts.base import ImportTarget, ResumableTarget, SnapshotPart
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Snapshot, SnapshotKind, now
from sandbox_gateway.tasks import clean_up

if TYPE_CHECKING:
    from sandbox_gateway.engine.transfer.manifest import Manifest

KEPT_SECONDS = 24 * 3600.0
_MAX_IMPORTS = 4

log = Logger("engine")


@dataclass(frozen=True)
class InterruptedImport:
    """An import that can be continued.

    ``snapshot``: the id of the snapshot in the gateway that exported it. ``signer``: a fingerprint.
    """

    id: str
    snapshot: str
    signer: str
    resume_token: str
    expires_at: datetime
    target: ResumableTarget


class InterruptedImports:
    def __init__(self, context: Context) -> None:
        self._host = context.host
        self._background = context.background
        self._imports: dict[tuple[str, str], InterruptedImport] = {}
        """The imports, oldest first, keyed by the signer and the id of the snapshot in its gateway."""

    def list(self) -> list[InterruptedImport]:
        return list(self._imports.values())

    async def begin(
        self, snapshot: Snapshot, manifest: Manifest, sizes: Mapping[SnapshotPart, int], signer: str, *, authentic: bool
    ) -> ImportTarget:
        """Begin the import of ``snapshot``, or continue an interrupted one, whose id ``snapshot`` then gets.

        If the file is whole, an interrupted import of the same snapshot is discarded. Raises NotFound if there is
        nothing to continue.
        """
        interrupted_import = self._imports.pop((signer, manifest.snapshot_id), None)
        if manifest.continues:
            if interrupted_import is None:
                raise NotFound(
                    "interrupted import",
                    manifest.snapshot_id,
                    message=f"the file continues an interrupted import of snapshot {manifest.snapshot_id}, of which "
                    "this gateway has nothing left: export the snapshot without a resume token",
                )
            _set_id(snapshot, interrupted_import.id)
            interrupted_import.target.resume(snapshot, sizes)
            return interrupted_import.target
        if interrupted_import is not None:
            await interrupted_import.target.discard()
        return await self._host.begin_import(snapshot, sizes, line=manifest.line, authentic=authentic)

    async def keep_or_discard(
        self, snapshot: Snapshot, manifest: Manifest, target: ImportTarget, signer: str, *, may_continue: bool
    ) -> None:
        """End an import that failed. ``may_continue``: keep what has arrived, if the host can continue from there."""
        token = await target.suspend() if may_continue and isinstance(target, ResumableTarget) else ""
        if not token or not isinstance(target, ResumableTarget):
            await target.discard()
            return
        key = (signer, manifest.snapshot_id)
        expires_at = now() + timedelta(seconds=KEPT_SECONDS)
        older_import = self._imports.pop(key, None)
        self._imports[key] = InterruptedImport(snapshot.id, manifest.snapshot_id, signer, token, expires_at, target)
        self._background.start(self._discard_later(snapshot.id, token))
        log.info("import interrupted", snapshot=manifest.snapshot_id, id=snapshot.id)
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

    async def _discard_later(self, id: str, token: str) -> None:
        await asyncio.sleep(KEPT_SECONDS)
        for each in self.list():
            if (each.id, each.resume_token) == (id, token):
                await clean_up(log, self._discard(each))

    async def _discard(self, interrupted_import: InterruptedImport) -> None:
        key = (interrupted_import.signer, interrupted_import.snapshot)
        if self._imports.get(key) is interrupted_import:
            del self._imports[key]
        await interrupted_import.target.discard()


def _set_id(snapshot: Snapshot, id: str) -> None:
    snapshot.id = id
    if snapshot.kind is SnapshotKind.TEMPLATE:
        snapshot.template_id = snapshot.origin = id
