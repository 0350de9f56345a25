"""Find the users of snapshots and volumes, decide what can be removed, and word the refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.index import is_removed_when_unused
from sandbox_gateway.engine.names import names_of
from sandbox_gateway.errors import InUse, InUseExternally
from sandbox_gateway.records import Record, Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot


@dataclass(frozen=True)
class SnapshotUsers:
    """The users of a snapshot or template, and of the snapshots of volumes that are part of it."""

    sandboxes: list[Sandbox]
    """The sandboxes that were forked from it, were rolled back to it, or resume from it."""
    blocking_sandboxes: list[Sandbox]
    """Those of ``sandboxes`` that prevent its deletion on request."""
    blocking_volumes: list[Volume]
    """The clones of its snapshots of volumes that prevent its deletion."""
    is_busy: bool
    """Whether a request is using it."""

    @property
    def blockers(self) -> list[Sandbox | Volume]:
        """The sandboxes and volumes that prevent its deletion on request."""
        return [*self.blocking_sandboxes, *self.blocking_volumes]


class References:
    """Finds the users of snapshots and volumes. All rules for removals, on request or automatic, are built on this."""

    def __init__(self, context: Context) -> None:
        self._index = context.index
        self._host = context.host

    # -- snapshots of sandboxes, and templates ----------------------------------------------------------------------

    def users_of(self, snapshot: Snapshot) -> SnapshotUsers:
        sandboxes = self._index.sandboxes_using(snapshot)
        blocking_sandboxes = sandboxes
        if self._host.abilities.independent_snapshots:
            blocking_sandboxes = [each for each in sandboxes if snapshot.id in (each.forked_from, each.pause_snapshot)]
        volume_snapshots = self._index.volume_snapshots_in(snapshot)
        return SnapshotUsers(
            sandboxes=sandboxes,
            blocking_sandboxes=blocking_sandboxes,
            blocking_volumes=self._blocking_volumes(volume_snapshots),
            is_busy=self._index.is_pinned(snapshot) or any(map(self._index.is_pinned, volume_snapshots)),
        )

    def snapshot_refusal(self, snapshot: Snapshot) -> InUse | None:
        """Return the error that names all users of a snapshot or template, or None if it can be removed."""
        users = self.users_of(snapshot)
        return in_use_error(
            snapshot,
            {"sandbox": users.blocking_sandboxes, "cloned volume": users.blocking_volumes},
            "Delete them first, or pass when=unused to delete it with its last user.",
            overrides=["when=unused"],
            busy=users.is_busy,
        )

    def can_collect(self, snapshot: Snapshot) -> bool:
        """Return whether a snapshot is removed as soon as it is unused, and is unused now."""
        if not is_removed_when_unused(snapshot):
            return False
        users = self.users_of(snapshot)
        if users.sandboxes or users.blocking_volumes or users.is_busy:
            return False
        # A capture of clones is kept while it is the head of a sandbox, unless it was deleted on request.
        return snapshot.doomed or all(each.head != snapshot.id for each in self._index.sandboxes.values())

    def can_collect_volumes(self, snapshot: Snapshot) -> bool:
        """Return whether the snapshots of volumes in a capture of clones are unused. The capture itself may be kept."""
        if snapshot.kind is not SnapshotKind.TRANSIENT or not self._index.volume_snapshots_in(snapshot):
            return False
        users = self.users_of(snapshot)
        return not (users.blocking_volumes or users.is_busy)

    # -- volumes and their snapshots --------------------------------------------------------------------------------

    def volume_refusal(self, volume: Volume, *, with_snapshots: bool) -> InUse | None:
        """Return the error that names all users of a volume, or None if it can be removed.

        ``with_snapshots``: the volume's own snapshots do not count as users.
        """
        snapshots = self._index.snapshots_of(volume)
        sandbox_snapshots = self._blocking_snapshots(snapshots)
        contained_ids = {
            capture.snapshot for sandbox_snapshot in sandbox_snapshots for capture in sandbox_snapshot.volumes
        }
        own_snapshots = [] if with_snapshots else [each for each in snapshots if each.id not in contained_ids]
        return in_use_error(
            volume,
            {
                "mount": [sandbox for sandbox, _ in self._index.mounts_of(volume)],
                "sandbox snapshot": sandbox_snapshots,
                "snapshot": own_snapshots,
                "clone": self._blocking_volumes(snapshots),
            },
            "Detach or delete them first.",
            overrides=["withSnapshots"] if own_snapshots else [],
            busy=self._index.is_pinned(volume) or any(map(self._index.is_pinned, snapshots)),
        )

    def volume_snapshot_refusal(self, volume: Volume, snapshot: VolumeSnapshot) -> InUse | None:
        """Return the error that names all users of a volume snapshot, or None if it can be removed."""
        return in_use_error(
            snapshot,
            {"sandbox snapshot": self._blocking_snapshots([snapshot]), "clone": self._blocking_volumes([snapshot])},
            "Delete them first.",
            volume=volume.name,
            busy=self._index.is_pinned(snapshot),
        )

    def volume_rollback_refusal(self, volume: Volume, *, force: bool) -> InUse | None:
        """Return the error that names the read-write mounts of a volume, or None if it can be rolled back.

        ``force``: allow the rollback in spite of the mounts.
        """
        writers = [sandbox for sandbox, mount in self._index.mounts_of(volume) if not (mount.read_only or force)]
        return in_use_error(
            volume,
            {"read-write mount": writers},
            "Detach it there, or force the rollback.",
            overrides=["force"],
            busy=self._index.is_pinned(volume),
        )

    def _blocking_volumes(self, snapshots: Iterable[VolumeSnapshot]) -> list[Volume]:
        """Return the volumes that prevent the deletion of snapshots of volumes."""
        ids = {snapshot.id for snapshot in snapshots}
        if self._host.abilities.independent_snapshots or not ids:
            return []
        return [volume for volume in self._index.volumes.values() if volume.from_snapshot in ids]

    def _blocking_snapshots(self, snapshots: Iterable[VolumeSnapshot]) -> list[Snapshot]:
        """Return the sandbox snapshots that include one of ``snapshots``, except transient ones."""
        ids = {snapshot.id for snapshot in snapshots}
        return [
            each
            for each in self._index.snapshots.values()
            if each.kind is not SnapshotKind.TRANSIENT and any(capture.snapshot in ids for capture in each.volumes)
        ]


_USER_KINDS = {"cloned volume": "clone", "read-write mount": "mount", "snapshot": "volume_snapshot"}
"""The kinds of users in an error's details that differ from the nouns in its message."""


def in_use_error(
    record: Snapshot | VolumeSnapshot | Volume,
    users: Mapping[str, Sequence[Record]],
    remedy: str,
    *,
    busy: bool,
    volume: str = "",
    overrides: Sequence[str] = (),
) -> InUse | None:
    """Return the error that counts and names all ``users``, or None if there are none and the object is not ``busy``.

    ``users``: by noun. ``busy``: another request currently uses the object. ``volume``: the name of the volume, if
    ``record`` is a VolumeSnapshot. ``overrides``: request parameters with which the request would succeed.
    """
    subject = what, resource = _describe(record, volume)
    names_by_noun = {noun: [(each.id, names_of([each])) for each in records] for noun, records in users.items()}
    if any(names_by_noun.values()):
        return _new_in_use_error(*subject, names_by_noun, remedy, overrides)
    if busy:
        details = {"resource": resource, "users": [], "overrides": []}
        return InUse(f"{what} is in use by another request. Try again later.", details=details)
    return None


@contextlib.contextmanager
def naming_external_users(record: Snapshot | VolumeSnapshot | Volume, volume: str = "") -> Iterator[None]:
    """Convert an InUseExternally raised in this context to an error that names ``record`` and its users.

    ``volume``: the name of the volume, if ``record`` is a VolumeSnapshot.
    """
    try:
        yield
    except InUseExternally as error:
        users = {noun: list(group.items()) for noun, group in error.users.items()}
        raise _new_in_use_error(*_describe(record, volume), users, error.remedy) from error


def _describe(record: Snapshot | VolumeSnapshot | Volume, volume: str = "") -> tuple[str, str]:
    """Return the description and the kind of the object in use."""
    match record:
        case Volume():
            return f"volume {record.name!r}", "volume"
        case VolumeSnapshot():
            return f"snapshot {record.name!r} of volume {volume!r}", "volume_snapshot"
        case Snapshot():
            return f"{record.kind.value} {names_of([record])!r}", record.kind.value


def _new_in_use_error(
    what: str,
    resource: str,
    users: Mapping[str, Sequence[tuple[str, str]]],
    remedy: str,
    overrides: Sequence[str] = (),
) -> InUse:
    """Return the error that counts and names all users. ``users``: ids and names, by noun."""
    phrases = [
        f"{_format_count(noun, group)} ({', '.join(name for _, name in group)})"
        for noun, group in users.items()
        if group
    ]
    entries = [
        {"kind": _user_kind(noun), "id": id, "name": name} for noun, group in users.items() for id, name in group
    ]
    return InUse(
        f"{what} is in use by {_join_words(phrases)}. {remedy}",
        blockers=[each["id"] for each in entries],
        details={"resource": resource, "users": entries, "overrides": list(overrides)},
    )


def _user_kind(noun: str) -> str:
    return _USER_KINDS.get(noun, noun.lower().replace(" ", "_"))


def _format_count(noun: str, users: Sequence[object]) -> str:
    if len(users) == 1:
        return f"1 {noun}"
    return f"{len(users)} {noun}{'es' if noun.endswith('x') else 's'}"


def _join_words(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
