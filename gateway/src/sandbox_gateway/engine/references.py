"""Find the references that prevent the removal of snapshots and volumes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.names import names_of
from sandbox_gateway.errors import InUse, InUseExternally
from sandbox_gateway.records import Record, Sandbox, Snapshot, SnapshotKind, Volume, VolumeSnapshot


class References:
    def __init__(self, context: Context) -> None:
        self._index = context.index
        self._host = context.host

    def blocking_sandboxes(self, snapshot: Snapshot) -> list[Sandbox]:
        """Return the sandboxes that prevent the deletion of a snapshot."""
        if self._host.abilities.independent_snapshots:
            users = self._index.sandboxes_using(snapshot)
            return [each for each in users if snapshot.id in (each.forked_from, each.pause_snapshot)]
        return self._index.sandboxes_using(snapshot)

    def volume_snapshots_in(self, snapshot: Snapshot) -> list[VolumeSnapshot]:
        """Return the snapshots of volumes that are part of a sandbox's snapshot."""
        ids = (capture.snapshot for capture in snapshot.volumes)
        return [self._index.volume_snapshots[id] for id in ids if id in self._index.volume_snapshots]

    def blocking_volumes(self, snapshots: Iterable[VolumeSnapshot]) -> list[Volume]:
        """Return the volumes that prevent the deletion of snapshots of volumes."""
        if self._host.abilities.independent_snapshots:
            return []
        ids = {snapshot.id for snapshot in snapshots}
        return [volume for volume in self._index.volumes.values() if volume.from_snapshot in ids]

    def blockers(self, snapshot: Snapshot) -> list[Sandbox | Volume]:
        """Return the sandboxes and volumes that prevent the deletion of a snapshot or its snapshots of volumes."""
        return [*self.blocking_sandboxes(snapshot), *self.blocking_volumes(self.volume_snapshots_in(snapshot))]

    def is_pinned(self, snapshot: Snapshot) -> bool:
        """Return whether a request is using a snapshot or its snapshots of volumes."""
        return self._index.is_pinned(snapshot) or any(map(self._index.is_pinned, self.volume_snapshots_in(snapshot)))

    def blocking_snapshots(self, snapshots: Iterable[VolumeSnapshot]) -> list[Snapshot]:
        """Return the sandbox snapshots that include one of ``snapshots``, except transient ones."""
        ids = {snapshot.id for snapshot in snapshots}
        return [
            each
            for each in self._index.snapshots.values()
            if each.kind is not SnapshotKind.TRANSIENT and any(capture.snapshot in ids for capture in each.volumes)
        ]

    def snapshot_refusal(self, snapshot: Snapshot) -> InUse | None:
        """Return the error that names all users of a snapshot or template, or None if it can be removed."""
        return in_use_error(
            snapshot,
            {
                "sandbox": self.blocking_sandboxes(snapshot),
                "cloned volume": self.blocking_volumes(self.volume_snapshots_in(snapshot)),
            },
            "Delete them first, or pass when=unused to delete it with its last user.",
            overrides=["when=unused"],
            busy=self.is_pinned(snapshot),
        )

    def volume_refusal(self, volume: Volume, *, with_snapshots: bool) -> InUse | None:
        """Return the error that names all users of a volume, or None if it can be removed.

        ``with_snapshots``: the volume's own snapshots do not count as users.
        """
        snapshots = self._index.snapshots_of(volume)
        sandbox_snapshots = self.blocking_snapshots(snapshots)
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
                "clone": self.blocking_volumes(snapshots),
            },
            "Detach or delete them first.",
            overrides=["withSnapshots"] if own_snapshots else [],
            busy=self._index.is_pinned(volume) or any(map(self._index.is_pinned, snapshots)),
        )

    def volume_snapshot_refusal(self, volume: Volume, snapshot: VolumeSnapshot) -> InUse | None:
        """Return the error that names all users of a volume snapshot, or None if it can be removed."""
        return in_use_error(
            snapshot,
            {"sandbox snapshot": self.blocking_snapshots([snapshot]), "clone": self.blocking_volumes([snapshot])},
            "Delete them first.",
            volume=volume.name,
            busy=self._index.is_pinned(snapshot),
        )


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
