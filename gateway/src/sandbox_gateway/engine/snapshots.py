"""Create, find and delete snapshots of sandboxes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from sandbox_gateway.engine.captures import Captures
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.creation_order import Key
from sandbox_gateway.engine.durations import measured
from sandbox_gateway.engine.lineage import Trees, build_trees, list_ancestors, list_children, walk_nodes
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.name_claims import NameClaim
from sandbox_gateway.engine.names import require_valid_name
from sandbox_gateway.engine.prewarm import PrewarmPool
from sandbox_gateway.engine.record_changes import save_names, save_sandbox, save_snapshot
from sandbox_gateway.engine.references import References
from sandbox_gateway.engine.removal import Removal
from sandbox_gateway.errors import Invalid
from sandbox_gateway.records import Retention, Snapshot, SnapshotKind, now
from sandbox_gateway.tasks import finish_despite_cancellation


class Snapshots:
    def __init__(
        self,
        context: Context,
        locking: Locking,
        references: References,
        collector: Collector,
        removal: Removal,
        captures: Captures,
        prewarm: PrewarmPool,
    ) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._locking = locking
        self._references = references
        self._collector = collector
        self._removal = removal
        self._captures = captures
        self._prewarm = prewarm
        self.naming_lock = asyncio.Lock()
        """Held while the names of existing snapshots and templates change."""

    def get(self, ref: str) -> Snapshot:
        """Find a snapshot or template by id or name."""
        return self._index.get_snapshot(ref)

    def list(self, kinds: Iterable[SnapshotKind] = (SnapshotKind.SNAPSHOT,)) -> Sequence[Snapshot]:
        return [*self.walk(kinds)]

    def walk(
        self,
        kinds: Iterable[SnapshotKind] = (SnapshotKind.SNAPSHOT,),
        after: Key | None = None,
        *,
        backwards: bool = False,
    ) -> Iterator[Snapshot]:
        """Yield the snapshots that follow the key ``after``, oldest first, or newest first if ``backwards``."""
        return self._index.walk_snapshots(kinds, after, backwards=backwards)

    def count(self) -> Counter[str]:
        """Return the number of visible snapshots and templates by kind."""
        return Counter(each.kind.value for each in self._index.snapshots.values() if not each.is_hidden)

    def build_lineage(self, root: str | None = None) -> Trees:
        """Return the trees of templates, snapshots and sandboxes: all trees, or only the one under ``root``.

        Raises Invalid if a tree is too deep.
        """
        return build_trees(self._index, root)

    def walk_lineage(self, root: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the nodes of the lineage trees, parents before children, each with its parent's id and its depth."""
        return walk_nodes(self._index, root)

    def list_ancestors(self, ref: str) -> Sequence[Snapshot]:
        """Return the visible snapshots and templates from which a snapshot descends, its root first."""
        return list_ancestors(self._index, self.get(ref))

    def list_children(self, ref: str) -> Sequence[Snapshot]:
        """Return the visible snapshots that descend directly from a snapshot or template, oldest first."""
        return list_children(self._index, self.get(ref))

    def get_file_paths(self, ref: str) -> dict[str, str]:
        """Return a snapshot's paths on the host: ``dir``, and, if they exist, ``memory`` and ``vmstate``."""
        return self._host.get_file_paths(self.get(ref))

    @measured("snapshot.create")
    async def create(
        self,
        ref: str,
        *,
        name: str | None = None,
        description: str = "",
        memory: str = "auto",
        expires_in: float | None = None,
        volumes: Sequence[str] = (),
        retention: Retention | None = None,
        prewarm: int = 0,
    ) -> Snapshot:
        """Capture a running sandbox. The sandbox keeps running.

        ``memory``: "auto" captures the memory if the host supports this, "none" captures only the disk. ``volumes``:
        names or ids of mounted volumes to capture in the same pause. If any of them cannot be captured, no snapshot is
        created. ``retention``: the rule for this snapshot and for all earlier snapshots of the sandbox that also have a
        rule, which is applied before this returns. ``prewarm``: the number of forks to keep ready.
        """
        if memory not in ("auto", "none"):
            raise Invalid(f"the memory mode {memory[:20]!r} is not valid: set memory to 'auto' or 'none'")
        self._prewarm.check_count(memory == "auto" and self._host.abilities.memory, prewarm)
        await self._prewarm.require_room(prewarm)
        names = [require_valid_name(name)] if name else []
        with self._index.reserved(names):
            async with self._locking.running_sandbox_locked(ref) as sandbox:
                snapshot = self._captures.create_snapshot_record(sandbox, SnapshotKind.SNAPSHOT)
                snapshot.names, snapshot.description, snapshot.retention = names, description, retention
                snapshot.prewarm = prewarm
                snapshot.expires_at = None if expires_in is None else now() + timedelta(seconds=expires_in)
                async with self._context.name_claims.held([NameClaim(snapshot, names)], may_be_late=not names):
                    snapshot = await finish_despite_cancellation(
                        self._captures.capture(sandbox, snapshot, memory=memory == "auto", volumes=volumes)
                    )
        if retention is not None:
            await finish_despite_cancellation(self._collector.collect())
        return snapshot

    @measured("snapshot.branch")
    async def branch(self, ref: str, name: str | None = None) -> Snapshot:
        """Create a snapshot of a sandbox. Its default name is `branch-ID-N`, where N increases with each call."""
        return await self.create(ref, name=name or await self._choose_next_branch_name(ref))

    async def _choose_next_branch_name(self, ref: str) -> str:
        """Return the next generated name. The number in it is saved before the name is used, so it is never reused."""
        async with self._locking.running_sandbox_locked(ref) as sandbox:
            number = sandbox.branches + 1
            while not self._index.is_name_free(name := f"branch-{sandbox.id}-{number}"):
                number += 1
            await save_sandbox(self._context, sandbox.id, branches=number)
            return name

    @measured("snapshot.delete")
    async def delete(self, ref: str, *, when_unused: bool = False) -> bool:
        """Remove a snapshot or template. Raises InUse, which lists all users, if it is in use.

        ``when_unused``: instead of raising InUse, hide it now and remove it when its last user is removed. Returns
        False if it is hidden but not removed yet.
        """
        snapshot = self.get(ref)
        if refusal := self._references.find_snapshot_refusal(snapshot):
            if not when_unused:
                raise refusal
            await save_snapshot(self._context, snapshot.id, doomed=True)
            self._context.events.publish("snapshot.hidden", snapshotID=snapshot.id)
        else:
            await self._removal.remove_snapshot(snapshot)
        # Its last user may have been removed while the record was saved, and another retention rule may now apply.
        await self._collector.collect()
        return snapshot.id not in self._index.snapshots

    @measured("snapshot.name")
    async def add_name(self, ref: str, name: str) -> Snapshot:
        """Give a snapshot or template another name. Raises NameTaken if an object already has it."""
        require_valid_name(name)
        async with self.naming_lock:
            snapshot = self.get(ref)
            with self._index.reserved([name]):
                async with self._context.name_claims.held([NameClaim(snapshot, [name])]):
                    self.get(snapshot.id)  # It may have been removed or hidden while the name was claimed.
                    return await save_names(self._context, snapshot, [*snapshot.all_names, name])

    @measured("snapshot.name")
    async def remove_name(self, ref: str) -> bool:
        """Remove the name ``ref`` from a snapshot or template that has another name without a tag.

        Returns False, without a change, if ``ref`` is its id or its last name.
        """
        async with self.naming_lock:
            snapshot = self.get(ref)
            if ref not in snapshot.names or len(snapshot.names) == 1:
                return False
            await save_names(self._context, snapshot, [name for name in snapshot.all_names if name != ref])
            return True
