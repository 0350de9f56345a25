"""Create, clone, destroy, promote and rename filesystems and volumes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.encryption import open_key, require_encryption, split_key_location
from zfs_core.exceptions import (
    DatasetBusy,
    DatasetNotFound,
    DatasetTypeInvalid,
    FilesystemExists,
    FilesystemNotFound,
    MountFailed,
    NameTooLong,
    NotClone,
    ParentNotFound,
    PoolsDiffer,
    PropertyInvalid,
    SnapshotExists,
    WrongParent,
    ZFSError,
)
from zfs_core.listing import list_snapshots, lzc_exists
from zfs_core.mounts import is_mounted, list_mounted_dependents, mount, unmount
from zfs_core.names import (
    Name,
    accepts_bytes,
    get_filesystem_name,
    get_pool_name,
    get_short_name,
    is_too_long,
    validate_filesystem_name,
    validate_new_filesystem_name,
    validate_snapshot_name,
)
from zfs_core.options import Props, format_property_options
from zfs_core.outcome import ErrorFactory, Outcome, check
from zfs_core.properties import get_props, lzc_set_prop
from zfs_core.run import run, run_with_retries


@accepts_bytes
def lzc_create(
    name: Name, ds_type: str = "zfs", props: Props = None, key: bytes | None = None, *, mounted: bool = False
) -> None:
    """Create a filesystem (``zfs``) or a volume (``zvol``, with the property ``volsize``).

    ``key``: the encryption key, if the properties make this an encryption root (see ``zfs_core.encryption``).

    ``mounted``: mount the filesystem, if its ``canmount`` and ``mountpoint`` allow this. If that fails, the filesystem
    is destroyed and MountFailed is raised.

    Raises FilesystemExists, ParentNotFound, WrongParent, PropertyInvalid, DatasetTypeInvalid, NameInvalid, NameTooLong,
    NoSpace, QuotaExceeded. Command: ``zfs create -u NAME``, or ``zfs create -s -V SIZE NAME``.
    """
    if ds_type not in ("zfs", "zvol"):
        raise DatasetTypeInvalid(ds_type)
    target = validate_new_filesystem_name(name)
    options, key_location = format_property_options(props), None
    if key is not None:
        require_encryption("lzc_create")
        options, key_location = split_key_location(options)
    if ds_type == "zvol":
        if not detect_capabilities().volumes:
            raise NotImplementedError("lzc_create: this version of ZFS does not support volumes")
        options = ["-s", "-V", _get_volume_size(target, options), *_remove_option(options, "volsize")]
    elif not mounted and detect_capabilities().create_unmounted:
        options = ["-u", *options]
    with open_key(key, options) as stdin:
        outcome = run("create", *options, target, name=target, stdin=stdin)
    is_as_requested = mounted or options[:1] in (["-u"], ["-s"]) or _is_not_mounted_automatically(options)
    specific_errors = dict.fromkeys(_NO_PARENT_CAUSES, ParentNotFound)
    _check_creation(outcome, target, "create filesystem", specific_errors, is_as_requested)
    if key_location is not None:
        _set_key_location(target, key_location)


_NO_PARENT_CAUSES = (Cause.NO_PARENT, Cause.NO_POOL, Cause.MISSING)


def _get_volume_size(target: str, options: list[str]) -> str:
    sizes = [word.partition("=")[2] for word in options if word.startswith("volsize=")]
    if not sizes:
        raise PropertyInvalid(target).with_details("the volsize property is missing: set it to the size of the volume")
    return sizes[0]


def _remove_option(options: list[str], prop: str) -> list[str]:
    pairs = zip(options[::2], options[1::2], strict=True)
    return [word for pair in pairs if not pair[1].startswith(f"{prop}=") for word in pair]


def _is_not_mounted_automatically(options: list[str]) -> bool:
    return "canmount=noauto" in options or "canmount=off" in options


def _set_key_location(target: str, key_location: str) -> None:
    try:
        lzc_set_prop(target, "keylocation", key_location)
    except ZFSError:
        run_with_retries("destroy", target, name=target)
        raise


def _check_creation(
    outcome: Outcome,
    target: str,
    action: str,
    specific_errors: Mapping[Cause, ErrorFactory],
    keep_mounted: bool,
) -> None:
    """Raise the error of a failed command. Unless ``keep_mounted``, unmount the new filesystem if it was mounted."""
    if outcome.cause in (Cause.MOUNT_FAILED, Cause.MOUNT_BUSY):
        if not keep_mounted:
            return
        run_with_retries("destroy", target, name=target)
    check(outcome, target, action, {Cause.EXISTS: FilesystemExists, Cause.MOUNT_BUSY: MountFailed, **specific_errors})
    if not keep_mounted and get_props([target], ["mounted"])[target]["mounted"].is_on:
        unmount(target)


@accepts_bytes
def lzc_clone(name: Name, origin: Name, props: Props = None, *, mounted: bool = False) -> None:
    """Clone the snapshot ``origin`` as the filesystem or volume ``name``. ``mounted`` is as in ``lzc_create``.

    Raises DatasetNotFound if ``origin`` or the parent of ``name`` does not exist. Also raises FilesystemExists,
    PoolsDiffer, WrongParent, PropertyInvalid, FilesystemNameInvalid, SnapshotNameInvalid, NameTooLong, NoSpace,
    QuotaExceeded. Command: ``zfs clone ORIGIN NAME``.
    """
    target, source = validate_new_filesystem_name(name), validate_snapshot_name(origin)
    if get_pool_name(target) != get_pool_name(source):
        raise PoolsDiffer(target) if lzc_exists(get_pool_name(target)) else DatasetNotFound(target)
    options = format_property_options(props)
    outcome = run("clone", *options, source, target, name=target)
    _check_creation(outcome, target, "create clone", {}, mounted or _is_not_mounted_automatically(options))


@accepts_bytes
def lzc_destroy(name: Name, *, unmounted: bool = False) -> None:
    """Destroy one filesystem or volume, which must not have snapshots, children or clones, and must not be mounted.

    ``unmounted``: unmount it first.

    Raises FilesystemNotFound, DatasetBusy (``related``: its snapshots, children and clones), NameInvalid, NameTooLong.
    Command: ``zfs destroy NAME``.
    """
    target = validate_filesystem_name(name)
    if not unmounted:
        with suppress(DatasetNotFound):
            if is_mounted(target):
                raise DatasetBusy(target).with_details("it is mounted: unmount it first")
    outcome = run_with_retries("destroy", target, name=target)
    specific_errors: dict[Cause, ErrorFactory] = {
        Cause.MISSING: FilesystemNotFound,
        Cause.HAS_CHILDREN: DatasetBusy,
        Cause.HAS_CLONES: DatasetBusy,
    }
    check(outcome, target, "destroy", specific_errors)


@accepts_bytes
def lzc_promote(name: Name) -> None:
    """Promote a clone, which moves its origin and all earlier snapshots to it.

    Raises SnapshotExists if both filesystems have a snapshot with the same name, and NameTooLong if the name of one of
    these snapshots would be too long. Also raises NotClone, FilesystemNotFound, NoSpace, QuotaExceeded. Command:
    ``zfs promote NAME``.
    """
    target = validate_filesystem_name(name)
    specific_errors: dict[Cause, ErrorFactory] = {
        Cause.NOT_CLONE: NotClone,
        Cause.SNAPSHOT_CONFLICT: SnapshotExists,
        Cause.EXISTS: SnapshotExists,
        Cause.MISSING: FilesystemNotFound,
    }
    outcome = run_with_retries("promote", target, name=target)
    if outcome.cause in (Cause.OTHER, Cause.IO_ERROR) and _would_be_too_long(target):
        raise outcome.explain(NameTooLong(target))
    check(outcome, target, "promote", specific_errors)


def _would_be_too_long(target: str) -> bool:
    """Return whether a snapshot of the clone's origin would have a name that is too long after the promotion."""
    origin = get_props([target], ["origin"])[target]["origin"].value
    snapshots = list_snapshots(get_filesystem_name(origin)) if "@" in origin else []
    return any(is_too_long(f"{target}@{get_short_name(snapshot)}") for snapshot in snapshots)


@accepts_bytes
def lzc_rename(source: Name, target: Name, *, remounted: bool = False, retry: bool = True) -> None:
    """Rename a filesystem or volume without unmounting other filesystems.

    A mounted filesystem stays mounted where it is, but zfs-fuse mounts it again at the mount point that its new name
    implies. ``remounted``: mount it at that mount point in every version of ZFS.

    By default, `zfs rename` also unmounts all clones of the filesystem's snapshots, and may fail to mount them again.
    If ZFS has no option to prevent that (``rename_without_unmount``), mounted clones cause DatasetBusy
    (``related``: the clones). If ``retry`` is false, DatasetBusy is raised without retrying.

    Raises FilesystemNotFound if ``source`` or the parent of ``target`` does not exist. Also raises FilesystemExists,
    PoolsDiffer, WrongParent, DatasetBusy, NameInvalid, NameTooLong. Command: ``zfs rename -u SOURCE TARGET``.
    """
    old_name, new_name = validate_filesystem_name(source), validate_new_filesystem_name(target)
    if old_name == new_name:
        raise FilesystemExists(new_name)
    if get_pool_name(old_name) != get_pool_name(new_name):
        raise PoolsDiffer(old_name)
    must_remount = remounted or not detect_capabilities().rename_without_unmount
    was_mounted = must_remount and lzc_exists(old_name) and is_mounted(old_name)
    if was_mounted:
        unmount(old_name)
    try:
        outcome = _rename_dataset(old_name, new_name, retry)
    except BaseException:
        if was_mounted:
            mount(old_name)
        raise
    if was_mounted:
        mount(old_name if outcome.cause else new_name)
    specific_errors: dict[Cause, ErrorFactory] = {
        Cause.MISSING: FilesystemNotFound,
        Cause.EXISTS: lambda _: FilesystemExists(new_name),
        Cause.NO_PARENT: FilesystemNotFound,
        Cause.NO_POOL: PoolsDiffer,
        Cause.WRONG_PARENT: lambda _: WrongParent(new_name),
    }
    check(outcome, old_name, "rename", specific_errors)


def _rename_dataset(old_name: str, new_name: str, retry: bool) -> Outcome:
    run_rename = run_with_retries if retry else run
    if detect_capabilities().rename_without_unmount:
        return run_rename("rename", "-u", old_name, new_name, name=old_name)
    return run_rename("rename", old_name, new_name, name=old_name, precheck=partial(_check_no_mounted_clones, old_name))


def _check_no_mounted_clones(name: str, seconds: float) -> None:
    if clones := list_mounted_dependents(name, seconds):
        raise DatasetBusy(name).with_details("clones of its snapshots are mounted: unmount them first", clones)
