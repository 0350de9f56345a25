"""Take and destroy snapshots, and roll filesystems back to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.exceptions import (
    DatasetNotFound,
    DuplicateSnapshots,
    FilesystemNotFound,
    NameInvalid,
    NameTooLong,
    PoolsDiffer,
    PropertyInvalid,
    SnapshotDestructionFailure,
    SnapshotExists,
    SnapshotFailure,
    SnapshotIsCloned,
    SnapshotIsHeld,
    SnapshotNotFound,
    SnapshotNotLatest,
    ZFSError,
)
from zfs_core.listing import list_clones, list_snapshots, lzc_exists
from zfs_core.names import (
    Name,
    filesystem_of,
    pool_of,
    validate_filesystem_name,
    validate_new_snapshot_name,
    validate_snapshot_name,
)
from zfs_core.options import Props, format_property_options
from zfs_core.outcome import ErrorFactory, check, error_of
from zfs_core.properties import get_props
from zfs_core.run import run, run_with_retries


def lzc_snapshot(snaps: Iterable[Name], props: Props = None) -> None:
    """Take snapshots in one pool, with user properties. If one fails, takes none and raises SnapshotFailure.

    ``SnapshotFailure.errors`` may contain SnapshotExists, FilesystemNotFound, DuplicateSnapshots, PoolsDiffer,
    NameInvalid, NameTooLong, PropertyInvalid, NoSpace.
    """
    try:
        names = [validate_new_snapshot_name(snap) for snap in snaps]
        options = format_property_options(props)
    except (NameInvalid, NameTooLong, PropertyInvalid) as error:
        raise SnapshotFailure([error]) from None
    _check_compatible(names)
    if len(names) > 1 and not detect_capabilities().atomic_snapshots:
        _snapshot_one_by_one(names, options)
    elif names:
        _snapshot_atomically(names, options)


lzc_snap = lzc_snapshot

_SNAPSHOT_ERRORS: dict[Cause, ErrorFactory] = {Cause.EXISTS: SnapshotExists, Cause.MISSING: FilesystemNotFound}


def _check_compatible(names: Sequence[str]) -> None:
    filesystems = [filesystem_of(name) for name in names]
    for name, filesystem in zip(names, filesystems, strict=True):
        if pool_of(name) != pool_of(names[0]):
            raise SnapshotFailure([PoolsDiffer(name)])
        if filesystems.count(filesystem) > 1:
            raise SnapshotFailure([DuplicateSnapshots(name)])


def _snapshot_atomically(names: Sequence[str], options: Sequence[str]) -> None:
    outcome = run("snapshot", *options, *names, name=names[0])
    if outcome.cause is None:
        return
    failed_names = [
        name for name in names if f"'{name}'" in outcome.message or f"'{filesystem_of(name)}'" in outcome.message
    ]
    raise SnapshotFailure(
        [error_of(outcome, name, "create snapshot", _SNAPSHOT_ERRORS) for name in failed_names or names[:1]]
    )


def _snapshot_one_by_one(names: Sequence[str], options: Sequence[str]) -> None:
    taken_names: list[str] = []
    try:
        for name in names:
            _snapshot_atomically([name], options)
            taken_names.append(name)
    except BaseException:
        for name in taken_names:
            run_with_retries("destroy", name, name=name)
        raise


def lzc_destroy_snaps(snaps: Iterable[Name], defer: bool) -> None:
    """Destroy snapshots. Skips snapshots that do not exist.

    With ``defer``, ZFS destroys a cloned or held snapshot with its last clone or hold. Without it, if one snapshot is
    cloned or held, none is destroyed and SnapshotDestructionFailure is raised. Its ``errors`` are SnapshotIsCloned
    (``related``: the clones) and SnapshotIsHeld.
    """
    names = [validate_snapshot_name(snap) for snap in snaps]
    if len(names) > 1 and not defer:
        _check_unused(names)
    errors = [error for name in names if (error := _destroy_snapshot(name, defer))]
    if errors:
        raise SnapshotDestructionFailure(errors)


def _check_unused(names: Sequence[str]) -> None:
    errors: list[ZFSError] = []
    for name in names:
        with suppress(DatasetNotFound):
            if get_props([name], ["userrefs"])[name]["userrefs"].number:
                errors.append(SnapshotIsHeld(name))
            elif clones := list_clones(name):
                errors.append(SnapshotIsCloned(name).with_details("it has clones", clones))
    if errors:
        raise SnapshotDestructionFailure(errors)


def _destroy_snapshot(name: str, defer: bool) -> ZFSError | None:
    outcome = run("destroy", *(["-d"] if defer else []), name, name=name)
    if outcome.cause in (None, Cause.MISSING):
        return None
    specific_errors: dict[Cause, ErrorFactory] = {
        Cause.HAS_CLONES: SnapshotIsCloned,
        Cause.EXISTS: SnapshotIsCloned,
        Cause.HELD: SnapshotIsHeld,
        Cause.BUSY: SnapshotIsHeld,
    }
    return error_of(outcome, name, "destroy snapshot", specific_errors)


def lzc_rollback(name: Name) -> Name:
    """Roll a filesystem back to its latest snapshot. Returns the snapshot's full name, as bytes if ``name`` is bytes.

    Raises SnapshotNotFound if the filesystem has no snapshots. Also raises FilesystemNotFound, NameInvalid,
    NameTooLong, DatasetBusy.
    """
    target = validate_filesystem_name(name)
    snaps = list_snapshots(target)
    if not snaps:
        raise SnapshotNotFound(target)
    lzc_rollback_to(target, snaps[-1])
    return snaps[-1] if isinstance(name, str) else snaps[-1].encode()


def lzc_rollback_to(name: Name, snap: Name) -> None:
    """Roll a filesystem back to its latest snapshot, whose full name must be ``snap``.

    Raises SnapshotNotLatest, FilesystemNotFound, SnapshotNotFound, NameInvalid, NameTooLong, DatasetBusy.
    """
    target, snapshot = validate_filesystem_name(name), validate_snapshot_name(snap)
    if filesystem_of(snapshot) != target:
        raise NameInvalid(snapshot)
    outcome = run_with_retries("rollback", snapshot, name=target)
    if outcome.cause is Cause.MISSING and not lzc_exists(target):
        raise outcome.explain(FilesystemNotFound(target))
    specific_errors: dict[Cause, ErrorFactory] = {Cause.NOT_LATEST: SnapshotNotLatest, Cause.MISSING: SnapshotNotFound}
    check(outcome, snapshot, "roll back", specific_errors)
