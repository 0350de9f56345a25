"""Mount and unmount filesystems."""

from __future__ import annotations

from zfs_core.causes import Cause
from zfs_core.exceptions import FilesystemNotFound
from zfs_core.names import Name, get_pool_name, validate_filesystem_name
from zfs_core.outcome import check
from zfs_core.parse import parse_table
from zfs_core.properties import get_props
from zfs_core.run import run, run_with_retries


def is_mounted(name: Name) -> bool:
    target = validate_filesystem_name(name)
    return get_props([target], ["mounted"])[target]["mounted"].is_on


def list_mounted_dependents(name: Name, seconds: float | None = None) -> list[str]:
    """Return the mounted filesystems that depend on this one, directly or indirectly. ``seconds``: the timeout.

    A filesystem depends on its parent, and on the filesystem that it was cloned from.
    """
    target = validate_filesystem_name(name)
    pool = get_pool_name(target)
    args = ("list", "-H", "-r", "-t", "filesystem", "-o", "name,origin,mounted", pool)
    rows = parse_table(check(run(*args, seconds=seconds, name=pool), pool, "list").output, 3)
    dependents = {target}
    while (
        new_dependents := {
            each
            for each, origin, _ in rows
            if origin.partition("@")[0] in dependents or each.rpartition("/")[0] in dependents
        }
        - dependents
    ):
        dependents |= new_dependents
    return [each for each, _, state in rows if state == "yes" and each in dependents and each != target]


def mount(name: Name) -> None:
    """Mount a filesystem at its ``mountpoint``, unless it is already mounted.

    Raises DatasetBusy if its mount point is still in use after several attempts. Also raises MountFailed and
    FilesystemNotFound.
    """
    target = validate_filesystem_name(name)
    outcome = run_with_retries("mount", target, name=target)
    if outcome.cause is not Cause.ALREADY_MOUNTED:
        check(outcome, target, "mount", {Cause.MISSING: FilesystemNotFound})


def unmount(name: Name) -> None:
    """Unmount a filesystem if it is mounted. Raises DatasetBusy if its files are in use.

    Also raises FilesystemNotFound.
    """
    target = validate_filesystem_name(name)
    outcome = run_with_retries("unmount", target, name=target)
    if outcome.cause is not Cause.NOT_MOUNTED:
        check(outcome, target, "unmount", {Cause.MISSING: FilesystemNotFound})
