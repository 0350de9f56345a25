"""Look up the current state, which commands compare with the desired one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zfs_core.cli.failures import CommandError, Kind
from zfs_core.cli.report import Report
from zfs_core.listing import find_types, list_datasets
from zfs_core.names import get_filesystem_name
from zfs_core.properties import get_props


def get_value(name: str, prop: str) -> str:
    return get_props([name], [prop])[name][prop].value


def require_existing(report: Report, *names: str) -> None:
    """Raise CommandError if any of the names does not exist."""
    found_names = report.find(names)
    if missing_names := [name for name in names if name not in found_names]:
        raise CommandError(
            Kind.NOT_FOUND,
            f"not found: {quote(missing_names)}. Run lzc list POOL to see the names",
            missing_names,
        )


def require_parent(report: Report, name: str) -> None:
    parent = name.rpartition("/")[0]
    if not parent:
        raise CommandError(Kind.INVALID, f"{name!r} is the name of a pool: use zpool create, or a name inside a pool")
    if not report.exists(parent):
        raise CommandError(
            Kind.NOT_FOUND, f"the parent of {name!r} does not exist: create it with lzc create --parents", [parent]
        )


def expand(snapshots: Iterable[str]) -> list[str]:
    """Return the snapshots, and the snapshots with the same short names of all descendant filesystems and volumes."""
    names = list(snapshots)
    filesystems = find_types(map(get_filesystem_name, names))
    result: list[str] = []
    for name in names:
        result.append(name)
        if get_filesystem_name(name) in filesystems:
            datasets = list_datasets(get_filesystem_name(name), types="filesystem,volume")
            result += [f"{dataset}@{name.partition('@')[2]}" for dataset in datasets]
    return list(dict.fromkeys(result))


def quote(names: Sequence[str], limit: int = 10) -> str:
    """Return the names in quotes, separated by commas. Names after the first ``limit`` are only counted."""
    text = ", ".join(repr(name) for name in names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"
