"""Find local snapshots that probably share data with one that arrives from another gateway."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.records import MemoryMode, Snapshot

if TYPE_CHECKING:
    from sandbox_gateway.hosts.base import SnapshotSource

_MAX_BASES = 4
"""The number of local snapshots in which a transfer looks for data."""


class Bases:
    def __init__(self, context: Context, collector: Collector) -> None:
        self._host = context.host
        self._index = context.index
        self._collector = collector

    def list_ancestors(self, snapshot: Snapshot) -> list[str]:
        """Return ids of snapshots that probably share data with this one, nearest first."""
        from sandbox_gateway.engine.transfer.manifest import MAX_ANCESTORS

        ids: dict[str, None] = {}
        seen_ids: set[str] = set()
        ancestor: Snapshot | None = snapshot
        while ancestor is not None and ancestor.id not in seen_ids and len(ids) < MAX_ANCESTORS:
            seen_ids.add(ancestor.id)
            origin_id = ancestor.imported.snapshot if ancestor.imported else ""
            parent_id = ancestor.parent or ancestor.template_id
            ids |= dict.fromkeys(id for id in (origin_id, parent_id) if id not in ("", snapshot.id))
            ancestor = self._index.snapshots.get(parent_id)
        return [*ids][:MAX_ANCESTORS]

    @contextlib.asynccontextmanager
    async def opened(self, ids: Sequence[str], *, memory: bool) -> AsyncIterator[list[SnapshotSource]]:
        """Open the local snapshots that have these ids here or in the gateway from which they came.

        ``memory``: with their memory, if they have any.
        """
        with contextlib.ExitStack() as stack:
            sources: list[SnapshotSource] = []
            for snapshot in self._find(ids):
                has_memory = memory and snapshot.memory is not MemoryMode.NONE
                # Without this base, its data is transferred or written again.
                with contextlib.suppress(GatewayError):
                    async with self._collector.pinned_then_collected(snapshot):
                        source = await self._host.open_snapshot(
                            snapshot, memory=has_memory and not self._host.memory_problem(snapshot)
                        )
                    stack.callback(source.close)
                    sources.append(source)
            yield sources

    def _find(self, ids: Sequence[str]) -> list[Snapshot]:
        found_snapshots = []
        for id in ids:
            for snapshot in self._index.snapshots.values():
                if snapshot.id == id or (snapshot.imported is not None and snapshot.imported.snapshot == id):
                    found_snapshots.append(snapshot)
        return found_snapshots[:_MAX_BASES]
