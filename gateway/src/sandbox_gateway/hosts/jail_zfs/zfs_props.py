"""What there is and what it is like: listing, properties, mounts, over the ``zfs`` command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sandbox_gateway.hosts.jail_zfs.zfs_command import (
    checked,
    failure,
    flavour,
    run,
    run_patiently,
)
from sandbox_gateway.hosts.jail_zfs.zfs_errors import (
    Cause,
    FilesystemNotFound,
    NameInvalid,
    NameTooLong,
    ZFSInitializationFailed,
    ZFSOutputError,
)
from sandbox_gateway.hosts.jail_zfs.zfs_parse import (
    Name,
    Property,
    Value,
    check_complete,
    existing_name,
    filesystem_name,
    filesystem_of,
    parse_get,
    parse_table,
    pool_of,
    property_name,
    property_value,
    snapshot_name,
)


def lzc_exists(name: Name) -> bool:
    """Is there a filesystem, volume or snapshot of this name? Never raises for a name that cannot be."""
    try:
        target = existing_name(name)
    except (NameInvalid, NameTooLong):
        return False
    outcome = run("get", "-H", "-o", "value", "type", target, name=target)
    if outcome.cause in (None, Cause.MISSING, Cause.NAME_INVALID, Cause.NO_POOL, Cause.NAME_TOO_LONG):
        return outcome.cause is None
    raise failure(outcome, target, "look for it")


def lzc_set_prop(name: Name, prop: Name, val: Value) -> None:
    """Set one property; it is set or it is not, whatever happens meanwhile (one transaction).

    Raises PropertyInvalid, DatasetNotFound, NoSpace, QuotaExceeded (a quota below what is used).
    """
    target = existing_name(name)
    checked(run("set", property_value(prop, val), target, name=target), target, "set a property")


def lzc_inherit_prop(name: Name, prop: Name) -> None:
    """Take back a property set on ``name``, if it is set. Raises PropertyInvalid, DatasetNotFound."""
    target = existing_name(name)
    checked(run("inherit", property_name(prop), target, name=target), target, "inherit a property")


def list_datasets(root: Name, *, types: str = "filesystem", depth: int | None = None) -> list[str]:
    """``root`` and what is below it, in ZFS's order. ``types``: ``filesystem``, ``snapshot``, ``volume``, with commas.

    Raises DatasetNotFound.
    """
    target = existing_name(root)
    how = ["-r"] if depth is None else ["-d", str(depth)]
    outcome = run("list", "-H", *how, "-t", types, "-o", "name", target, name=target)
    return [name for (name,) in parse_table(checked(outcome, target, "list").out, 1)]


def list_snapshots(filesystem: Name) -> list[str]:
    """The full names of a filesystem's own snapshots, oldest first. Raises FilesystemNotFound."""
    target = filesystem_name(filesystem)
    outcome = run("list", "-H", "-t", "snapshot", "-d", "1", "-s", "createtxg", "-o", "name", target, name=target)
    # where there is none, OpenZFS may say so on standard error and still succeed
    rows = parse_table(checked(outcome, target, "list snapshots", {Cause.MISSING: FilesystemNotFound}).out, 1)
    return [name for (name,) in rows if filesystem_of(name) == target]


_NAMES_AT_ONCE = 400


def get_props(names: Iterable[Name], props: Iterable[str]) -> dict[str, dict[str, Property]]:
    """``{name: {property: Property}}``, all of them (``value`` is ``-`` where there is none).

    Raises DatasetNotFound if one of the names is not there, ZFSOutputError if the answer is not whole.
    """
    targets, wanted = [existing_name(name) for name in names], [property_name(prop) for prop in props]
    found: list[Property] = []
    for start in range(0, len(targets), _NAMES_AT_ONCE):
        some = targets[start : start + _NAMES_AT_ONCE]
        found += _get([], wanted, some)
    check_complete(found, targets, wanted)
    return _by_name(found)


def get_tree(root: Name, props: Iterable[str]) -> dict[str, dict[str, Property]]:
    """``get_props`` of ``root`` and everything below it, snapshots included."""
    target, wanted = existing_name(root), [property_name(prop) for prop in props]
    found = _get(["-r"], wanted, [target])
    result = _by_name(found)
    check_complete(found, [target, *result], wanted)
    return result


def local_tree(root: Name) -> dict[str, dict[str, str]]:
    """``{name: {user property: value}}`` of what is set on each dataset and snapshot itself, nothing inherited.

    A value that looks like other lines of ``zfs get`` is read alone, and so cannot spoil the others.
    """
    target = existing_name(root)
    try:
        return _local(["-r"], target)
    except ZFSOutputError:
        names = list_datasets(target, types="filesystem,volume,snapshot")
        return {name: props for name in names if (props := local_props(name))}


def local_props(name: Name) -> dict[str, str]:
    """The user properties set on this dataset or snapshot itself. Raises DatasetNotFound."""
    target = existing_name(name)
    try:
        return _local([], target).get(target, {})
    except ZFSOutputError:
        return _one_by_one(target)


def _local(options: Sequence[str], target: str) -> dict[str, dict[str, str]]:
    result: dict[str, dict[str, str]] = {}
    for item in _get([*options, "-s", "local,received"], ["all"], [target]):
        # what looks like a line of another dataset is a piece of a value
        if item.name != target and not (options and item.name.startswith((f"{target}/", f"{target}@"))):
            raise ZFSOutputError(item.name).because(f"{target} was asked for")
        if ":" in item.prop and item.local:
            result.setdefault(item.name, {})[item.prop] = item.value
    return result


def _one_by_one(target: str) -> dict[str, str]:
    """What is asked for alone is unmistakable, whatever is in it."""
    outcome = run("get", "-H", "-s", "local,received", "-o", "property", "all", target, name=target)
    found = [prop for (prop,) in parse_table(checked(outcome, target, "get properties").out, 1) if ":" in prop]
    result = {}
    for prop in found:
        outcome = run("get", "-H", "-o", "value", prop, target, name=target)
        result[prop] = checked(outcome, target, "get a property").out.removesuffix("\n")
    return result


def _get(options: Sequence[str], props: Sequence[str], names: Sequence[str]) -> list[Property]:
    outcome = run("get", "-Hp", *options, "-o", "name,property,value,source", ",".join(props), *names, name=names[0])
    return parse_get(checked(outcome, names[0], "get properties").out)


def _by_name(found: Iterable[Property]) -> dict[str, dict[str, Property]]:
    result: dict[str, dict[str, Property]] = {}
    for item in found:
        result.setdefault(item.name, {})[item.prop] = item
    return result


def used(name: Name) -> int:
    """Bytes that only this dataset or snapshot holds: what its destruction would free."""
    target = existing_name(name)
    return get_props([target], ["used"])[target]["used"].number


def clones(snap: Name) -> list[str]:
    """The filesystems cloned from a snapshot, found by their ``origin`` (zfs-fuse has no property ``clones``)."""
    target = snapshot_name(snap)
    pool = pool_of(target)
    outcome = checked(run("list", "-H", "-r", "-t", "filesystem", "-o", "name,origin", pool, name=pool), pool, "list")
    return [name for name, origin in parse_table(outcome.out, 2) if origin == target]


def mounted(name: Name) -> bool:
    target = filesystem_name(name)
    return get_props([target], ["mounted"])[target]["mounted"].yes


def mounted_dependents(name: Name) -> list[str]:
    """The mounted filesystems below this one, and the mounted clones of its and their snapshots, of all generations."""
    target = filesystem_name(name)
    pool = pool_of(target)
    argv = ("list", "-H", "-r", "-t", "filesystem", "-o", "name,origin,mounted", pool)
    rows = parse_table(checked(run(*argv, name=pool), pool, "list").out, 3)
    found = {target}
    while (
        more := {
            each for each, origin, _ in rows if origin.partition("@")[0] in found or each.rpartition("/")[0] in found
        }
        - found
    ):
        found |= more
    return [each for each, _, state in rows if state == "yes" and each in found and each != target]


def mount(name: Name) -> None:
    """Mount it where its ``mountpoint`` says; nothing to do if it is.

    Raises DatasetBusy if something still holds it after a while, MountFailed, FilesystemNotFound.
    """
    target = filesystem_name(name)
    outcome = run_patiently("mount", target, name=target)
    if outcome.cause is not Cause.ALREADY_MOUNTED:
        checked(outcome, target, "mount", {Cause.MISSING: FilesystemNotFound})


def unmount(name: Name) -> None:
    """Nothing to do if it is not mounted. Raises DatasetBusy while its files are in use, FilesystemNotFound."""
    target = filesystem_name(name)
    outcome = run_patiently("unmount", target, name=target)
    if outcome.cause is not Cause.NOT_MOUNTED:
        checked(outcome, target, "unmount", {Cause.MISSING: FilesystemNotFound})


def sync(name: Name) -> None:
    """Wait until what was written to the dataset so far is on its disk, and so in ``written`` and ``used``.

    Taking back a property that nobody set writes nothing and waits for the transaction group, in every version.
    """
    lzc_inherit_prop(name, "pyzfs:sync")


def written(name: Name) -> int:
    """Bytes written to a filesystem since its newest snapshot, or since it was cloned (see ``sync``)."""
    target = filesystem_name(name)
    prop = "unique" if flavour().fuse else "written"
    return get_props([target], [prop])[target][prop].number


def reachable() -> None:
    """Raises ZFSInitializationFailed, saying how to mend it, if ZFS does not answer."""
    outcome = run("list", "-H", "-d", "0", "-o", "name")
    if outcome.cause not in (None, Cause.MISSING):
        raise outcome.error(ZFSInitializationFailed(None))
