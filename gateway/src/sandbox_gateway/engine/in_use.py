"""Create the errors that count and name the users of an object. Some users are known only to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from sandbox_gateway.engine.names import join_names
from sandbox_gateway.errors import InUse, InUseExternally
from sandbox_gateway.records import Record, Sandbox, Snapshot, Volume, VolumeSnapshot

_USER_KINDS = {"cloned volume": "clone", "read-write mount": "mount", "snapshot": "volume_snapshot"}
"""The kinds of users in an error's details that differ from the nouns in its message."""


def create_snapshot_in_use_error(
    snapshot: Snapshot, *, sandboxes: Sequence[Sandbox], cloned_volumes: Sequence[Volume], is_busy: bool
) -> InUse | None:
    """Return the error for the deletion of a snapshot or template, or None if it is unused."""
    return create_in_use_error(
        snapshot,
        {"sandbox": sandboxes, "cloned volume": cloned_volumes},
        "Delete them first, or pass 'when=unused' to delete it when its last user is deleted.",
        overrides=["when=unused"],
        is_busy=is_busy,
    )


def create_volume_in_use_error(
    volume: Volume,
    *,
    mounting_sandboxes: Sequence[Sandbox],
    sandbox_snapshots: Sequence[Snapshot],
    own_snapshots: Sequence[VolumeSnapshot],
    clones: Sequence[Volume],
    is_busy: bool,
) -> InUse | None:
    """Return the error for the deletion of a volume, or None if it is unused."""
    return create_in_use_error(
        volume,
        {
            "mount": mounting_sandboxes,
            "sandbox snapshot": sandbox_snapshots,
            "snapshot": own_snapshots,
            "clone": clones,
        },
        "Detach or delete them first.",
        overrides=["withSnapshots"] if own_snapshots else [],
        is_busy=is_busy,
    )


def create_volume_snapshot_in_use_error(
    snapshot: VolumeSnapshot,
    volume: Volume,
    *,
    sandbox_snapshots: Sequence[Snapshot],
    clones: Sequence[Volume],
    is_busy: bool,
) -> InUse | None:
    """Return the error for the deletion of a volume snapshot, or None if it is unused."""
    return create_in_use_error(
        snapshot,
        {"sandbox snapshot": sandbox_snapshots, "clone": clones},
        "Delete them first.",
        volume=volume.name,
        is_busy=is_busy,
    )


def create_volume_mounted_error(volume: Volume, *, writers: Sequence[Sandbox], is_busy: bool) -> InUse | None:
    """Return the error for the rollback of a volume. ``writers``: the sandboxes that mount it read-write."""
    return create_in_use_error(
        volume,
        {"read-write mount": writers},
        "Detach the volume, or force the rollback.",
        overrides=["force"],
        is_busy=is_busy,
    )


def create_in_use_error(
    record: Snapshot | VolumeSnapshot | Volume,
    users: Mapping[str, Sequence[Record]],
    remedy: str,
    *,
    is_busy: bool,
    volume: str = "",
    overrides: Sequence[str] = (),
) -> InUse | None:
    """Return the error that counts and names all ``users``, or None if there are none and ``is_busy`` is False.

    ``users``: grouped by noun. ``is_busy``: whether another request uses the object. ``volume``: the name of the
    volume, if ``record`` is a VolumeSnapshot. ``overrides``: request parameters that would make the request succeed.
    """
    subject = description, resource = _describe(record, volume)
    users_by_noun = {noun: [(each.id, join_names([each])) for each in records] for noun, records in users.items()}
    if any(users_by_noun.values()):
        return _build_in_use_error(*subject, users_by_noun, remedy, overrides)
    if is_busy:
        details = {"resource": resource, "users": [], "overrides": []}
        return InUse(f"{description} is in use by a running request. Try again later.", details=details)
    return None


@contextlib.contextmanager
def external_users_named(record: Snapshot | VolumeSnapshot | Volume, volume: str = "") -> Iterator[None]:
    """Convert an InUseExternally raised in this context to an error that names ``record`` and its users.

    ``volume``: the name of the volume, if ``record`` is a VolumeSnapshot.
    """
    try:
        yield
    except InUseExternally as error:
        users = {noun: list(group.items()) for noun, group in error.users.items()}
        raise _build_in_use_error(*_describe(record, volume), users, error.remedy) from error


def _describe(record: Snapshot | VolumeSnapshot | Volume, volume: str = "") -> tuple[str, str]:
    """Return the description and the kind of ``record``."""
    match record:
        case Volume():
            return f"volume {record.name!r}", "volume"
        case VolumeSnapshot():
            return f"snapshot {record.name!r} of volume {volume!r}", "volume_snapshot"
        case Snapshot():
            return f"{record.kind.value} {join_names([record])!r}", record.kind.value


def _build_in_use_error(
    description: str,
    resource: str,
    users: Mapping[str, Sequence[tuple[str, str]]],
    remedy: str,
    overrides: Sequence[str] = (),
) -> InUse:
    """Return the error that counts and names all users. ``users``: ids and names, grouped by noun."""
    phrases = [
        f"{_format_count(noun, group)} ({', '.join(name for _, name in group)})"
        for noun, group in users.items()
        if group
    ]
    entries = [
        {"kind": _get_user_kind(noun), "id": id, "name": name} for noun, group in users.items() for id, name in group
    ]
    return InUse(
        f"{description} is in use by {_join_words(phrases)}. {remedy}",
        blockers=[each["id"] for each in entries],
        details={"resource": resource, "users": entries, "overrides": list(overrides)},
    )


def _get_user_kind(noun: str) -> str:
    return _USER_KINDS.get(noun, noun.lower().replace(" ", "_"))


def _format_count(noun: str, users: Sequence[object]) -> str:
    if len(users) == 1:
        return f"1 {noun}"
    return f"{len(users)} {noun}{'es' if noun.endswith('x') else 's'}"


def _join_words(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
