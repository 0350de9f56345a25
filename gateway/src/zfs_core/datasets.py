"""Create, clone, destroy, promote and rename filesystems."""

from __future__ import annotations

from collections.abc import Mapping

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.exceptions import (
    DatasetBusy,
    DatasetTypeInvalid,
    FilesystemExists,
    FilesystemNotFound,
    MountFailed,
    NotClone,
    ParentNotFound,
    PoolsDiffer,
    PropertyInvalid,
    SnapshotExists,
)
from zfs_core.listing import lzc_exists
from zfs_core.mounts import is_mounted, list_mounted_dependents, mount, unmount
from zfs_core.names import (
    Name,
    pool_of,
    validate_filesystem_name,
    validate_new_filesystem_name,
    validate_snapshot_name,
)
from zfs_core.options import Props, format_property_options
from zfs_core.outcome import ErrorFactory, Outcome, check
from zfs_core.run import run, run_with_retries


def lzc_create(name: Name, ds_type: str = "zfs", props: Props = None) -> None:
    """Create a filesystem (``zfs``) or a volume (``zvol``, with the property ``volsize``).

    If the filesystem cannot be mounted, it is destroyed and MountFailed is raised. Also raises FilesystemExists,
    ParentNotFound, PropertyInvalid, NameInvalid, NameTooLong, NoSpace, QuotaExceeded.
    """
    target = validate_new_filesystem_name(name)
    options = format_property_options(props)
    if ds_type == "zvol":
        options = ["-V", _get_volume_size(target, options), *_remove_option(options, "volsize")]
    elif ds_type != "zfs":
        raise DatasetTypeInvalid(ds_type)
    outcome = run("create", *options, target, name=target)
    _check_created(outcome, target, "create filesystem", dict.fromkeys(_NO_PARENT_CAUSES, ParentNotFound))


_NO_PARENT_CAUSES = (Cause.NO_PARENT, Cause.NO_POOL, Cause.MISSING)


def _get_volume_size(target: str, options: list[str]) -> str:
    sizes = [word.partition("=")[2] for word in options if word.startswith("volsize=")]
    if not sizes:
        raise PropertyInvalid(target).with_details("the volsize property is missing: set it to the size of the volume")
    return sizes[0]


def _remove_option(options: list[str], prop: str) -> list[str]:
    pairs = zip(options[::2], options[1::2], strict=True)
    return [word for pair in pairs if not pair[1].startswith(f"{prop}=") for word in pair]


def _check_created(outcome: Outcome, target: str, action: str, specific_errors: Mapping[Cause, ErrorFactory]) -> None:
    if outcome.cause in (Cause.MOUNT_FAILED, Cause.MOUNT_BUSY):
        run_with_retries("destroy", target, name=target)
    check(outcome, target, action, {Cause.EXISTS: FilesystemExists, Cause.MOUNT_BUSY: MountFailed, **specific_errors})


def lzc_clone(name: Name, origin: Name, props: Props = None) -> None:
    """Clone the snapshot ``origin`` as the filesystem ``name``.

    If the clone cannot be mounted, it is destroyed and MountFailed is raised. Raises DatasetNotFound if ``origin`` or
    the parent of ``name`` does not exist. Also raises FilesystemExists, PoolsDiffer, PropertyInvalid, NameInvalid,
    NameTooLong, NoSpace, QuotaExceeded.
    """
    target, source = validate_new_filesystem_name(name), validate_snapshot_name(origin)
    if pool_of(target) != pool_of(source):
        raise PoolsDiffer(target)
    outcome = run("clone", *format_property_options(props), source, target, name=target)
    _check_created(outcome, target, "create clone", {})


def lzc_destroy(name: Name) -> None:
    """Unmount and destroy one filesystem, which must not have snapshots, children or clones.

    Raises FilesystemNotFound, DatasetBusy (``related``: its snapshots, children and clones), NameInvalid, NameTooLong.
    """
    target = validate_filesystem_name(name)
    outcome = run_with_retries("destroy", target, name=target)
    specific_errors: dict[Cause, ErrorFactory] = {
        Cause.MISSING: FilesystemNotFound,
        Cause.HAS_CHILDREN: DatasetBusy,
        Cause.HAS_CLONES: DatasetBusy,
    }
    check(outcome, target, "destroy", specific_errors)


def lzc_promote(name: Name) -> None:
    """Promote a clone, which moves its origin and all earlier snapshots to it.

    Raises SnapshotExists if both filesystems have a snapshot with the same name. Also raises NotClone,
    FilesystemNotFound, NoSpace, QuotaExceeded.
    """
    target = validate_filesystem_name(name)
    specific_errors: dict[Cause, ErrorFactory] = {
        Cause.NOT_CLONE: NotClone,
        Cause.SNAPSHOT_CONFLICT: SnapshotExists,
        Cause.EXISTS: SnapshotExists,
        Cause.MISSING: FilesystemNotFound,
    }
    check(run_with_retries("promote", target, name=target), target, "promote", specific_errors)


def lzc_rename(source: Name, target: Name, *, retry: bool = True) -> None:
    """Rename a filesystem without unmounting others. If the filesystem is mounted, remount it under its new name.

    By default, `zfs rename` also unmounts all clones of the filesystem's snapshots, and may fail to mount them again.
    If ZFS has no option to prevent that (``rename_without_unmount``), mounted clones cause DatasetBusy
    (``related``: the clones). If ``retry`` is false, DatasetBusy is raised without retrying.

    Raises FilesystemNotFound, FilesystemExists, ParentNotFound, PoolsDiffer, DatasetBusy, NameInvalid, NameTooLong.
    """
    old_name, new_name = validate_filesystem_name(source), validate_new_filesystem_name(target)
    if old_name == new_name:
        raise FilesystemExists(new_name)
    if pool_of(old_name) != pool_of(new_name):
        raise PoolsDiffer(new_name)
    was_mounted = lzc_exists(old_name) and is_mounted(old_name)
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
        Cause.EXISTS: FilesystemExists,
        Cause.NO_PARENT: ParentNotFound,
        Cause.NO_POOL: PoolsDiffer,
    }
    check(outcome, old_name, "rename", specific_errors)


def _rename_dataset(old_name: str, new_name: str, retry: bool) -> Outcome:
    run_rename = run_with_retries if retry else run
    if detect_capabilities().rename_without_unmount:
        return run_rename("rename", "-u", old_name, new_name, name=old_name)
    return run_rename("rename", old_name, new_name, name=old_name, precheck=lambda: _check_no_mounted_clones(old_name))


def _check_no_mounted_clones(name: str) -> None:
    if clones := list_mounted_dependents(name):
        raise DatasetBusy(name).with_details("clones of its snapshots are mounted: unmount them first", clones)
