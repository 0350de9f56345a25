"""Mount and unmount filesystems."""

from __future__ import annotations

from sandbox_gateway.zfs.causes import Cause
from sandbox_gateway.zfs.exceptions import FilesystemNotFound
from sandbox_gateway.zfs.names import Name, filesystem_name, pool_of
from sandbox_gateway.zfs.outcome import check
from sandbox_gateway.zfs.parse import parse_table
from sandbox_gateway.zfs.properties import get_props
from sandbox_gateway.zfs.run import run, run_with_retries


def is_mounted(name: Name) -> bool:
    target = filesystem_name(name)
    return get_props([target], ["mounted"])[target]["mounted"].is_on


def list_mounted_dependents(name: Name) -> list[str]:
    """Return the mounted filesystems that depend on this one: those below it and clones of snapshots, recursively."""
    target = filesystem_name(name)
    pool = pool_of(target)
    argv = ("list", "-H", "-r", "-t", "filesystem", "-o", "name,origin,mounted", pool)
    rows = parse_table(check(run(*argv, name=pool), pool, "list").output, 3)
    dependents = {target}
    while (
        new := {
            each
            for each, origin, _ in rows
            if origin.partition("@")[0] in dependents or each.rpartition("/")[0] in dependents
        }
        - dependents
    ):
        dependents |= new
    return [each for each, _, state in rows if state == "yes" and each in dependents and each != target]


def mount(name: Name) -> None:
    """Mount a filesystem at its ``mountpoint``, unless it is already mounted.

    Raises DatasetBusy if it is still in use after several attempts. Also raises MountFailed, FilesystemNotFound.
    """
    target = filesystem_name(name)
    outcome = run_with_retries("mount", target, name=target)
    if outcome.cause is not Cause.ALREADY_MOUNTED:
        check(outcome, target, "mount", {Cause.MISSING: FilesystemNotFound})


def unmount(name: Name) -> None:
    """Unmount a filesystem if it is mounted. Raises DatasetBusy if its files are in use, and FilesystemNotFound."""
    target = filesystem_name(name)
    outcome = run_with_retries("unmount", target, name=target)
    if outcome.cause is not Cause.NOT_MOUNTED:
        check(outcome, target, "unmount", {Cause.MISSING: FilesystemNotFound})
