"""Destroy filesystems, volumes and snapshots."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Container, Iterable, Mapping
from functools import partial

from zfs_core.bookmarks import lzc_destroy_bookmarks
from zfs_core.cli.failures import CommandError, Kind
from zfs_core.cli.lookups import expand, quote, require_existing
from zfs_core.cli.losses import list_clones_by_origin, require_unused
from zfs_core.cli.report import Report
from zfs_core.datasets import lzc_destroy
from zfs_core.listing import list_datasets, list_snapshots
from zfs_core.names import get_filesystem_name, get_pool_name
from zfs_core.properties import get_props, get_tree
from zfs_core.snapshots import lzc_destroy_snaps


def destroy(options: Namespace, report: Report) -> None:
    names = list(dict.fromkeys(options.names))
    snapshots = [name for name in names if "@" in name]
    bookmarks = [name for name in names if "#" in name]
    filesystems = [name for name in names if name not in snapshots and name not in bookmarks]
    if options.defer and (filesystems or bookmarks):
        message = f"--defer is only for snapshots: omit it, or omit {quote(filesystems + bookmarks)}"
        raise CommandError(Kind.INVALID, message)
    if sum(map(bool, (snapshots, bookmarks, filesystems))) > 1:
        raise CommandError(Kind.INVALID, "destroy filesystems, snapshots and bookmarks with separate commands")
    if pools := [name for name in filesystems if name == get_pool_name(name)]:
        raise CommandError(Kind.INVALID, f"cannot destroy pools: {quote(pools)}. Use zpool destroy, or name datasets")
    found_names = report.find(names)
    missing_names = [name for name in names if name not in found_names]
    if snapshots:
        _destroy_snapshots(snapshots, missing_names, options, report)
        return
    _check_missing(missing_names, options)
    report.keep(*missing_names)
    for name in bookmarks:
        if name not in missing_names:
            report.change("destroy", name, partial(lzc_destroy_bookmarks, [name]))
    _destroy_filesystems([name for name in filesystems if name not in missing_names], options.recursive, report)


def _destroy_snapshots(names: list[str], missing_names: list[str], options: Namespace, report: Report) -> None:
    existing_names = [name for name in names if name not in missing_names]
    if options.recursive:
        expanded_names = [name for name in expand(names) if name not in names]
        found_names = report.find(expanded_names)
        descendant_names = [name for name in expanded_names if name in found_names]
        # A snapshot may be gone from the filesystem itself but still exist in a descendant.
        missing_names = [name for name in missing_names if not _has_same_name(name, descendant_names)]
        existing_names += descendant_names
    _check_missing(missing_names, options)
    report.keep(*missing_names)
    if not options.defer:
        if len(set(map(get_pool_name, existing_names))) > 1:
            raise CommandError(Kind.INVALID, "all snapshots must be in the same pool: run lzc once for each pool")
        require_unused(existing_names, ", or pass --defer")
        if existing_names:
            report.change_all("destroy", existing_names, partial(lzc_destroy_snaps, existing_names, False))
        return
    _destroy_when_unused(existing_names, report)


def _destroy_when_unused(names: list[str], report: Report) -> None:
    """Destroy snapshots, or mark those that are held or cloned, with one call for each pool."""
    props = get_props(names, ["userrefs", "defer_destroy"]) if names else {}
    clones = list_clones_by_origin(names)
    changes: dict[str, list[dict[str, object]]] = {}
    for name in names:
        if props[name]["defer_destroy"].is_on:
            report.keep(name)
        else:
            action = "defer" if props[name]["userrefs"].number or name in clones else "destroy"
            changes.setdefault(get_pool_name(name), []).append({"action": action, "name": name})
    for group in changes.values():
        function = partial(lzc_destroy_snaps, [str(change["name"]) for change in group], True)
        report.apply_changes_together(group, function)


def _check_missing(names: list[str], options: Namespace) -> None:
    if names and not options.if_present:
        message = f"not found: {quote(names)}. Check the names, or pass --if-present"
        raise CommandError(Kind.NOT_FOUND, message, names)


def _has_same_name(snapshot: str, other_names: list[str]) -> bool:
    filesystem, _, short_name = snapshot.partition("@")
    return any(each.startswith(f"{filesystem}/") and each.endswith(f"@{short_name}") for each in other_names)


def _destroy_filesystems(names: list[str], recursive: bool, report: Report) -> None:
    """Destroy filesystems and volumes, after checking all of them."""
    origins: dict[str, str] = {}
    for pool in dict.fromkeys(map(get_pool_name, names)):
        origins |= _read_origins(pool)
    prefixes = tuple(f"{name}/" for name in names)
    tree = {each for each in origins if each in names or (recursive and each.startswith(prefixes))}
    for name in names if not recursive else ():
        _require_no_dependents(name, tree)
    roots = [name for name in names if not name.startswith(prefixes)]
    held_names = [
        each for root in roots for each, props in get_tree(root, ["userrefs"]).items() if props["userrefs"].number
    ]
    if held_names:
        raise CommandError(
            Kind.IN_USE,
            f"holds exist on {quote(held_names)}. Release the holds first (lzc holds, lzc release)",
            held_names,
        )
    outside_clones = [
        each for each, origin in origins.items() if each not in tree and get_filesystem_name(origin) in tree
    ]
    if outside_clones:
        raise CommandError(
            Kind.IN_USE,
            f"clones of snapshots in {quote(roots)} exist: {quote(outside_clones)}. Promote or destroy them first",
            outside_clones,
        )
    for each in order_for_removal(tree, origins):
        if snapshots := list_snapshots(each):
            report.change_all("destroy", snapshots, partial(lzc_destroy_snaps, snapshots, False))
        report.change("destroy", each, partial(lzc_destroy, each, unmounted=True))


def _require_no_dependents(name: str, tree: Container[str]) -> None:
    descendants = list_datasets(name, types="filesystem,volume,snapshot")
    if dependents := [each for each in descendants if each not in tree]:
        raise CommandError(
            Kind.IN_USE,
            f"{name!r} has {len(dependents)} snapshots and children ({quote(dependents)}): destroy them first, or pass "
            "--recursive to lose them",
            dependents,
        )


def _read_origins(pool: str) -> dict[str, str]:
    datasets = list_datasets(pool, types="filesystem,volume")
    return {name: props["origin"].value for name, props in get_props(datasets, ["origin"]).items()}


def order_for_removal(tree: Iterable[str], origins: Mapping[str, str]) -> list[str]:
    """Sort datasets so that children and clones come before the datasets that they depend on.

    Raises CommandError if a dataset is a clone of one of its own descendants, because then no order is possible.
    """
    remaining = sorted(tree, reverse=True)
    ordered: list[str] = []
    while remaining:
        needed_names = {each.rpartition("/")[0] for each in remaining} | {
            get_filesystem_name(origins[each]) for each in remaining
        }
        free_names = [each for each in remaining if each not in needed_names]
        if not free_names:
            raise CommandError(
                Kind.IN_USE,
                f"{remaining[-1]!r} is a clone of its own descendant: promote it first (lzc promote)",
                remaining,
            )
        ordered += free_names
        remaining = [each for each in remaining if each not in free_names]
    return ordered


def exists(options: Namespace, report: Report) -> None:
    found_names = report.find(options.names)
    missing_names = [name for name in options.names if name not in found_names]
    if options.require:
        require_existing(report, *options.names)
    report.results |= {"exists": not missing_names, "missing": missing_names}
