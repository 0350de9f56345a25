"""Find local snapshots that share data with one that is exported, or that arrives from another gateway.

An incremental file needs exactly one other snapshot, its *base*. Other imports use what they find, and need nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.errors import Conflict, GatewayError, Invalid, NotFound, Unsupported
from sandbox_gateway.hosts.base import ImportBase, SnapshotPart
from sandbox_gateway.records import MemoryMode, Snapshot, SnapshotKind

if TYPE_CHECKING:
    from sandbox_gateway.engine.transfer.manifest import Base
    from sandbox_gateway.hosts.base import SnapshotSource

_MAX_BASES = 4
"""The number of local snapshots in which a transfer looks for data."""
_MAX_LISTED_BASES = 8


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
                            snapshot, memory=has_memory and not self._host.find_memory_problem(snapshot)
                        )
                    stack.callback(source.close)
                    sources.append(source)
            yield sources

    async def require_export_base(self, snapshot: Snapshot, base: Snapshot) -> int:
        """Return the guid of ``base``, since which ``snapshot`` is to be exported; 0 if it has none.

        Raises Unsupported and Invalid.
        """
        if not self._host.abilities.incremental_transfer:
            raise Unsupported("this host cannot export what has changed since another snapshot: omit 'since'")
        if self._host.abilities.any_transfer_base:
            if base.id == snapshot.id:
                raise Invalid("a snapshot cannot be exported since itself: use an earlier one, or omit 'since'")
            return 0
        guids = await self._host.find_export_bases(snapshot)
        if base.id in guids:
            return guids[base.id]
        usable_bases = [
            each for id in guids if (each := self._index.snapshots.get(id)) is not None and not each.is_hidden
        ]
        names = ", ".join(_describe(each.id, each.all_names) for each in usable_bases[:_MAX_LISTED_BASES])
        raise Invalid(
            f"snapshot {_describe(snapshot.id, snapshot.all_names)} cannot be exported since "
            f"{_describe(base.id, base.all_names)}, because ZFS needs an earlier snapshot of the same file system, or "
            "the snapshot or template from which that was cloned: "
            + (f"use one of these: {names}" if names else "there is none, so omit 'since'")
        )

    async def find_import_base(
        self, manifest_base: Base, snapshot: Snapshot, signer: str, *, is_own_file: bool, may_be_hidden: bool
    ) -> ImportBase:
        """Return the local snapshot that a file needs. Raises NotFound, or Conflict if its memory is missing.

        ``signer``: the fingerprint of the signer of the file. ``is_own_file``: whether that is this gateway.
        ``snapshot``: the record of the imported snapshot. If an interrupted import continues, it has a parent, and the
        base must be the same.
        """
        if manifest_base.guid is None:
            candidates = self._find_signed(manifest_base.snapshot_id, signer)
            if is_own_file and (own_base := self._index.snapshots.get(manifest_base.snapshot_id)) is not None:
                candidates = [own_base, *candidates]
        else:
            ids = await self._host.find_import_bases(manifest_base.guid, manifest_base.snapshot_id)
            candidates = [self._index.snapshots[id] for id in ids if id in self._index.snapshots]
        bases = [
            each for each in candidates if (may_be_hidden or not each.is_hidden) and snapshot.parent in ("", each.id)
        ]
        if not bases:
            name = _describe(manifest_base.snapshot_id, manifest_base.names)
            raise NotFound(
                "snapshot",
                manifest_base.snapshot_id,
                message=f"the file contains only what differs from snapshot {name} of the gateway that exported it, "
                "but this gateway has no copy of that one: import it first, or export the snapshot without 'since'",
            )
        parts = frozenset(manifest_base.parts)
        if snapshot.memory is not MemoryMode.NONE and SnapshotPart.MEMORY in parts:
            bases_with_memory = [each for each in bases if self._has_memory(each)]
            if not bases_with_memory:
                raise Conflict(
                    f"the file needs the memory of snapshot {bases[0].id}, which is not available on this host: "
                    "import a whole file, or one without memory"
                )
            bases = bases_with_memory
        return ImportBase(bases[0], manifest_base.guid or 0, parts)

    def _has_memory(self, snapshot: Snapshot) -> bool:
        return snapshot.memory is not MemoryMode.NONE and not self._host.find_memory_problem(snapshot)

    def has_copy(self, id: str, signer: str, *, memory: bool) -> bool:
        """Return whether this host has a copy of a snapshot of another host, with its memory if ``memory`` is true.

        ``signer``: the fingerprint of that host.
        """
        copies = self._find_signed(id, signer)
        return any(not each.is_hidden and (not memory or self._has_memory(each)) for each in copies)

    def _find_signed(self, id: str, signer: str) -> list[Snapshot]:
        """Return the snapshots that were imported from a file with the snapshot ``id`` of this signer.

        Another signer could claim to have a snapshot with this id.
        """
        return [
            each
            for each in self._index.snapshots.values()
            if each.imported is not None
            and each.imported.signer == signer
            and (each.imported.signed_id or each.imported.snapshot) == id
        ]

    def _find(self, ids: Sequence[str]) -> list[Snapshot]:
        found_snapshots = []
        for id in ids:
            for snapshot in self._index.snapshots.values():
                if snapshot.id == id or (snapshot.imported is not None and snapshot.imported.snapshot == id):
                    found_snapshots.append(snapshot)
        return found_snapshots[:_MAX_BASES]


def _describe(id: str, names: Sequence[str]) -> str:
    return f"{names[0]!r} ({id})" if names else id


def set_lineage(snapshot: Snapshot, base: Snapshot) -> None:
    """Make an imported snapshot a child of its base, as if it had been taken of a fork of the base."""
    snapshot.parent = base.id
    if snapshot.kind is SnapshotKind.TEMPLATE:
        return  # A template begins a lineage of its own.
    snapshot.template_id = base.id if base.kind is SnapshotKind.TEMPLATE else base.template_id
    snapshot.origin = base.origin or base.template_id or base.id
    snapshot.origin_sandbox = base.origin_sandbox
