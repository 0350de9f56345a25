"""The in-memory index of all objects. It is built from a scan, and changes only after the host has committed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from typing import Any

from sandbox_gateway.errors import NameTaken, NotFound
from sandbox_gateway.records import Mount, Record, Sandbox, SandboxState, Snapshot, SnapshotKind, Volume, VolumeSnapshot

Trees = list[dict[str, Any]]


class Index:
    """Sandboxes, snapshots and volumes by id, and the namespace that their names share."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.volumes: dict[str, Volume] = {}
        self.volume_snapshots: dict[str, VolumeSnapshot] = {}
        self._names: dict[str, str] = {}
        self._reserved: set[str] = set()
        self._pins: Counter[str] = Counter()

    def load(
        self,
        sandboxes: Iterable[Sandbox],
        snapshots: Iterable[Snapshot],
        volumes: Iterable[Volume] = (),
        volume_snapshots: Iterable[VolumeSnapshot] = (),
    ) -> list[str]:
        """Add the objects of a scan, oldest first.

        Return a sentence for each duplicate name, and for each mount of a missing volume.
        """
        problems = []
        records: list[Record] = [*sandboxes, *snapshots, *volumes, *volume_snapshots]
        for record in sorted(records, key=lambda record: record.created_at):
            for name in _names(record):
                if self._names.get(name, record.id) != record.id:
                    problems.append(
                        f"{record.id} lost the name {name!r}, because {self._names[name]} also has it: use the "
                        f"id {record.id} instead"
                    )
                    _remove_name(record, name)
            self.put(record)
        return [*problems, *self._describe_missing_volumes()]

    def _describe_missing_volumes(self) -> list[str]:
        """Describe the mounts of missing volumes. Records keep such mounts, because the volume may be restored."""
        return [
            f"sandbox {sandbox.id} mounts volume {mount.volume} at {mount.path}, but the volume is missing: "
            "restore or detach it"
            for sandbox in self.sandboxes.values()
            for mount in sandbox.mounts
            if mount.volume not in self.volumes
        ]

    def put(self, record: Record) -> None:
        """Add an object, or replace its record."""
        self._remove_names(record.id)
        if isinstance(record, Sandbox):
            self.sandboxes[record.id] = record
        elif isinstance(record, Snapshot):
            self.snapshots[record.id] = record
        elif isinstance(record, Volume):
            self.volumes[record.id] = record
        else:
            self.volume_snapshots[record.id] = record
        for name in _names(record):
            self._names[name] = record.id

    def remove(self, id: str) -> None:
        self._remove_names(id)
        for records in (self.sandboxes, self.snapshots, self.volumes, self.volume_snapshots):
            records.pop(id, None)

    def _remove_names(self, id: str) -> None:
        for name in [name for name, owner in self._names.items() if owner == id]:
            del self._names[name]

    @contextlib.contextmanager
    def reserved(self, names: Iterable[str], *, taken_from: Container[str] = ()) -> Iterator[None]:
        """Reserve names for new objects. Raises NameTaken, which lists the names that are not free.

        ``taken_from``: the ids of objects that give up their names inside this context.
        """
        requested = list(names)
        owned_names = {name for name in requested if (owner := self.owner(name)) and owner not in taken_from}
        taken_names = [
            name for name in requested if name in owned_names or name in self._reserved or requested.count(name) > 1
        ]
        if taken_names:
            owners = ", ".join(
                f"{name!r} ({self.owner(name) or 'being created'})" for name in dict.fromkeys(taken_names)
            )
            raise NameTaken(
                f"the name is taken: {owners}. Choose another name, or remove the owner",
                blockers=[owner for name in taken_names if (owner := self.owner(name))],
            )
        self._reserved.update(requested)
        try:
            yield
        finally:
            self._reserved.difference_update(requested)

    def owner(self, name: str) -> str:
        """Return the id of the object that has a name; empty if the name is free."""
        if name in self._names:
            return self._names[name]
        return name if name in self.sandboxes or name in self.snapshots or name in self.volumes else ""

    def is_free(self, name: str) -> bool:
        return not self.owner(name) and name not in self._reserved

    @contextlib.contextmanager
    def pinned(self, *records: Record) -> Iterator[None]:
        """Prevent the removal of objects inside this context, because a request uses them."""
        ids = [record.id for record in records]
        self._pins.update(ids)
        try:
            yield
        finally:
            self._pins.subtract(ids)
            self._pins += Counter()

    def is_pinned(self, record: Record) -> bool:
        return self._pins[record.id] > 0

    def sandbox(self, ref: str) -> Sandbox:
        sandbox = self.sandboxes.get(ref) or self.sandboxes.get(self._names.get(ref, ""))
        if sandbox is None:
            raise NotFound("sandbox", _shorten(ref))
        return sandbox

    def snapshot(self, ref: str, *, what: str = "snapshot", kinds: Iterable[SnapshotKind] = ()) -> Snapshot:
        """Find a visible snapshot or template by id or name."""
        snapshot = self.snapshots.get(ref) or self.snapshots.get(self._names.get(ref, ""))
        allowed_kinds = set(kinds) or {SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE}
        if snapshot is None or snapshot.doomed or snapshot.kind not in allowed_kinds:
            raise NotFound(what, _shorten(ref))
        return snapshot

    def any_snapshot(self, id: str) -> Snapshot:
        """Find a snapshot of any kind, even a hidden one, by id."""
        if id not in self.snapshots:
            raise NotFound("snapshot", _shorten(id))
        return self.snapshots[id]

    def volume(self, ref: str) -> Volume:
        volume = self.volumes.get(ref) or self.volumes.get(self._names.get(ref, ""))
        if volume is None:
            raise NotFound("volume", _shorten(ref))
        return volume

    def volume_snapshot(self, ref: str, volume: Volume | None = None) -> VolumeSnapshot:
        """Find a snapshot of a volume by id, or by its name among the snapshots of ``volume``."""
        snapshot = self.volume_snapshots.get(ref)
        if volume is not None:
            snapshot = next((each for each in self.snapshots_of(volume) if ref in (each.id, each.name)), None)
        if snapshot is None:
            message = f"snapshot {_shorten(ref)!r} of volume {volume.name!r} not found" if volume else ""
            parent = volume.name if volume else ""
            raise NotFound("volume snapshot", _shorten(ref), message=message, resource="volume_snapshot", parent=parent)
        return snapshot

    def snapshots_of(self, volume: Volume) -> list[VolumeSnapshot]:
        snapshots = [each for each in self.volume_snapshots.values() if each.volume == volume.id]
        return sorted(snapshots, key=lambda each: (each.created_at, each.id))

    def running_sandboxes(self) -> list[Sandbox]:
        return [each for each in self.sandboxes.values() if each.state is SandboxState.RUNNING]

    def mounts_of(self, volume: Volume) -> list[tuple[Sandbox, Mount]]:
        """Return the running and paused sandboxes that mount a volume, with their mounts of it."""
        return [
            (sandbox, mount)
            for sandbox in self.sandboxes.values()
            for mount in sandbox.mounts
            if mount.volume == volume.id
        ]

    def sandboxes_using(self, snapshot: Snapshot) -> list[Sandbox]:
        """Return the sandboxes that were forked from a snapshot, were rolled back to it, or resume from it."""
        return [
            sandbox
            for sandbox in self.sandboxes.values()
            if snapshot.id in (sandbox.forked_from, sandbox.base, sandbox.pause_snapshot)
        ]

    def lineage(self, root: str | None = None) -> Trees:
        """Return the trees of templates, snapshots and sandboxes as nested dictionaries.

        ``root``: return only the tree below this object. Raises NotFound if ``root`` does not exist.
        """
        nodes: dict[str, dict[str, Any]] = {}
        for snapshot in sorted(self.snapshots.values(), key=lambda each: each.created_at):
            nodes[snapshot.id] = _node(snapshot.id, snapshot.kind.value, snapshot.names, snapshot.is_hidden)
        for sandbox in sorted(self.sandboxes.values(), key=lambda each: each.created_at):
            nodes[sandbox.id] = _node(sandbox.id, "sandbox", [sandbox.name], False, state=sandbox.state.value)
        roots = [node for id, node in nodes.items() if not self._attach(id, nodes)]
        if root is None:
            return roots
        node = nodes.get(root) or nodes.get(self._names.get(root, ""))
        if node is None:
            raise NotFound("sandbox, snapshot or template", _shorten(root), resource="sandbox")
        return [node]

    def _attach(self, id: str, nodes: dict[str, dict[str, Any]]) -> bool:
        record = self.sandboxes.get(id) or self.snapshots[id]
        if isinstance(record, Sandbox):
            ancestors = [record.forked_from, record.template_id]
        else:
            # A snapshot whose source was removed is shown below the source's former parent.
            ancestors = [record.source_sandbox, record.parent, record.origin]
        parent_id = next((ancestor for ancestor in ancestors if ancestor in nodes and ancestor != id), None)
        if parent_id is None:
            return False
        nodes[parent_id]["children"].append(nodes[id])
        return True


def _node(id: str, kind: str, names: list[str], hidden: bool, **more: Any) -> dict[str, Any]:
    return {"id": id, "kind": kind, "names": list(names), "hidden": hidden, **more, "children": []}


def _names(record: Record) -> list[str]:
    """Return an object's names in the shared namespace. The name of a volume's snapshot is local to the volume."""
    if isinstance(record, Snapshot):
        return [] if record.doomed else record.names
    return [] if isinstance(record, VolumeSnapshot) else [record.name]


def _remove_name(record: Record, name: str) -> None:
    if isinstance(record, Snapshot):
        record.names = [each for each in record.names if each != name]
    else:
        record.name = record.id


def _shorten(ref: str) -> str:
    return ref if len(ref) <= 80 else ref[:77] + "..."
