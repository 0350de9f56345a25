"""``libzfs_core`` (pyzfs) over the ``zfs`` command.

The functions ``lzc_*`` have the names, the order of arguments and the exceptions of libzfs_core; names may be str or
bytes; exceptions are in ``zfs.exceptions``. Whoever knows pyzfs knows this module, but for four things, which are the
command's: a filesystem that is made is mounted at once if its ``canmount`` and ``mountpoint`` say so;
``lzc_destroy`` unmounts it first; ``lzc_rename`` mounts it again under the new name; several snapshots on zfs-fuse
are taken one after the other (all or none still holds).

Below them is what pyzfs leaves to others: listing, properties, mounts, and what changed since a snapshot.
Everything blocks (use ``asyncio.to_thread``), for at most ``zfs_command.SECONDS``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from sandbox_gateway.hosts.jail_zfs import zfs_errors as exceptions
from sandbox_gateway.hosts.jail_zfs.zfs_command import (
    TRANSFER_SECONDS,
    Make,
    Outcome,
    checked,
    failure,
    flavour,
    run,
    run_patiently,
)
from sandbox_gateway.hosts.jail_zfs.zfs_compare import changed_since
from sandbox_gateway.hosts.jail_zfs.zfs_errors import (
    BadStream,
    Cause,
    DatasetBusy,
    DatasetNotFound,
    DatasetTypeInvalid,
    DestinationModified,
    DuplicateSnapshots,
    FeatureNotSupported,
    FilesystemExists,
    FilesystemNotFound,
    HoldExists,
    HoldFailure,
    HoldNotFound,
    HoldReleaseFailure,
    MountFailed,
    NameInvalid,
    NameTooLong,
    NotClone,
    ParentNotFound,
    PoolsDiffer,
    PropertyInvalid,
    SnapshotDestructionFailure,
    SnapshotExists,
    SnapshotFailure,
    SnapshotIsCloned,
    SnapshotIsHeld,
    SnapshotMismatch,
    SnapshotNotFound,
    SnapshotNotLatest,
    StreamMismatch,
    StreamTruncated,
    ZFSError,
    ZFSOutputError,
)
from sandbox_gateway.hosts.jail_zfs.zfs_parse import (
    Name,
    Props,
    filesystem_name,
    filesystem_of,
    new_filesystem_name,
    new_snapshot_name,
    parse_table,
    pool_of,
    property_options,
    snapshot_name,
    text_of,
)
from sandbox_gateway.hosts.jail_zfs.zfs_props import (
    clones,
    get_props,
    get_tree,
    list_datasets,
    list_snapshots,
    local_props,
    local_tree,
    lzc_exists,
    lzc_inherit_prop,
    lzc_set_prop,
    mount,
    mounted,
    mounted_dependents,
    reachable,
    sync,
    unmount,
    used,
    written,
)

__all__ = [
    "changed_since",
    "clones",
    "exceptions",
    "get_props",
    "get_tree",
    "list_datasets",
    "list_snapshots",
    "local_props",
    "local_tree",
    "lzc_clone",
    "lzc_create",
    "lzc_destroy",
    "lzc_destroy_snaps",
    "lzc_exists",
    "lzc_get_holds",
    "lzc_hold",
    "lzc_inherit_prop",
    "lzc_promote",
    "lzc_receive",
    "lzc_release",
    "lzc_rename",
    "lzc_rollback",
    "lzc_rollback_to",
    "lzc_send",
    "lzc_set_prop",
    "lzc_snap",
    "lzc_snapshot",
    "mount",
    "mounted",
    "mounted_dependents",
    "reachable",
    "snapshots_at_once",
    "sync",
    "unmount",
    "used",
    "written",
]


def lzc_create(name: Name, ds_type: str = "zfs", props: Props = None) -> None:
    """Create a filesystem (``zfs``) or a volume (``zvol``, with the property ``volsize``).

    Raises FilesystemExists, ParentNotFound, PropertyInvalid, NameInvalid, NameTooLong, NoSpace, QuotaExceeded;
    MountFailed after removing what could not be mounted.
    """
    target = new_filesystem_name(name)
    options = property_options(props)
    if ds_type == "zvol":
        options = ["-V", _volume_size(target, options), *_without(options, "volsize")]
    elif ds_type != "zfs":
        raise DatasetTypeInvalid(ds_type)
    outcome = run("create", *options, target, name=target)
    _made(outcome, target, "create filesystem", dict.fromkeys(_NO_PARENT, ParentNotFound))


_NO_PARENT = (Cause.NO_PARENT, Cause.NO_POOL, Cause.MISSING)


def _volume_size(target: str, options: list[str]) -> str:
    sizes = [word.partition("=")[2] for word in options if word.startswith("volsize=")]
    if not sizes:
        raise PropertyInvalid(target).because("a volume needs the property volsize")
    return sizes[0]


def _without(options: list[str], prop: str) -> list[str]:
    pairs = zip(options[::2], options[1::2], strict=True)
    return [word for pair in pairs if not pair[1].startswith(f"{prop}=") for word in pair]


def _made(outcome: Outcome, target: str, doing: str, known: Mapping[Cause, Make]) -> None:
    if outcome.cause in (Cause.MOUNT_FAILED, Cause.MOUNT_BUSY):
        run_patiently("destroy", target, name=target)
    checked(outcome, target, doing, {Cause.EXISTS: FilesystemExists, Cause.MOUNT_BUSY: MountFailed, **known})


def lzc_clone(name: Name, origin: Name, props: Props = None) -> None:
    """Clone the snapshot ``origin`` as the filesystem ``name``.

    Raises FilesystemExists, DatasetNotFound (``origin``, or the parent of ``name``), PoolsDiffer, PropertyInvalid,
    NameInvalid, NameTooLong, NoSpace, QuotaExceeded; MountFailed after removing what could not be mounted.
    """
    target, source = new_filesystem_name(name), snapshot_name(origin)
    if pool_of(target) != pool_of(source):
        raise PoolsDiffer(target)
    outcome = run("clone", *property_options(props), source, target, name=target)
    _made(outcome, target, "create clone", {})


def lzc_snapshot(snaps: Iterable[Name], props: Props = None) -> None:
    """Take snapshots, all in one pool, with user properties: all, or none and SnapshotFailure.

    ``SnapshotFailure.errors`` holds SnapshotExists, FilesystemNotFound, DuplicateSnapshots, PoolsDiffer, NameInvalid,
    NameTooLong, PropertyInvalid, NoSpace.
    """
    try:
        names = [new_snapshot_name(snap) for snap in snaps]
        options = property_options(props)
    except (NameInvalid, NameTooLong, PropertyInvalid) as error:
        raise SnapshotFailure([error]) from None
    _check_together(names)
    if len(names) > 1 and flavour().fuse:
        _snapshot_in_turn(names, options)
    elif names:
        _snapshot_at_once(names, options)


lzc_snap = lzc_snapshot

_SNAPSHOT: dict[Cause, Make] = {Cause.EXISTS: SnapshotExists, Cause.MISSING: FilesystemNotFound}


def snapshots_at_once() -> bool:
    """Are several snapshots of one ``lzc_snapshot`` of one instant? On zfs-fuse they are taken one after the other."""
    return not flavour().fuse


def _check_together(names: Sequence[str]) -> None:
    filesystems = [filesystem_of(name) for name in names]
    for name, filesystem in zip(names, filesystems, strict=True):
        if pool_of(name) != pool_of(names[0]):
            raise SnapshotFailure([PoolsDiffer(name)])
        if filesystems.count(filesystem) > 1:
            raise SnapshotFailure([DuplicateSnapshots(name)])


def _snapshot_at_once(names: Sequence[str], options: Sequence[str]) -> None:
    outcome = run("snapshot", *options, *names, name=names[0])
    if outcome.cause is None:
        return
    blamed = [name for name in names if f"'{name}'" in outcome.said or f"'{filesystem_of(name)}'" in outcome.said]
    raise SnapshotFailure([failure(outcome, name, "create snapshot", _SNAPSHOT) for name in blamed or names[:1]])


def _snapshot_in_turn(names: Sequence[str], options: Sequence[str]) -> None:
    done: list[str] = []
    try:
        for name in names:
            _snapshot_at_once([name], options)
            done.append(name)
    except BaseException:
        for name in done:
            run_patiently("destroy", name, name=name)
        raise


def lzc_destroy_snaps(snaps: Iterable[Name], defer: bool) -> None:
    """Destroy snapshots; those that do not exist are passed over.

    With ``defer`` one that is cloned or held goes when its last clone or hold does. Without it, such a one is refused,
    and then none is destroyed: SnapshotDestructionFailure, ``errors``: SnapshotIsCloned, SnapshotIsHeld
    (``related``: the clones).
    """
    names = [snapshot_name(snap) for snap in snaps]
    if len(names) > 1 and not defer:
        _refuse_blocked(names)
    errors = [error for name in names if (error := _destroy_snapshot(name, defer))]
    if errors:
        raise SnapshotDestructionFailure(errors)


def _refuse_blocked(names: Sequence[str]) -> None:
    errors: list[ZFSError] = []
    for name in names:
        with suppress(DatasetNotFound):
            if get_props([name], ["userrefs"])[name]["userrefs"].number:
                errors.append(SnapshotIsHeld(name))
            elif found := clones(name):
                errors.append(SnapshotIsCloned(name).because("it has clones", found))
    if errors:
        raise SnapshotDestructionFailure(errors)


def _destroy_snapshot(name: str, defer: bool) -> ZFSError | None:
    outcome = run("destroy", *(["-d"] if defer else []), name, name=name)
    if outcome.cause in (None, Cause.MISSING):
        return None
    known: dict[Cause, Make] = {
        Cause.HAS_CLONES: SnapshotIsCloned,
        Cause.EXISTS: SnapshotIsCloned,
        Cause.HELD: SnapshotIsHeld,
        Cause.BUSY: SnapshotIsHeld,
    }
    return failure(outcome, name, "destroy snapshot", known)


def lzc_rollback(name: Name) -> Name:
    """Roll a filesystem back to its latest snapshot, whose full name is returned (bytes for bytes).

    Raises FilesystemNotFound, SnapshotNotFound (it has none), NameInvalid, NameTooLong, DatasetBusy.
    """
    target = filesystem_name(name)
    snaps = list_snapshots(target)
    if not snaps:
        raise SnapshotNotFound(target)
    lzc_rollback_to(target, snaps[-1])
    return snaps[-1] if isinstance(name, str) else snaps[-1].encode()


def lzc_rollback_to(name: Name, snap: Name) -> None:
    """Roll a filesystem back to its latest snapshot, if that is ``snap`` (its full name): SnapshotNotLatest if not.

    Raises FilesystemNotFound, SnapshotNotFound, NameInvalid, NameTooLong, DatasetBusy. Never ``-r``.
    """
    target, wanted = filesystem_name(name), snapshot_name(snap)
    if filesystem_of(wanted) != target:
        raise NameInvalid(wanted)
    outcome = run_patiently("rollback", wanted, name=target)
    if outcome.cause is Cause.MISSING and not lzc_exists(target):
        raise outcome.error(FilesystemNotFound(target))
    known: dict[Cause, Make] = {Cause.NOT_LATEST: SnapshotNotLatest, Cause.MISSING: SnapshotNotFound}
    checked(outcome, wanted, "roll back", known)


def lzc_destroy(name: Name) -> None:
    """Unmount and destroy one filesystem without snapshots, children or clones; never more than that.

    Raises FilesystemNotFound, DatasetBusy (``related``: what it still has), NameInvalid, NameTooLong.
    """
    target = filesystem_name(name)
    outcome = run_patiently("destroy", target, name=target)
    known: dict[Cause, Make] = {
        Cause.MISSING: FilesystemNotFound,
        Cause.HAS_CHILDREN: DatasetBusy,
        Cause.HAS_CLONES: DatasetBusy,
    }
    checked(outcome, target, "destroy", known)


def lzc_promote(name: Name) -> None:
    """Make the clone ``name`` the owner of its origin and of the snapshots before it.

    Raises NotClone, FilesystemNotFound, SnapshotExists (both have a snapshot of one name), NoSpace, QuotaExceeded.
    """
    target = filesystem_name(name)
    known: dict[Cause, Make] = {
        Cause.NOT_CLONE: NotClone,
        Cause.SNAPSHOT_CONFLICT: SnapshotExists,
        Cause.EXISTS: SnapshotExists,
        Cause.MISSING: FilesystemNotFound,
    }
    checked(run_patiently("promote", target, name=target), target, "promote", known)


def lzc_rename(source: Name, target: Name, *, patient: bool = True) -> None:
    """Rename a filesystem. A mounted one is unmounted, renamed and mounted again; no other is ever unmounted.

    By itself `zfs rename` unmounts every mounted clone of the filesystem's snapshots as well, and mounts them again
    if it can: a stopped sandbox would lose its files. OpenZFS has an option against that. zfs-fuse has none, so there
    it is DatasetBusy (``related``: the mounted clones); at once if not ``patient``.

    Raises FilesystemNotFound, FilesystemExists, ParentNotFound, PoolsDiffer, DatasetBusy, NameInvalid, NameTooLong.
    """
    old, new = filesystem_name(source), new_filesystem_name(target)
    if old == new:
        raise FilesystemExists(new)
    if pool_of(old) != pool_of(new):
        raise PoolsDiffer(new)
    was_mounted = lzc_exists(old) and mounted(old)
    if was_mounted:
        unmount(old)
    try:
        outcome = _rename_alone(old, new, patient)
    except BaseException:
        if was_mounted:
            mount(old)
        raise
    if was_mounted:
        mount(old if outcome.cause else new)
    known: dict[Cause, Make] = {
        Cause.MISSING: FilesystemNotFound,
        Cause.EXISTS: FilesystemExists,
        Cause.NO_PARENT: ParentNotFound,
        Cause.NO_POOL: PoolsDiffer,
    }
    checked(outcome, old, "rename", known)


def _rename_alone(old: str, new: str, patient: bool) -> Outcome:
    start = run_patiently if patient else run
    if not flavour().fuse:
        return start("rename", "-u", old, new, name=old)
    return start("rename", old, new, name=old, before=lambda: _refuse_to_unmount_clones(old))


def _refuse_to_unmount_clones(name: str) -> None:
    if found := mounted_dependents(name):
        raise DatasetBusy(name).because("clones of its snapshots are mounted", found)


_HOLD_PROPERTY = "pyzfs:hold."


def lzc_hold(holds: Mapping[str, Name] | Mapping[bytes, Name], fd: int | None = None) -> list[str]:
    """Hold snapshots: ``{snapshot: tag}``. Returns the snapshots that do not exist.

    Raises HoldFailure, ``errors``: HoldExists, NameInvalid, NameTooLong. ``fd`` must be None: the command's holds
    outlive the process. zfs-fuse cannot list holds, so there each is also written down in a user property.
    """
    if fd is not None:
        raise FeatureNotSupported(None).because("holds end when they are released, not with a file descriptor")
    missing, errors = [], []
    for snap, name in holds.items():
        target, tag = _held(HoldFailure, snap, name)
        outcome = run("hold", tag, target, name=target)
        if outcome.cause is Cause.MISSING:
            missing.append(target)
        elif outcome.cause is not None:
            errors.append(failure(outcome, target, "hold snapshot", {Cause.TAG_EXISTS: HoldExists}))
        elif flavour().fuse:
            lzc_set_prop(target, _HOLD_PROPERTY + tag.encode().hex(), str(int(time.time())))
    if errors:
        raise HoldFailure(errors)
    return missing


def lzc_release(holds: Mapping[str, Iterable[Name]] | Mapping[bytes, Iterable[Name]]) -> list[str]:
    """Release holds: ``{snapshot: [tags]}``. Returns the snapshots that do not exist.

    Raises HoldReleaseFailure, ``errors``: HoldNotFound. The last release ends a snapshot destroyed with ``defer``.
    """
    missing, errors = [], []
    for snap, tags in holds.items():
        for name in tags:
            target, tag = _held(HoldReleaseFailure, snap, name)
            if flavour().fuse and lzc_exists(target):
                lzc_inherit_prop(target, _HOLD_PROPERTY + tag.encode().hex())
            outcome = run("release", tag, target, name=target)
            if outcome.cause is Cause.MISSING:
                missing.append(target)
            elif outcome.cause is not None:
                errors.append(failure(outcome, target, "release snapshot hold", {Cause.TAG_MISSING: HoldNotFound}))
    if errors:
        raise HoldReleaseFailure(errors)
    return missing


def _held(failure: type[HoldFailure] | type[HoldReleaseFailure], snap: Name, tag: Name) -> tuple[str, str]:
    try:
        target, text = snapshot_name(snap), text_of(tag)
    except (NameInvalid, NameTooLong) as error:
        raise failure([error]) from None
    if not text or text.startswith("-") or not text.isprintable():
        raise failure([NameInvalid(text)])
    if len(text.encode()) > 120:
        raise failure([NameTooLong(text)])
    return target, text


def lzc_get_holds(snapname: Name) -> dict[str, int]:
    """``{tag: when it was placed, in unix seconds}``. Raises SnapshotNotFound."""
    target = snapshot_name(snapname)
    if flavour().fuse:
        return _written_holds(target)
    outcome = checked(run("holds", "-H", target, name=target), target, "get holds", {Cause.MISSING: SnapshotNotFound})
    return {tag: _moment(when) for _, tag, when in parse_table(outcome.out, 3)}


def _written_holds(target: str) -> dict[str, int]:
    try:
        props = local_props(target)
    except DatasetNotFound:
        raise SnapshotNotFound(target) from None
    return {
        bytes.fromhex(prop.removeprefix(_HOLD_PROPERTY)).decode(): int(value)
        for prop, value in props.items()
        if prop.startswith(_HOLD_PROPERTY)
    }


def _moment(text: str) -> int:
    try:
        return int(time.mktime(time.strptime(text.strip(), "%a %b %d %H:%M %Y")))
    except ValueError:
        raise ZFSOutputError(None).because(f"{text!r} is not a time") from None


def lzc_send(
    snapname: Name,
    fromsnap: Name | None,
    fd: int,
    flags: Sequence[str] | None = None,
    *,
    seconds: float = TRANSFER_SECONDS,
) -> None:
    """Write the stream of a snapshot, or of what changed since ``fromsnap``, to ``fd``.

    Raises SnapshotNotFound, SnapshotMismatch, PoolsDiffer, NameInvalid, NameTooLong, FeatureNotSupported (``flags``).
    """
    target = snapshot_name(snapname)
    if flags:
        raise FeatureNotSupported(target).because("streams with flags cannot be read by every version")
    start = [] if fromsnap is None else ["-i", snapshot_name(fromsnap)]
    if start and pool_of(start[1]) != pool_of(target):
        raise PoolsDiffer(target)
    outcome = run("send", *start, target, stdout=fd, seconds=seconds, name=target)
    known: dict[Cause, Make] = {Cause.MISSING: SnapshotNotFound, Cause.NOT_RELATED: SnapshotMismatch}
    checked(outcome, target, "send", known)


def lzc_receive(
    snapname: Name,
    fd: int,
    force: bool = False,
    raw: bool = False,
    origin: Name | None = None,
    props: Props = None,
    *,
    seconds: float = TRANSFER_SECONDS,
) -> None:
    """Make the snapshot ``snapname`` (and its filesystem, unmounted) of the stream read from ``fd``.

    Raises DatasetExists, StreamMismatch, DestinationModified, BadStream, DatasetNotFound, NoSpace, QuotaExceeded,
    DatasetBusy; FeatureNotSupported for ``props`` and ``raw`` on zfs-fuse (it finds ``origin`` by itself).
    """
    target = new_snapshot_name(snapname)
    options = ["-u", *(["-F"] if force else [])]
    if flavour().fuse:
        if props or raw:
            raise FeatureNotSupported(target).because("zfs-fuse receives streams as they are")
        if origin is not None and not lzc_exists(snapshot_name(origin)):
            raise DatasetNotFound(text_of(origin))
    else:
        options += property_options(props)
        options += [] if origin is None else ["-o", f"origin={snapshot_name(origin)}"]
    known: dict[Cause, Make] = {
        Cause.STREAM_MISMATCH: StreamMismatch,
        Cause.MODIFIED: DestinationModified,
        Cause.BAD_STREAM: lambda _: BadStream(None),
        Cause.STREAM_TRUNCATED: lambda _: StreamTruncated(None),
    }
    checked(run("receive", *options, target, stdin=fd, seconds=seconds, name=target), target, "receive", known)
