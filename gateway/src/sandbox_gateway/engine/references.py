"""References to snapshots and volumes, which keep these from being removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.index import Thing
from sandbox_gateway.engine.names import names_of
from sandbox_gateway.errors import InUse
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot


class References:
    def __init__(self, context: Context) -> None:
        self._index = context.index
        self._host = context.host

    def dependents(self, snapshot: Snapshot) -> list[Sandbox]:
        """Return the sandboxes that keep a snapshot from being deleted."""
        if self._host.abilities.independent_snapshots:
            standing = self._index.standing_on(snapshot)
            return [each for each in standing if snapshot.id in (each.forked_from, each.pause_snapshot)]
        return self._index.standing_on(snapshot)

    def volume_snapshots_in(self, snapshot: Snapshot) -> list[VolumeSnapshot]:
        """Return the snapshots of volumes that are part of a sandbox's snapshot."""
        ids = (capture.snapshot for capture in snapshot.volumes)
        return [self._index.volume_snapshots[id] for id in ids if id in self._index.volume_snapshots]

    def clones_of(self, snapshots: Iterable[VolumeSnapshot]) -> list[Volume]:
        """Return the volumes that keep snapshots of volumes from being deleted."""
        if self._host.abilities.independent_snapshots:
            return []
        ids = {snapshot.id for snapshot in snapshots}
        return [volume for volume in self._index.volumes.values() if volume.from_snapshot in ids]

    def users(self, snapshot: Snapshot) -> list[Sandbox | Volume]:
        """Return the users that keep a snapshot, or its snapshots of volumes, from being deleted."""
        return [*self.dependents(snapshot), *self.clones_of(self.volume_snapshots_in(snapshot))]

    def is_busy(self, snapshot: Snapshot) -> bool:
        """Return whether a request is using a snapshot or its snapshots of volumes."""
        return self._index.in_use(snapshot) or any(map(self._index.in_use, self.volume_snapshots_in(snapshot)))

    def holders(self, snapshots: Iterable[VolumeSnapshot]) -> list[Snapshot]:
        """Return the snapshots of sandboxes that contain one of ``snapshots``, except those collected anyway."""
        ids = {each.id for each in snapshots}
        return [
            holder
            for holder in self._index.snapshots.values()
            if holder.kind is not SnapshotKind.TRANSIENT and any(capture.snapshot in ids for capture in holder.volumes)
        ]

    def snapshot_in_use(self, snapshot: Snapshot) -> InUse | None:
        """Return why a sandbox's snapshot or a template cannot be removed, with all users; None if it can."""
        return in_use(
            f"{snapshot.kind.value} {names_of([snapshot])!r}",
            {
                "sandbox": self.dependents(snapshot),
                "cloned volume": self.clones_of(self.volume_snapshots_in(snapshot)),
            },
            "Delete them first, or pass when=unused to delete it with its last user.",
            busy=self.is_busy(snapshot),
        )

    def volume_in_use(self, volume: Volume, *, with_snapshots: bool) -> InUse | None:
        """Return why a volume, or the volume ``with_snapshots``, cannot be removed, with all users; None if it can."""
        snapshots = self._index.snapshots_of(volume)
        holders = self.holders(snapshots)
        held = {capture.snapshot for holder in holders for capture in holder.volumes}
        own = [] if with_snapshots else [each for each in snapshots if each.id not in held]
        return in_use(
            f"volume {volume.name!r}",
            {
                "mount": [sandbox for sandbox, _ in self._index.mounts_of(volume)],
                "sandbox snapshot": holders,
                "snapshot": own,
                "clone": self.clones_of(snapshots),
            },
            "Detach or delete them first.",
            busy=self._index.in_use(volume) or any(map(self._index.in_use, snapshots)),
        )

    def volume_snapshot_in_use(self, volume: Volume, snapshot: VolumeSnapshot) -> InUse | None:
        """Return why a snapshot of a volume cannot be removed, with all users; None if it can."""
        return in_use(
            f"snapshot {snapshot.name!r} of volume {volume.name!r}",
            {"sandbox snapshot": self.holders([snapshot]), "clone": self.clones_of([snapshot])},
            "Delete them first.",
            busy=self._index.in_use(snapshot),
        )


def in_use(what: str, users: Mapping[str, Sequence[Thing]], remedy: str, *, busy: bool) -> InUse | None:
    """Return the error that counts and names all ``users``, by noun; None if there are none and it is not ``busy``.

    ``busy``: a current request uses it.
    """
    groups = [f"{_count(noun, things)} ({names_of(things)})" for noun, things in users.items() if things]
    if groups:
        ids = [each.id for things in users.values() for each in things]
        return InUse(f"{what} is in use by {_enumerate(groups)}. {remedy}", blockers=ids)
    if busy:
        return InUse(f"{what} is in use just now by another request. Try again later.")
    return None


def _count(noun: str, things: Sequence[Thing]) -> str:
    if len(things) == 1:
        return f"1 {noun}"
    return f"{len(things)} {noun}{'es' if noun.endswith('x') else 's'}"


def _enumerate(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
