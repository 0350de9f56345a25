"""List datasets, snapshots and clones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import NoReturn

from zfs_core.causes import Cause
from zfs_core.exceptions import FilesystemNotFound, NameInvalid, NameTooLong, ZFSInitializationFailed
from zfs_core.names import (
    Name,
    accepts_bytes,
    get_filesystem_name,
    get_pool_name,
    is_snapshot_name,
    validate_existing_name,
    validate_filesystem_name,
    validate_snapshot_name,
)
from zfs_core.outcome import check, make_error
from zfs_core.parse import parse_table
from zfs_core.run import run

_NAMES_PER_COMMAND = 400
"""All systems allow 400 names of 255 bytes in the arguments of a command, even as one argument."""
COMPARISON_PREFIX = "zfs_core-compare-"
"""Prefix of the names of the temporary snapshots that ``has_changed_since`` takes and destroys."""


def check_reachable() -> None:
    """Raise ZFSInitializationFailed, with the remedy, if ZFS cannot be reached."""
    outcome = run("list", "-H", "-d", "0", "-o", "name")
    if outcome.cause not in (None, Cause.MISSING):
        raise ZFSInitializationFailed().with_details(f"{outcome.message}; check that ZFS is installed and running")


def lzc_exists(name: Name) -> bool:
    """Return whether a filesystem, volume or snapshot exists. Returns False for an invalid name.

    Command: ``zfs get type NAME``.
    """
    try:
        target = validate_existing_name(name)
    except (NameInvalid, NameTooLong):
        return False
    outcome = run("get", "-H", "-o", "value", "type", target, name=target)
    if outcome.cause in (None, Cause.MISSING, Cause.NAME_INVALID, Cause.NO_POOL, Cause.NAME_TOO_LONG):
        return outcome.cause is None
    raise make_error(outcome, target, "look up dataset")


def find_types(names: Iterable[str]) -> dict[str, str]:
    """Return ``{name: type}`` for the datasets, snapshots and bookmarks among ``names`` that exist.

    A type is ``filesystem``, ``volume``, ``snapshot`` or ``bookmark``.
    """
    return _find_values(names, "type", must_succeed=False)


def find_hold_counts(snaps: Iterable[str]) -> dict[str, str]:
    """Return ``{name: number of holds}`` for the snapshots among ``snaps`` that exist."""
    return _find_values(snaps, "userrefs", must_succeed=True)


def _find_values(names: Iterable[str], prop: str, *, must_succeed: bool) -> dict[str, str]:
    values: dict[str, str] = {}
    for batch in split_names(dict.fromkeys(names)):
        values |= _find_values_of_batch(batch, prop, must_succeed=must_succeed)
    return values


def split_names(names: Iterable[str]) -> Iterator[list[str]]:
    """Split names into lists that fit into one command."""
    iterator = iter(names)
    while batch := list(islice(iterator, _NAMES_PER_COMMAND)):
        yield batch


def _find_values_of_batch(names: list[str], prop: str, *, must_succeed: bool) -> dict[str, str]:
    outcome = run("get", "-H", "-o", "name,value", prop, *names, name=names[0])
    if outcome.cause not in (None, Cause.MISSING, Cause.NO_POOL):
        if len(names) > 1:  # One invalid name must not hide the values of the other names.
            values: dict[str, str] = {}
            for name in names:
                values |= _find_values_of_batch([name], prop, must_succeed=must_succeed)
            return values
        if must_succeed and outcome.cause not in (Cause.NAME_INVALID, Cause.NAME_TOO_LONG):
            raise make_error(outcome, names[0], f"get the property {prop}")
        return {}
    return {name: value for name, value in parse_table(outcome.output, 2) if name in names}


@accepts_bytes
def lzc_list_children(name: Name) -> Iterator[str]:
    """Iterate over the names of a dataset's direct children. A snapshot has none.

    Raises DatasetNotFound, NameInvalid, NameTooLong. Command: ``zfs list -d 1 -t filesystem,volume NAME``.
    """
    return _list_below(name, "filesystem,volume")


@accepts_bytes
def lzc_list_snaps(name: Name) -> Iterator[str]:
    """Iterate over the full names of a dataset's own snapshots, oldest first. A snapshot has none.

    Raises DatasetNotFound, NameInvalid, NameTooLong. Command: ``zfs list -d 1 -t snapshot -s createtxg NAME``.
    """
    return _list_below(name, "snapshot")


def _list_below(name: Name, types: str) -> Iterator[str]:
    target = validate_existing_name(name)
    if is_snapshot_name(target):
        return iter(())
    outcome = run("list", "-H", "-d", "1", "-t", types, "-s", "createtxg", "-o", "name", target, name=target)
    rows = parse_table(check(outcome, target, "list").output, 1)
    return iter([child for (child,) in rows if child != target])


def lzc_list(name: Name, options: object) -> NoReturn:
    """Raise NotImplementedError, because the result would be a pipe to which the kernel writes binary records."""
    raise NotImplementedError(
        "lzc_list returns a pipe to which the kernel writes: use lzc_list_children or lzc_list_snaps"
    )


def list_datasets(root: Name, *, types: str = "filesystem", depth: int | None = None) -> list[str]:
    """Return the names of ``root`` and its descendants. Raises DatasetNotFound.

    ``types``: one or more of ``filesystem``, ``snapshot`` and ``volume``, separated by commas. ``depth``: how many
    levels of descendants to list.
    """
    target = validate_existing_name(root)
    options = ["-r"] if depth is None else ["-d", str(depth)]
    outcome = run("list", "-H", *options, "-t", types, "-o", "name", target, name=target)
    return [name for (name,) in parse_table(check(outcome, target, "list").output, 1)]


def list_snapshots(filesystem: Name) -> list[str]:
    """Return the full names of a filesystem's own snapshots, oldest first. Raises FilesystemNotFound.

    Omits the temporary snapshots of ``has_changed_since``.
    """
    target = validate_filesystem_name(filesystem)
    outcome = run("list", "-H", "-t", "snapshot", "-d", "1", "-s", "createtxg", "-o", "name", target, name=target)
    # If there are no snapshots, OpenZFS may print a message on standard error and still succeed.
    rows = parse_table(check(outcome, target, "list snapshots", {Cause.MISSING: FilesystemNotFound}).output, 1)
    return [name for (name,) in rows if get_filesystem_name(name) == target and not is_comparison_snapshot(name)]


def is_comparison_snapshot(name: str) -> bool:
    """Return whether the dataset or snapshot ``name`` is a temporary snapshot of ``has_changed_since``."""
    return name.partition("@")[2].startswith(COMPARISON_PREFIX)


def list_clones(snap: Name) -> list[str]:
    """Return the clones of a snapshot, which are filesystems or volumes."""
    target = validate_snapshot_name(snap)
    return list_clones_by_origin([target])[target]


def list_clones_by_origin(snaps: Collection[str]) -> dict[str, list[str]]:
    """Return ``{snapshot: clones}``, with one command for each pool.

    Compares ``origin``, because zfs-fuse lacks the property ``clones``.
    """
    clones: dict[str, list[str]] = {snap: [] for snap in snaps}
    for pool in {get_pool_name(snap) for snap in snaps}:
        outcome = run("list", "-H", "-r", "-t", "filesystem,volume", "-o", "name,origin", pool, name=pool)
        for name, origin in parse_table(check(outcome, pool, "list").output, 2):
            if origin in clones:
                clones[origin].append(name)
    return clones
