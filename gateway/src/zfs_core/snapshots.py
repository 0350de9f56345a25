"""Take and destroy snapshots, and roll filesystems back to them."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Sequence

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.exceptions import (
    DuplicateSnapshots,
    FilesystemNotFound,
    NameInvalid,
    NameTooLong,
    PoolNotFound,
    PoolsDiffer,
    PropertyInvalid,
    ReadOnlyPool,
    SnapshotDestructionFailure,
    SnapshotExists,
    SnapshotFailure,
    SnapshotIsCloned,
    SnapshotIsHeld,
    SnapshotMismatch,
    SnapshotNotFound,
    SnapshotNotLatest,
    SuspendedPool,
    ZCPError,
    ZFSError,
    ZFSGenericError,
    ZFSOutputError,
)
from zfs_core.listing import (
    find_hold_counts,
    find_types,
    list_clones_by_origin,
    list_snapshots,
    lzc_exists,
    split_names,
)
from zfs_core.names import (
    Name,
    accepts_bytes,
    decode_name,
    get_filesystem_name,
    get_pool_name,
    get_short_name,
    is_snapshot_name,
    is_too_long,
    validate_filesystem_name,
    validate_new_snapshot_name,
    validate_snapshot_name,
)
from zfs_core.options import Props, format_property_options
from zfs_core.outcome import ErrorFactory, check, make_error
from zfs_core.pools import lzc_channel_program
from zfs_core.run import run, run_with_retries


@accepts_bytes
def lzc_snapshot(snaps: Collection[Name], props: Props = None) -> None:
    """Take snapshots in one pool, with user properties. If one fails, takes none and raises SnapshotFailure.

    ``SnapshotFailure.errors`` contains FilesystemNotFound, SnapshotExists or NameTooLong (for a full name) for each
    snapshot concerned, or else one error for all: NameInvalid, NameTooLong (for the part after ``@``),
    DuplicateSnapshots, PoolsDiffer, PropertyInvalid, NoSpace, ReadOnlyPool. The ``name`` of this one error is None if
    there are several snapshots. Command: ``zfs snapshot SNAP...``.
    """
    if not snaps:
        return
    names = _validate_new_names(snaps)
    try:
        options = format_property_options(props)
        if any(":" not in word for word in options[1::2]):
            raise PropertyInvalid(None).with_details("only user properties can be set on a snapshot")
    except PropertyInvalid as error:
        raise SnapshotFailure(
            [PropertyInvalid(_get_only_name(names)).with_details(f"{error.name}: {error.details}")]
        ) from None
    try:
        if len(names) > 1 and not detect_capabilities().atomic_snapshots:
            _snapshot_one_by_one(names, options)
        else:
            _snapshot_atomically(names, options)
    except (ReadOnlyPool, SuspendedPool) as error:
        raise SnapshotFailure([type(error)(_get_only_name(names)).with_details(error.details)]) from None
    except ZFSGenericError as error:
        if error.errno != errno.E2BIG:
            raise
        message = (
            f"Failed to create {len(names)} snapshots at the same instant, because their names and properties do not "
            "fit into one command: take fewer at a time"
        )
        raise SnapshotFailure([ZFSGenericError(errno.E2BIG, _get_only_name(names), message)]) from None


lzc_snap = lzc_snapshot

_SNAPSHOT_ERRORS: dict[Cause, ErrorFactory] = {Cause.EXISTS: SnapshotExists, Cause.MISSING: FilesystemNotFound}


def _get_only_name(names: Sequence[str]) -> str | None:
    """Return the name if there is only one, or None. An error that concerns several snapshots has no name."""
    return names[0] if len(names) == 1 else None


def _validate_new_names(snaps: Iterable[Name]) -> list[str]:
    try:
        names = [decode_name(snap) for snap in snaps]
    except NameInvalid as error:
        raise SnapshotFailure([error]) from None
    name = _get_only_name(names)
    if not all(_is_new_snapshot_name(each) for each in names):
        raise SnapshotFailure([NameInvalid(name)])
    if any(is_too_long(get_short_name(each)) for each in names):
        raise SnapshotFailure([NameTooLong(name)])
    if len({get_pool_name(each) for each in names}) > 1:
        raise SnapshotFailure([PoolsDiffer(name)])
    if len({get_filesystem_name(each) for each in names}) < len(names):
        raise SnapshotFailure([DuplicateSnapshots(name)])
    if too_long_names := [each for each in names if is_too_long(each)]:
        raise SnapshotFailure([NameTooLong(each) for each in too_long_names])
    return names


def _is_new_snapshot_name(name: str) -> bool:
    try:
        validate_new_snapshot_name(name)
    except NameTooLong:
        pass
    except NameInvalid:
        return False
    return True


def _snapshot_atomically(names: Sequence[str], options: Sequence[str]) -> None:
    outcome = run("snapshot", *options, *names, name=names[0])
    if outcome.cause is None:
        return
    if errors := _find_obstacles(names) if outcome.cause in _SNAPSHOT_ERRORS else []:
        raise SnapshotFailure([outcome.explain(error) for error in errors])
    error = make_error(outcome, names[0], "create snapshot", _SNAPSHOT_ERRORS)
    error.name = _get_only_name(names)
    raise SnapshotFailure([error])


def _find_obstacles(names: Sequence[str]) -> list[ZFSError]:
    """Return an error for each snapshot that already exists or whose filesystem does not.

    The command mentions only some of them.
    """
    existing_names = find_types([each for name in names for each in (name, get_filesystem_name(name))])
    return [
        SnapshotExists(name) if name in existing_names else FilesystemNotFound(name)
        for name in names
        if name in existing_names or get_filesystem_name(name) not in existing_names
    ]


def _snapshot_one_by_one(names: Sequence[str], options: Sequence[str]) -> None:
    taken_names: list[str] = []
    try:
        for name in names:
            _snapshot_atomically([name], options)
            taken_names.append(name)
    except BaseException as error:
        for name in taken_names:
            run_with_retries("destroy", name, name=name)
        if isinstance(error, SnapshotFailure) and (errors := _find_obstacles(names)):
            raise SnapshotFailure(errors) from None
        raise


@accepts_bytes
def lzc_destroy_snaps(snaps: Iterable[Name], defer: bool) -> None:
    """Destroy snapshots of one pool. Skips snapshots that do not exist, and names that no snapshot can have.

    With ``defer``, ZFS destroys a cloned or held snapshot when its last clone or hold is removed. Without it, if any
    snapshot is cloned or held, none is destroyed and SnapshotDestructionFailure is raised. Its ``errors`` are
    SnapshotIsCloned (``related``: the clones), SnapshotIsHeld, NameTooLong, PoolsDiffer or PoolNotFound. One command
    destroys up to 400 snapshots. If there are more, or if this version of ZFS has no channel programs, and a snapshot
    is cloned or held in the meantime, others may already be destroyed. Command: ``zfs destroy SNAP,SHORTNAME`` for one
    filesystem, ``zfs program`` for several.
    """
    names = [decode_name(snap) for snap in snaps]
    if too_long_names := [name for name in names if is_too_long(get_short_name(name))]:
        raise SnapshotDestructionFailure([NameTooLong(name) for name in too_long_names])
    if len({get_pool_name(name) for name in names}) > 1:
        raise SnapshotDestructionFailure([PoolsDiffer(_get_only_name(names))])
    # The command would treat "%" and "," as a range or list of snapshots, and a name without "@" as a filesystem.
    possible_names = [name for name in names if is_snapshot_name(name) and not is_too_long(name)]
    possible_names = _destroy_with_programs(possible_names, defer)
    if len(possible_names) > 1 and not defer:
        _check_unused(possible_names)
    if errors := _destroy_by_filesystem(possible_names, defer):
        raise SnapshotDestructionFailure(errors)


_DESTROY_PROGRAM = """
local names, existing = (...)["argv"], {}
for i = 2, #names do
    local code = zfs.check.destroy{names[i], defer=(names[1] == "defer")}
    if code == 0 then
        existing[#existing + 1] = names[i]
    elseif code ~= ENOENT then
        return "refused"
    end
end
for _, name in ipairs(existing) do
    assert(zfs.sync.destroy{name, defer=(names[1] == "defer")} == 0)
end
return "destroyed"
"""
"""Destroys the snapshots after the first argument, or none. Skips those that do not exist."""


def _destroy_with_programs(names: list[str], defer: bool) -> list[str]:
    """Destroy snapshots of several filesystems with channel programs. Returns the names that are still to be destroyed.

    A program cannot destroy a mounted snapshot, and does not explain why a snapshot is in use. `zfs destroy` does both,
    so it takes over if a program refuses.
    """
    if len({get_filesystem_name(name) for name in names}) < 2 or not detect_capabilities().pool_commands:
        return names
    batches = list(split_names(dict.fromkeys(names)))
    for index, batch in enumerate(batches):
        try:
            mode = "defer" if defer else "now"
            result = lzc_channel_program(get_pool_name(batch[0]), _DESTROY_PROGRAM, params=[mode, *batch])
        except (ZCPError, PoolNotFound):
            result = None
        if result != "destroyed":
            return [name for each in batches[index:] for name in each]
    return []


def _check_unused(names: Sequence[str]) -> None:
    """Raise SnapshotDestructionFailure if any of the snapshots is held or has clones."""
    hold_counts = find_hold_counts(names)
    if not hold_counts:
        return
    clones = list_clones_by_origin(hold_counts)
    errors: list[ZFSError] = []
    for name, count in hold_counts.items():
        if count not in ("0", "-"):
            errors.append(SnapshotIsHeld(name))
        elif clones[name]:
            errors.append(SnapshotIsCloned(name).with_details("it has clones", clones[name]))
    if errors:
        raise SnapshotDestructionFailure(errors)


def _destroy_by_filesystem(names: Iterable[str], defer: bool) -> list[ZFSError]:
    if not detect_capabilities().destroys_lists:
        return [error for name in names if (error := _destroy_snapshot(name, defer))]
    names_by_filesystem: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        names_by_filesystem.setdefault(get_filesystem_name(name), []).append(name)
    errors: list[ZFSError] = []
    for group in names_by_filesystem.values():
        for batch in split_names(group):
            errors += _destroy_batch(batch, defer)
            if errors and not defer:
                return errors
    return errors


def _destroy_batch(names: list[str], defer: bool) -> list[ZFSError]:
    """Destroy snapshots of one filesystem with one command, which destroys all of them or none."""
    if len(names) > 1:
        other_short_names = [get_short_name(name) for name in names[1:]]
        outcome = run("destroy", *(["-d"] if defer else []), ",".join([names[0], *other_short_names]), name=names[0])
        if outcome.cause is None:
            return []
        if outcome.cause in (Cause.MISSING, Cause.NO_POOL):  # None of them exists.
            return (
                [] if lzc_exists(get_pool_name(names[0])) else [outcome.explain(PoolNotFound(name)) for name in names]
            )
        if not defer:
            try:
                _check_unused(names)
            except SnapshotDestructionFailure as failure:
                return [error if error.details else outcome.explain(error) for error in failure.errors]
            return [make_error(outcome, names[0], "destroy snapshots")]
    return [error for name in names if (error := _destroy_snapshot(name, defer))]


def _destroy_snapshot(name: str, defer: bool) -> ZFSError | None:
    outcome = run("destroy", *(["-d"] if defer else []), name, name=name)
    if outcome.cause in (Cause.MISSING, Cause.NO_POOL) and not lzc_exists(get_pool_name(name)):
        return outcome.explain(PoolNotFound(name))
    if outcome.cause in (None, Cause.MISSING):
        return None
    specific_errors: dict[Cause, ErrorFactory] = {
        Cause.HAS_CLONES: SnapshotIsCloned,
        Cause.EXISTS: SnapshotIsCloned,
        Cause.HELD: SnapshotIsHeld,
        Cause.BUSY: SnapshotIsHeld,
    }
    return make_error(outcome, name, "destroy snapshot", specific_errors)


@accepts_bytes
def lzc_rollback(name: Name) -> Name:
    """Roll a filesystem back to its latest snapshot. Returns the snapshot's full name.

    Raises SnapshotNotFound if the filesystem has no snapshots. Also raises FilesystemNotFound, NameInvalid,
    NameTooLong, DatasetBusy. Command: ``zfs rollback SNAP``.
    """
    target = validate_filesystem_name(name)
    snaps = list_snapshots(target)
    if not snaps:
        raise SnapshotNotFound(target)
    lzc_rollback_to(target, snaps[-1])
    return snaps[-1]


@accepts_bytes
def lzc_rollback_to(name: Name, snap: Name) -> None:
    """Roll a filesystem back to its latest snapshot, whose full name must be ``snap``.

    Raises SnapshotNotLatest, FilesystemNotFound, SnapshotNotFound, NameInvalid, NameTooLong, DatasetBusy. Command:
    ``zfs rollback SNAP``.
    """
    target, snapshot = validate_filesystem_name(name), validate_snapshot_name(snap)
    if get_filesystem_name(snapshot) != target:
        raise NameInvalid(snapshot)
    outcome = run_with_retries("rollback", snapshot, name=target)
    if outcome.cause is Cause.MISSING and not lzc_exists(target):
        raise outcome.explain(FilesystemNotFound(target))
    specific_errors: dict[Cause, ErrorFactory] = {Cause.NOT_LATEST: SnapshotNotLatest, Cause.MISSING: SnapshotNotFound}
    check(outcome, snapshot, "roll back", specific_errors)


@accepts_bytes
def lzc_snaprange_space(firstsnap: Name, lastsnap: Name) -> int:
    """Return how many bytes destroying a range of snapshots of one filesystem would free. Both ends are included.

    Raises SnapshotNotFound, PoolsDiffer, NameInvalid, NameTooLong, and SnapshotMismatch if ``firstsnap`` is not an
    earlier snapshot of the same filesystem, or the same snapshot. Command: ``zfs destroy -d -n -v -p FIRST%LAST``.
    """
    if not detect_capabilities().bookmarks:
        raise NotImplementedError(
            "lzc_snaprange_space: this version of ZFS cannot calculate the space used by snapshots"
        )
    first_name, last_name = validate_snapshot_name(firstsnap), validate_snapshot_name(lastsnap)
    if get_pool_name(first_name) != get_pool_name(last_name):
        raise PoolsDiffer(last_name)
    if len(find_types([first_name, last_name])) < len({first_name, last_name}):
        raise SnapshotNotFound(last_name)
    snapshots = list_snapshots(get_filesystem_name(last_name))
    if first_name not in snapshots or snapshots.index(first_name) > snapshots.index(last_name):
        raise SnapshotMismatch(last_name)
    outcome = run("destroy", "-d", "-n", "-v", "-p", f"{first_name}%{get_short_name(last_name)}", name=last_name)
    text = check(outcome, last_name, "calculate space used by range of snapshots").output
    sizes = [line.partition("\t")[2] for line in text.splitlines() if line.startswith("reclaim\t")]
    if len(sizes) != 1 or not sizes[0].isdecimal():
        raise ZFSOutputError(last_name).with_details(f"expected a line `reclaim SIZE` in {text[:200]!r}")
    return int(sizes[0])
