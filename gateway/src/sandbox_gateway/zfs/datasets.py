"""Create, clone, destroy, promote and rename filesystems."""

from __future__ import annotations

from collections.abc import Mapping

from sandbox_gateway.zfs.capabilities import detect_capabilities
from sandbox_gateway.zfs.causes import Cause
from sandbox_gateway.zfs.exceptions import (
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
from sandbox_gateway.zfs.listing import lzc_exists
from sandbox_gateway.zfs.mounts import is_mounted, list_mounted_dependents, mount, unmount
from sandbox_gateway.zfs.names import Name, filesystem_name, new_filesystem_name, pool_of, snapshot_name
from sandbox_gateway.zfs.options import Props, property_options
from sandbox_gateway.zfs.outcome import ErrorFactory, Outcome, check
from sandbox_gateway.zfs.run import run, run_with_retries


def lzc_create(name: Name, ds_type: str = "zfs", props: Props = None) -> None:
    """Create a filesystem (``zfs``) or a volume (``zvol``, with the property ``volsize``).

    If the filesystem cannot be mounted, destroys it and raises MountFailed. Also raises FilesystemExists,
    ParentNotFound, PropertyInvalid, NameInvalid, NameTooLong, NoSpace, QuotaExceeded.
    """
    target = new_filesystem_name(name)
    options = property_options(props)
    if ds_type == "zvol":
        options = ["-V", _volume_size(target, options), *_remove_option(options, "volsize")]
    elif ds_type != "zfs":
        raise DatasetTypeInvalid(ds_type)
    outcome = run("create", *options, target, name=target)
    _check_created(outcome, target, "create filesystem", dict.fromkeys(_NO_PARENT, ParentNotFound))


_NO_PARENT = (Cause.NO_PARENT, Cause.NO_POOL, Cause.MISSING)


def _volume_size(target: str, options: list[str]) -> str:
    sizes = [word.partition("=")[2] for word in options if word.startswith("volsize=")]
    if not sizes:
        raise PropertyInvalid(target).with_details("a volume needs the property volsize")
    return sizes[0]


def _remove_option(options: list[str], prop: str) -> list[str]:
    pairs = zip(options[::2], options[1::2], strict=True)
    return [word for pair in pairs if not pair[1].startswith(f"{prop}=") for word in pair]


def _check_created(outcome: Outcome, target: str, action: str, specific: Mapping[Cause, ErrorFactory]) -> None:
    if outcome.cause in (Cause.MOUNT_FAILED, Cause.MOUNT_BUSY):
        run_with_retries("destroy", target, name=target)
    check(outcome, target, action, {Cause.EXISTS: FilesystemExists, Cause.MOUNT_BUSY: MountFailed, **specific})


def lzc_clone(name: Name, origin: Name, props: Props = None) -> None:
    """Clone the snapshot ``origin`` as the filesystem ``name``.

    If the clone cannot be mounted, destroys it and raises MountFailed. Raises DatasetNotFound for ``origin`` and the
    parent of ``name``. Also raises FilesystemExists, PoolsDiffer, PropertyInvalid, NameInvalid, NameTooLong, NoSpace,
    QuotaExceeded.
    """
    target, source = new_filesystem_name(name), snapshot_name(origin)
    if pool_of(target) != pool_of(source):
        raise PoolsDiffer(target)
    outcome = run("clone", *property_options(props), source, target, name=target)
    _check_created(outcome, target, "create clone", {})


def lzc_destroy(name: Name) -> None:
    """Unmount and destroy one filesystem, which must not have snapshots, children or clones.

    Raises FilesystemNotFound, DatasetBusy (``related``: its snapshots, children and clones), NameInvalid, NameTooLong.
    """
    target = filesystem_name(name)
    outcome = run_with_retries("destroy", target, name=target)
    specific: dict[Cause, ErrorFactory] = {
        Cause.MISSING: FilesystemNotFound,
        Cause.HAS_CHILDREN: DatasetBusy,
        Cause.HAS_CLONES: DatasetBusy,
    }
    check(outcome, target, "destroy", specific)


def lzc_promote(name: Name) -> None:
    """Move a clone's origin, and the snapshots before it, to the clone.

    Raises SnapshotExists if both filesystems have a snapshot with the same name. Also raises NotClone,
    FilesystemNotFound, NoSpace, QuotaExceeded.
    """
    target = filesystem_name(name)
    specific: dict[Cause, ErrorFactory] = {
        Cause.NOT_CLONE: NotClone,
        Cause.SNAPSHOT_CONFLICT: SnapshotExists,
        Cause.EXISTS: SnapshotExists,
        Cause.MISSING: FilesystemNotFound,
    }
    check(run_with_retries("promote", target, name=target), target, "promote", specific)


def lzc_rename(source: Name, target: Name, *, retry: bool = True) -> None:
    """Rename a filesystem without unmounting others. If the filesystem is mounted, unmount it and mount it again.

    By default, `zfs rename` also unmounts all clones of the filesystem's snapshots, and may fail to mount them again.
    If ZFS has no option to prevent that (``rename_without_unmount``), mounted clones cause DatasetBusy
    (``related``: the clones). Unless ``retry``, DatasetBusy is raised immediately.

    Raises FilesystemNotFound, FilesystemExists, ParentNotFound, PoolsDiffer, DatasetBusy, NameInvalid, NameTooLong.
    """
    old, new = filesystem_name(source), new_filesystem_name(target)
    if old == new:
        raise FilesystemExists(new)
    if pool_of(old) != pool_of(new):
        raise PoolsDiffer(new)
    was_mounted = lzc_exists(old) and is_mounted(old)
    if was_mounted:
        unmount(old)
    try:
        outcome = _rename_dataset(old, new, retry)
    except BaseException:
        if was_mounted:
            mount(old)
        raise
    if was_mounted:
        mount(old if outcome.cause else new)
    specific: dict[Cause, ErrorFactory] = {
        Cause.MISSING: FilesystemNotFound,
        Cause.EXISTS: FilesystemExists,
        Cause.NO_PARENT: ParentNotFound,
        Cause.NO_POOL: PoolsDiffer,
    }
    check(outcome, old, "rename", specific)


def _rename_dataset(old: str, new: str, retry: bool) -> Outcome:
    rename = run_with_retries if retry else run
    if detect_capabilities().rename_without_unmount:
        return rename("rename", "-u", old, new, name=old)
    return rename("rename", old, new, name=old, before=lambda: _check_no_mounted_clones(old))


def _check_no_mounted_clones(name: str) -> None:
    if clones := list_mounted_dependents(name):
        raise DatasetBusy(name).with_details("clones of its snapshots are mounted", clones)
