"""The in-memory index of all objects. It is built from a scan, and updated only after the host commits a change.

There are two exceptions: a snapshot or volume leaves the index before the host removes it, so that no request uses it
meanwhile, and returns if the removal fails. A machine that stopped on its own has no change to commit.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple, TypeVar

from sandbox_gateway.engine.creation_order import CreationOrder, Key
from sandbox_gateway.engine.id_groups import IdGroups
from sandbox_gateway.engine.names import parse_build_id, remove_default_tag, shorten, split_tag
from sandbox_gateway.engine.own_changes import count_change
from sandbox_gateway.errors import Busy, NameTaken, NotFound
from sandbox_gateway.records import (
    Mount,
    Record,
    Sandbox,
    SandboxState,
    Snapshot,
    SnapshotKind,
    Volume,
    VolumeSnapshot,
    compact,
)

_GROUPS = ("expiring_ids", "prewarmed_ids", "collectable_ids")
"""The attributes of ``Index`` that contain the ids of a group of snapshots."""
_Record = TypeVar("_Record", bound=Record)


class _Entry(NamedTuple):
    """The values that the index derived from a record, so that ``put`` and ``remove`` can undo them without a search.

    An entry does not refer to the record, which may have changed since.
    """

    key: Key
    names: tuple[str, ...] = ()
    order: str = ""
    """The key in ``_orders``: the kind of a snapshot, or ``_SANDBOXES``. Empty for volumes and their snapshots."""
    series: str = ""
    """The key in ``series``, if the record is in a series."""
    used_snapshots: tuple[str, ...] = ()


class Index:
    """Sandboxes, snapshots and volumes by id, and the namespace that their names share.

    There can be many thousands of objects. Therefore everything that is looked up often or regularly has its own index.
    """

    def __init__(self) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.arrivals: dict[str, Sandbox] = {}
        """Sandboxes that are being moved to this host. They are not in ``sandboxes``, and their names are not taken."""
        self.departing_ids: set[str] = set()
        """Ids of the sandboxes that are being moved to another host."""
        self.volumes: dict[str, Volume] = {}
        self.volume_snapshots: dict[str, VolumeSnapshot] = {}
        self.expiring_ids: set[str] = set()
        """Ids of the visible snapshots that expire at a certain time."""
        self.series = IdGroups()
        """Ids of the visible snapshots with a retention rule, by the id of their sandbox."""
        self.changed_series: set[str] = set()
        """The keys of ``series`` for which ``retention.Surplus`` has to apply the rule again."""
        self.prewarmed_ids: set[str] = set()
        """Ids of the snapshots for which forks are kept ready."""
        self.collectable_ids: set[str] = set()
        """Ids of the snapshots that are removed as soon as they are unused."""
        self.listener: Callable[[str], None] | None = None
        """Called with the id of each object that is added, changed or removed."""
        self._orders: defaultdict[str, CreationOrder] = defaultdict(CreationOrder)
        """The order of snapshots, by kind, and of sandboxes (``_SANDBOXES``)."""
        self._users = IdGroups()
        """By the id of a snapshot: the ids of the sandboxes that use it."""
        self._entries: dict[str, _Entry] = {}
        self._names: dict[str, str] = {}
        self._reserved_names: set[str] = set()
        self._pins: Counter[str] = Counter()

    def copy(self) -> Index:
        """Return an index with the same records, without the names and objects that current requests hold.

        Records are shared: an operation saves a changed copy of a record instead of changing it.
        """
        copy = Index()
        records = ("sandboxes", "arrivals", "snapshots", "volumes", "volume_snapshots")
        for name in (*records, *_GROUPS, "departing_ids", "series", "_users", "_entries", "_names"):
            setattr(copy, name, getattr(self, name).copy())
        copy._orders.update((kind, order.copy()) for kind, order in self._orders.items())
        copy.changed_series = {*copy.series}
        return copy

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
            for name in list_names(record):
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
        old_record = self.find_record(record.id)
        self._forget(record.id)
        compact(record)
        if isinstance(record, Sandbox) and record.arrival is not None:
            self.arrivals[record.id] = record
        elif isinstance(record, Sandbox):
            self.arrivals.pop(record.id, None)
            self.sandboxes[record.id] = record
            if record.departure is not None:
                self.departing_ids.add(record.id)
        elif isinstance(record, Snapshot):
            self.snapshots[record.id] = record
            self._add_to_groups(record)
        elif isinstance(record, Volume):
            self.volumes[record.id] = record
        else:
            self.volume_snapshots[record.id] = record
        entry = self._entries[record.id] = _create_entry(record)
        for name in entry.names:
            self._names[name] = record.id
        if entry.order:
            self._orders[entry.order].add(entry.key)
        for snapshot_id in entry.used_snapshots:
            self._users.add(snapshot_id, record.id)
        if entry.series:
            self.series.add(entry.series, record.id)
            self.changed_series.add(entry.series)
        if old_record is not None:
            count_change(old_record, record, self)
        if self.listener:
            self.listener(record.id)

    def find_record(self, id: str) -> Record | None:
        """Return the object with this id, or None."""
        return self.sandboxes.get(id) or self.snapshots.get(id) or self.volumes.get(id) or self.volume_snapshots.get(id)

    def _add_to_groups(self, snapshot: Snapshot) -> None:
        for group, is_member in (
            (self.expiring_ids, _is_visible_snapshot(snapshot) and snapshot.expires_at is not None),
            (self.prewarmed_ids, snapshot.prewarm > 0),
            (self.collectable_ids, is_removed_when_unused(snapshot)),
        ):
            if is_member:
                group.add(snapshot.id)

    def __contains__(self, id: object) -> bool:
        """Return whether an object with this id exists."""
        return id in self._entries

    def remove(self, id: str) -> None:
        self._forget(id)
        for records in (self.sandboxes, self.arrivals, self.snapshots, self.volumes, self.volume_snapshots):
            records.pop(id, None)
        if self.listener:
            self.listener(id)

    def _forget(self, id: str) -> None:
        """Remove the values that ``put`` derived from the record of an object."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return
        for name in entry.names:
            if self._names.get(name) == id:
                del self._names[name]
        if entry.order:
            self._orders[entry.order].discard(entry.key)
        for snapshot_id in entry.used_snapshots:
            self._users.discard(snapshot_id, id)
        if entry.series:
            self.series.discard(entry.series, id)
            self.changed_series.add(entry.series)
        for group in (self.expiring_ids, self.prewarmed_ids, self.collectable_ids, self.departing_ids):
            group.discard(id)

    # -- lists ------------------------------------------------------------------------------------------------------

    def walk_sandboxes(self, after: Key | None = None, *, backwards: bool = False) -> Iterator[Sandbox]:
        """Yield sandboxes from oldest to newest, or the reverse if ``backwards``, starting after the key ``after``.

        The index must not change before the iterator is exhausted.
        """
        for _, id in self._orders[_SANDBOXES].walk(after, backwards=backwards):
            if sandbox := self.sandboxes.get(id):
                yield sandbox

    def walk_snapshots(
        self,
        kinds: Iterable[SnapshotKind],
        after: Key | None = None,
        *,
        backwards: bool = False,
        include_hidden: bool = False,
    ) -> Iterator[Snapshot]:
        """Yield the snapshots of ``kinds`` that are visible, in the same order as ``walk_sandboxes``.

        ``include_hidden``: also yield hidden ones.
        """
        key_iterators = [self._orders[kind].walk(after, backwards=backwards) for kind in set(kinds)]
        keys = key_iterators[0] if len(key_iterators) == 1 else heapq.merge(*key_iterators, reverse=backwards)
        for _, id in keys:
            snapshot = self.snapshots.get(id)
            if snapshot is not None and (include_hidden or not snapshot.is_hidden):
                yield snapshot

    def list_grouped_snapshots(self, group: Iterable[str]) -> list[Snapshot]:
        """Return the snapshots in ``group`` (such as ``expiring_ids``, or one of ``series``), oldest first."""
        return sort_oldest_first(self.snapshots[id] for id in group)

    @contextlib.contextmanager
    def reserved(self, names: Iterable[str], *, releasing_ids: Container[str] = ()) -> Iterator[None]:
        """Reserve names for new objects inside this context. Raises NameTaken, which lists the names that are not free.

        ``releasing_ids``: the ids of objects that give up their names inside this context.
        """
        requested_names = list(names)
        owned_names = {
            name for name in requested_names if (owner := self.find_owner(name)) and owner not in releasing_ids
        }
        taken_names = [
            name
            for name in requested_names
            if name in owned_names or name in self._reserved_names or requested_names.count(name) > 1
        ]
        if taken_names:
            conflicts = ", ".join(
                f"{name!r} ({self.find_owner(name) or 'being created'})" for name in dict.fromkeys(taken_names)
            )
            raise NameTaken(
                f"the name is already in use: {conflicts}. Choose a different name, or remove the object that uses it",
                blockers=[owner for name in taken_names if (owner := self.find_owner(name))],
            )
        self._reserved_names.update(requested_names)
        try:
            yield
        finally:
            self._reserved_names.difference_update(requested_names)

    def find_owner(self, name: str) -> str:
        """Return the id of the object with this name, or "" if there is none."""
        name = remove_default_tag(name)
        if name in self._names:
            return self._names[name]
        return name if name in self.sandboxes or name in self.snapshots or name in self.volumes else ""

    def is_name_free(self, name: str) -> bool:
        return not self.find_owner(name) and name not in self._reserved_names

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

    def get_sandbox(self, ref: str) -> Sandbox:
        sandbox = self.sandboxes.get(ref) or self.sandboxes.get(self._names.get(ref, ""))
        if sandbox is None:
            if any(ref in (each.id, each.name) for each in self.arrivals.values()):
                raise Busy(f"sandbox {shorten(ref)} is being moved to this host: try again later")
            raise NotFound("sandbox", shorten(ref))
        return sandbox

    def is_moving(self, id: str) -> bool:
        """Return whether a sandbox is being moved to this host or away from it."""
        return id in self.arrivals or id in self.departing_ids

    def get_snapshot(self, ref: str, *, noun: str = "snapshot", kinds: Iterable[SnapshotKind] = ()) -> Snapshot:
        """Find a visible snapshot or template by id or name."""
        snapshot = self.snapshots.get(self._find_snapshot_id(ref))
        allowed_kinds = set(kinds) or {SnapshotKind.SNAPSHOT, SnapshotKind.TEMPLATE}
        if snapshot is None or snapshot.doomed or snapshot.kind not in allowed_kinds:
            raise NotFound(noun, shorten(ref))
        return snapshot

    def _find_snapshot_id(self, ref: str) -> str:
        """Return the id of the snapshot with this id or name, or "" if there is none.

        NAME:default is the same as NAME. NAME:BUILD_ID is the template with this build id, if it has the name NAME with
        any tag.
        """
        name = remove_default_tag(ref)
        id = name if name in self.snapshots else self._names.get(name, "")
        if not id:
            base_name, tag = split_tag(name)
            template = self.snapshots.get(parse_build_id(tag))
            if template is not None and base_name in (split_tag(each)[0] for each in list_names(template)):
                id = template.id
        return id

    def get_any_snapshot(self, id: str) -> Snapshot:
        """Find a snapshot of any kind, even a hidden one, by id."""
        if id not in self.snapshots:
            raise NotFound("snapshot", shorten(id))
        return self.snapshots[id]

    def get_volume(self, ref: str) -> Volume:
        volume = self.volumes.get(ref) or self.volumes.get(self._names.get(ref, ""))
        if volume is None:
            raise NotFound("volume", shorten(ref))
        return volume

    def get_volume_snapshot(self, ref: str, volume: Volume | None = None) -> VolumeSnapshot:
        """Find a snapshot of a volume by id, or by its name among the snapshots of ``volume``."""
        snapshot = self.volume_snapshots.get(ref)
        if volume is not None:
            snapshot = next((each for each in self.list_volume_snapshots(volume) if ref in (each.id, each.name)), None)
        if snapshot is None:
            message = f"snapshot {shorten(ref)!r} of volume {volume.name!r} not found" if volume else ""
            parent = volume.name if volume else ""
            raise NotFound("volume snapshot", shorten(ref), message=message, resource="volume_snapshot", parent=parent)
        return snapshot

    def list_volume_snapshots(self, volume: Volume) -> list[VolumeSnapshot]:
        return sort_oldest_first(each for each in self.volume_snapshots.values() if each.volume == volume.id)

    def list_included_volume_snapshots(self, snapshot: Snapshot) -> list[VolumeSnapshot]:
        """Return the volume snapshots that are part of a sandbox snapshot."""
        ids = (capture.snapshot for capture in snapshot.volumes)
        return [self.volume_snapshots[id] for id in ids if id in self.volume_snapshots]

    def list_running_sandboxes(self) -> list[Sandbox]:
        return [each for each in self.sandboxes.values() if each.state is SandboxState.RUNNING]

    def list_mounts(self, volume: Volume) -> list[tuple[Sandbox, Mount]]:
        """Return the running and paused sandboxes that mount a volume, each with its mount."""
        return [
            (sandbox, mount)
            for sandbox in self.sandboxes.values()
            for mount in sandbox.mounts
            if mount.volume == volume.id
        ]

    def list_dependent_sandboxes(self, snapshot: Snapshot) -> list[Sandbox]:
        """Return the sandboxes that were forked from a snapshot, were rolled back to it, or resume from it."""
        users = (self.sandboxes.get(id) or self.arrivals.get(id) for id in self._users[snapshot.id])
        return [each for each in users if each is not None]


def is_removed_when_unused(snapshot: Snapshot) -> bool:
    """Return whether a snapshot is removed once it is unused, because it was deleted or captured for a clone."""
    return snapshot.doomed or snapshot.kind is SnapshotKind.TRANSIENT


def sort_oldest_first(records: Iterable[_Record]) -> list[_Record]:
    """Return objects in the order in which they were created."""
    return sorted(records, key=lambda each: (each.created_at, each.id))


_SANDBOXES = "sandboxes"


def _create_entry(record: Record) -> _Entry:
    key = (record.created_at, record.id)
    if isinstance(record, Sandbox):
        used_ids = {record.forked_from, record.base, record.pause_snapshot}
        if record.departure is not None:
            used_ids.add(record.departure.snapshot)
        order = "" if record.arrival is not None else _SANDBOXES
        return _Entry(key, tuple(list_names(record)), order, used_snapshots=tuple(used_ids - {""}))
    if isinstance(record, Snapshot):
        is_in_series = _is_visible_snapshot(record) and record.retention is not None
        return _Entry(key, tuple(list_names(record)), record.kind, record.source_sandbox if is_in_series else "")
    return _Entry(key, tuple(list_names(record)))


def _is_visible_snapshot(snapshot: Snapshot) -> bool:
    return snapshot.kind is SnapshotKind.SNAPSHOT and not snapshot.doomed


def list_names(record: Record) -> list[str]:
    """Return an object's names in the shared namespace. The name of a volume snapshot is local to its volume."""
    if isinstance(record, Snapshot):
        return [] if record.doomed else record.all_names
    is_nameless = isinstance(record, VolumeSnapshot) or (isinstance(record, Sandbox) and record.arrival is not None)
    return [] if is_nameless else [record.name]


def _remove_name(record: Record, name: str) -> None:
    if isinstance(record, Snapshot):
        record.names = [each for each in record.names if each != name]
        record.tagged_names = [each for each in record.tagged_names if each != name]
    else:
        record.name = record.id
