"""Create, clone, promote and rename filesystems and volumes."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from zfs_core.cli.failures import CommandError, Kind
from zfs_core.cli.lookups import get_value, require_existing, require_parent
from zfs_core.cli.report import Report
from zfs_core.datasets import lzc_clone, lzc_create, lzc_promote, lzc_rename
from zfs_core.names import get_pool_name


def create(options: Namespace, report: Report) -> None:
    name, ds_type = options.name, "zvol" if options.volume else "zfs"
    if report.exists(name):
        found_type, wanted_type = get_value(name, "type"), "volume" if options.volume else "filesystem"
        if found_type != wanted_type:
            raise CommandError(Kind.EXISTS, f"{name!r} is a {found_type}, not a {wanted_type}: choose another name")
        _keep_existing(name, options, report)
        return
    missing_parents = _list_missing_parents(report, name) if options.parents else []
    if not missing_parents:
        require_parent(report, name)
    for parent in missing_parents:
        report.change("create", parent, partial(lzc_create, parent, mounted=True))
    props = dict(options.set) | ({"volsize": options.volume} if options.volume else {})
    report.change("create", name, partial(lzc_create, name, ds_type, props, mounted=True))


def _keep_existing(name: str, options: Namespace, report: Report) -> None:
    if not options.if_absent:
        raise CommandError(Kind.EXISTS, f"{name!r} already exists: choose another name, or pass --if-absent")
    report.keep(name)


def _list_missing_parents(report: Report, name: str) -> list[str]:
    """Return the ancestors of a filesystem that do not exist, outermost first. Refuses a missing pool."""
    parts = name.split("/")
    ancestors = ["/".join(parts[:end]) for end in range(1, len(parts))]
    missing_ancestors = [ancestor for ancestor in ancestors if not report.exists(ancestor)]
    if missing_ancestors and missing_ancestors[0] == parts[0]:
        raise CommandError(Kind.NOT_FOUND, f"the pool {parts[0]!r} does not exist: run zpool list to see the pools")
    return missing_ancestors


def clone(options: Namespace, report: Report) -> None:
    name, origin = options.name, options.snapshot
    if get_pool_name(name) != get_pool_name(origin):
        raise CommandError(
            Kind.INVALID,
            f"{name!r} is not in the pool of {origin!r}: clone within one pool, or use lzc send and lzc receive",
        )
    require_existing(report, origin)
    if report.exists(name):
        if (found_origin := get_value(name, "origin")) != origin:
            description = "not a clone" if found_origin == "-" else f"a clone of {found_origin!r}"
            raise CommandError(
                Kind.EXISTS, f"{name!r} already exists and is {description}: choose another name", [found_origin]
            )
        _keep_existing(name, options, report)
        return
    require_parent(report, name)
    report.change("clone", name, partial(lzc_clone, name, origin, dict(options.set), mounted=True), origin=origin)


def promote(options: Namespace, report: Report) -> None:
    require_existing(report, options.name)
    origin = get_value(options.name, "origin")
    if origin == "-":
        report.keep(options.name)
    else:
        report.change("promote", options.name, partial(lzc_promote, options.name), origin=origin)


def rename(options: Namespace, report: Report) -> None:
    old_name, new_name = options.name, options.new_name
    if get_pool_name(old_name) != get_pool_name(new_name):
        raise CommandError(
            Kind.INVALID,
            f"{new_name!r} is not in the pool of {old_name!r}: rename within one pool, or use lzc send and lzc receive",
        )
    if old_name == new_name:
        raise CommandError(Kind.INVALID, f"{new_name!r} is the current name: choose a different name")
    if report.exists(new_name):
        if options.if_present and not report.exists(old_name):
            report.keep(new_name)
            return
        raise CommandError(Kind.EXISTS, f"{new_name!r} already exists: choose another name")
    require_existing(report, old_name)
    require_parent(report, new_name)
    report.change("rename", new_name, partial(lzc_rename, old_name, new_name, remounted=True), old_name=old_name)
