"""List datasets, snapshots and clones."""

from __future__ import annotations

from zfs_core.causes import Cause
from zfs_core.exceptions import FilesystemNotFound, NameInvalid, NameTooLong, ZFSInitializationFailed
from zfs_core.names import (
    Name,
    filesystem_of,
    pool_of,
    validate_existing_name,
    validate_filesystem_name,
    validate_snapshot_name,
)
from zfs_core.outcome import check, error_of
from zfs_core.parse import parse_table
from zfs_core.run import run


def check_reachable() -> None:
    """Raise ZFSInitializationFailed, with the remedy, if ZFS cannot be reached."""
    outcome = run("list", "-H", "-d", "0", "-o", "name")
    if outcome.cause not in (None, Cause.MISSING):
        raise ZFSInitializationFailed(None).with_details(f"{outcome.message}; check that ZFS is installed and running")


def lzc_exists(name: Name) -> bool:
    """Return whether a filesystem, volume or snapshot exists. Returns False for an invalid name."""
    try:
        target = validate_existing_name(name)
    except (NameInvalid, NameTooLong):
        return False
    outcome = run("get", "-H", "-o", "value", "type", target, name=target)
    if outcome.cause in (None, Cause.MISSING, Cause.NAME_INVALID, Cause.NO_POOL, Cause.NAME_TOO_LONG):
        return outcome.cause is None
    raise error_of(outcome, target, "look up dataset")


def list_datasets(root: Name, *, types: str = "filesystem", depth: int | None = None) -> list[str]:
    """Return the names of ``root`` and the datasets below it. Raises DatasetNotFound.

    ``types``: one or more of ``filesystem``, ``snapshot`` and ``volume``, separated by commas. ``depth``: how many
    levels below ``root`` to list.
    """
    target = validate_existing_name(root)
    options = ["-r"] if depth is None else ["-d", str(depth)]
    outcome = run("list", "-H", *options, "-t", types, "-o", "name", target, name=target)
    return [name for (name,) in parse_table(check(outcome, target, "list").output, 1)]


def list_snapshots(filesystem: Name) -> list[str]:
    """Return the full names of a filesystem's own snapshots, oldest first. Raises FilesystemNotFound."""
    target = validate_filesystem_name(filesystem)
    outcome = run("list", "-H", "-t", "snapshot", "-d", "1", "-s", "createtxg", "-o", "name", target, name=target)
    # If there are no snapshots, OpenZFS may print a message on standard error and still succeed.
    rows = parse_table(check(outcome, target, "list snapshots", {Cause.MISSING: FilesystemNotFound}).output, 1)
    return [name for (name,) in rows if filesystem_of(name) == target]


def list_clones(snap: Name) -> list[str]:
    """Return the clones of a snapshot. Compares ``origin``, because zfs-fuse lacks the property ``clones``."""
    target = validate_snapshot_name(snap)
    pool = pool_of(target)
    outcome = check(run("list", "-H", "-r", "-t", "filesystem", "-o", "name,origin", pool, name=pool), pool, "list")
    return [name for name, origin in parse_table(outcome.output, 2) if origin == target]
