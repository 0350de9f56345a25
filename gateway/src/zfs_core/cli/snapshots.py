"""Take snapshots, roll back to them, and hold them."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from zfs_core.bookmarks import lzc_bookmark, lzc_destroy_bookmarks, lzc_get_bookmarks
from zfs_core.changes import has_changed_since, has_written_since
from zfs_core.cli.failures import CommandError, Kind
from zfs_core.cli.lookups import expand, quote, require_existing
from zfs_core.cli.losses import require_unused
from zfs_core.cli.report import Report
from zfs_core.exceptions import SnapshotNotFound
from zfs_core.holds import lzc_get_holds, lzc_hold, lzc_release
from zfs_core.listing import find_types, list_snapshots, lzc_exists
from zfs_core.names import get_filesystem_name, get_pool_name
from zfs_core.properties import get_props
from zfs_core.snapshots import lzc_destroy_snaps, lzc_rollback_to, lzc_snapshot
from zfs_core.support import is_supported


def snapshot(options: Namespace, report: Report) -> None:
    names = list(dict.fromkeys(options.snapshots))
    require_existing(report, *dict.fromkeys(map(get_filesystem_name, names)))
    if options.recursive:
        names = expand(names)
    filesystems = [get_filesystem_name(name) for name in names]
    if len({get_pool_name(name) for name in names}) > 1:
        raise CommandError(Kind.INVALID, "all snapshots must be in the same pool: run lzc once for each pool")
    if repeated_names := [each for each in dict.fromkeys(filesystems) if filesystems.count(each) > 1]:
        raise CommandError(Kind.INVALID, f"pass only one snapshot of {quote(repeated_names)}", repeated_names)
    found_names = report.find(names)
    existing_names = [name for name in names if name in found_names]
    if existing_names and not options.if_absent:
        raise CommandError(
            Kind.EXISTS,
            f"already in use: {quote(existing_names)}. Choose other names, or pass --if-absent",
            existing_names,
        )
    report.keep(*existing_names)
    if new_names := [name for name in names if name not in existing_names]:
        report.change_all("snapshot", new_names, partial(lzc_snapshot, new_names, dict(options.set)))


def rollback(options: Namespace, report: Report) -> None:
    target = options.snapshot
    require_existing(report, target)
    filesystem = get_filesystem_name(target)
    if target in report.assumed_names and not lzc_exists(target):
        # What happens between this snapshot and the rollback is unknown.
        report.change("rollback", filesystem, partial(lzc_rollback_to, filesystem, target), snapshot=target)
        return
    snapshots = list_snapshots(filesystem)
    newer_snapshots = snapshots[snapshots.index(target) + 1 :] if target in snapshots else []
    newer_bookmarks = _list_newer_bookmarks(target)
    newer_names = newer_bookmarks + newer_snapshots
    if newer_names and not options.destroy_newer:
        raise CommandError(
            Kind.IN_USE,
            f"{filesystem!r} has newer snapshots or bookmarks ({quote(newer_names)}): roll back to the newest one, or "
            "pass --destroy-newer to lose them",
            newer_names,
        )
    require_unused(newer_snapshots)
    if newer_bookmarks:
        report.change_all("destroy", newer_bookmarks, partial(lzc_destroy_bookmarks, newer_bookmarks))
    if newer_snapshots:
        report.change_all("destroy", newer_snapshots, partial(lzc_destroy_snaps, newer_snapshots, False))
    has_changed = has_written_since if report.check else has_changed_since
    if not newer_names and not has_changed(filesystem, target):
        report.keep(filesystem)
        return
    report.change("rollback", filesystem, partial(lzc_rollback_to, filesystem, target), snapshot=target)


def _list_newer_bookmarks(snapshot: str) -> list[str]:
    """Return the bookmarks that prevent a rollback to a snapshot."""
    if not is_supported(lzc_get_bookmarks):
        return []
    filesystem = get_filesystem_name(snapshot)
    target_txg = get_props([snapshot], ["createtxg"])[snapshot]["createtxg"].number
    bookmarks = lzc_get_bookmarks(filesystem, ["createtxg"])
    return [f"{filesystem}#{name}" for name, props in bookmarks.items() if props["createtxg"] > target_txg]


def bookmark(options: Namespace, report: Report) -> None:
    name, source = options.name, options.source
    if get_filesystem_name(source) != name.partition("#")[0]:
        message = (
            f"{name!r} is not a bookmark of the filesystem of {source!r}: use {get_filesystem_name(source)}#BOOKMARK"
        )
        raise CommandError(Kind.INVALID, message)
    if report.exists(name):
        if not options.if_absent:
            raise CommandError(Kind.EXISTS, f"{name!r} already exists: choose another name, or pass --if-absent")
        _check_bookmark(name, source)
        report.keep(name)
        return
    require_existing(report, source)
    report.change("bookmark", name, partial(lzc_bookmark, {name: source}), snapshot=source)


def _check_bookmark(name: str, source: str) -> None:
    """Raise CommandError if a bookmark belongs to another snapshot than ``source``, which may have been destroyed."""
    if len(find_types([name, source])) < 2:
        return
    guids = get_props([name, source], ["guid"])
    if guids[name]["guid"].value != guids[source]["guid"].value:
        raise CommandError(
            Kind.EXISTS,
            f"{name!r} already exists, but as a bookmark of another snapshot than {source!r}: choose another name, or "
            "destroy it first (lzc destroy)",
            [name],
        )


def hold(options: Namespace, report: Report) -> None:
    names = _select_snapshots(options, report)
    require_existing(report, *names)
    held_names = [name for name in names if _has_hold(report, name, options.tag)]
    if held_names and not options.if_absent:
        raise CommandError(
            Kind.EXISTS,
            f"hold {options.tag!r} already exists on {quote(held_names)}. Choose another tag, or pass --if-absent",
            held_names,
        )
    report.keep(*held_names)
    for name in names:
        if name not in held_names:
            report.change("hold", name, partial(_hold_snapshot, name, options.tag), tag=options.tag)


def _hold_snapshot(name: str, tag: str) -> None:
    if lzc_hold({name: tag}):
        raise SnapshotNotFound(name)


def _has_hold(report: Report, name: str, tag: str) -> bool:
    return name not in report.assumed_names and tag in lzc_get_holds(name)


def release(options: Namespace, report: Report) -> None:
    names = _select_snapshots(options, report)
    if not options.if_present:
        require_existing(report, *names)
    free_names = [name for name in names if not report.exists(name) or not _has_hold(report, name, options.tag)]
    if free_names and not options.if_present:
        raise CommandError(
            Kind.NOT_FOUND,
            f"hold {options.tag!r} not found on {quote(free_names)}. Check the tag, or pass --if-present",
            free_names,
        )
    report.keep(*free_names)
    for name in names:
        if name not in free_names:
            report.change("release", name, partial(lzc_release, {name: [options.tag]}), tag=options.tag)


def _select_snapshots(options: Namespace, report: Report) -> list[str]:
    names: list[str] = list(dict.fromkeys(options.snapshots))
    if not options.recursive:
        return names
    # A descendant filesystem may be newer than the snapshot.
    expanded_names = expand(names)
    found_names = report.find(expanded_names)
    return [name for name in expanded_names if name in names or name in found_names]


def holds(options: Namespace, report: Report) -> None:
    require_existing(report, *options.snapshots)
    report.results["holds"] = {name: lzc_get_holds(name) for name in options.snapshots}
