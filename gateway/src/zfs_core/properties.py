"""Read and set properties of datasets and snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zfs_core.capabilities import detect_capabilities
from zfs_core.causes import Cause
from zfs_core.exceptions import ZFSOutputError
from zfs_core.listing import list_clones, list_datasets, split_names
from zfs_core.names import (
    Name,
    accepts_bytes,
    decode_name,
    is_snapshot_name,
    validate_existing_name,
    validate_filesystem_name,
)
from zfs_core.options import Value, format_property_assignment, validate_property_name
from zfs_core.outcome import Outcome, check
from zfs_core.parse import Property, check_complete, parse_get, parse_table
from zfs_core.property_values import find_number
from zfs_core.run import run


@accepts_bytes
def lzc_set_props(name: Name, prop: Name, val: Value) -> None:
    """Set one property atomically. A snapshot can only have user properties.

    Ignores a read-only property, as libzfs_core does; ``set_writable_property`` refuses it. Raises QuotaTooSmall for a
    quota smaller than the used space. Also raises PropertyInvalid, PropertyNotSupported, DatasetNotFound, NoSpace.
    Command: ``zfs set PROP=VAL NAME``.
    """
    outcome = _run_set(name, prop, val)
    if outcome.cause is not Cause.PROPERTY_READ_ONLY:
        check(outcome, decode_name(name), "set a property")


lzc_set_prop = lzc_set_props


def set_writable_property(name: Name, prop: Name, val: Value) -> None:
    """Set one property like ``lzc_set_props``, but raise PropertyInvalid if it is read-only."""
    check(_run_set(name, prop, val), decode_name(name), "set a property")


def _run_set(name: Name, prop: Name, val: Value) -> Outcome:
    target = validate_existing_name(name)
    return run("set", format_property_assignment(prop, val), target, name=target)


@accepts_bytes
def lzc_inherit(name: Name, prop: Name) -> None:
    """Remove the property ``prop`` from ``name``, if it is set there. Raises PropertyInvalid, DatasetNotFound.

    Command: ``zfs inherit PROP NAME``.
    """
    target = validate_existing_name(name)
    check(run("inherit", validate_property_name(prop), target, name=target), target, "inherit a property")


lzc_inherit_prop = lzc_inherit


@accepts_bytes
def lzc_get_props(name: Name) -> dict[str, Any]:
    """Return the properties of a dataset or snapshot that do not have their default value.

    Values are numbers, indexes (see ``zfs_core.property_values``) or text, and a list for ``clones``. ``mountpoint`` is
    always contained for a filesystem. Raises DatasetNotFound, NameInvalid, NameTooLong. Command:
    ``zfs get -p all NAME``.
    """
    target = validate_existing_name(name)
    properties = _get_properties([], ["all"], [target])
    values: dict[str, Any] = {
        item.prop: item.value if ":" in item.prop else find_number(item.prop, item.value)
        for item in properties
        if item.name == target and item.value != "-" and (item.source != "default" or item.prop == "mountpoint")
    }
    if "clones" in values:
        values["clones"] = [clone for clone in str(values["clones"]).split(",") if clone]
    elif is_snapshot_name(target):
        values["clones"] = list_clones(target)
    return values


def get_props(names: Iterable[Name], props: Iterable[str]) -> dict[str, dict[str, Property]]:
    """Return ``{name: {property: Property}}`` with all requested names and properties.

    The ``value`` of a property that is not set is ``-``. Raises DatasetNotFound if any of the names does not exist, and
    ZFSOutputError if the output is incomplete.
    """
    targets, prop_names = (
        [validate_existing_name(name) for name in names],
        [validate_property_name(prop) for prop in props],
    )
    properties: list[Property] = []
    for batch in split_names(targets):
        properties += _get_properties([], prop_names, batch)
    check_complete(properties, targets, prop_names)
    return _group_by_name(properties)


def get_tree(root: Name, props: Iterable[str]) -> dict[str, dict[str, Property]]:
    """Return the same as ``get_props``, for ``root`` and all its descendants and snapshots."""
    target, prop_names = validate_existing_name(root), [validate_property_name(prop) for prop in props]
    properties = _get_properties(["-r"], prop_names, [target])
    result = _group_by_name(properties)
    check_complete(properties, [target, *result], prop_names)
    return result


def local_tree(root: Name) -> dict[str, dict[str, str]]:
    """Return ``{name: {user property: value}}`` for ``root`` and all its descendants, without inherited properties.

    If a value looks like output of ``zfs get``, each property is read with a separate command, so that the value cannot
    be mistaken for other properties.
    """
    target = validate_existing_name(root)
    try:
        return _read_local_props(["-r"], target)
    except ZFSOutputError:
        names = list_datasets(target, types="filesystem,volume,snapshot")
        return {name: props for name in names if (props := local_props(name))}


def local_props(name: Name) -> dict[str, str]:
    """Return the user properties set on a dataset or snapshot, without inherited ones. Raises DatasetNotFound."""
    target = validate_existing_name(name)
    try:
        return _read_local_props([], target).get(target, {})
    except ZFSOutputError:
        return _read_props_separately(target)


def _read_local_props(options: Sequence[str], target: str) -> dict[str, dict[str, str]]:
    result: dict[str, dict[str, str]] = {}
    for item in _get_properties([*options, "-s", "local,received"], ["all"], [target]):
        # A line that names another dataset is part of a value.
        if item.name != target and not (options and item.name.startswith((f"{target}/", f"{target}@"))):
            raise ZFSOutputError(item.name).with_details(f"the output describes a dataset other than {target}")
        if ":" in item.prop and item.is_local:
            result.setdefault(item.name, {})[item.prop] = item.value
    return result


def _read_props_separately(target: str) -> dict[str, str]:
    """Read each property with a separate command, whose output is unambiguous for every value."""
    outcome = run("get", "-H", "-s", "local,received", "-o", "property", "all", target, name=target)
    prop_names = [prop for (prop,) in parse_table(check(outcome, target, "get properties").output, 1) if ":" in prop]
    result = {}
    for prop in prop_names:
        outcome = run("get", "-H", "-o", "value", prop, target, name=target)
        result[prop] = check(outcome, target, "get a property").output.removesuffix("\n")
    return result


def _get_properties(options: Sequence[str], props: Sequence[str], names: Sequence[str]) -> list[Property]:
    outcome = run("get", "-Hp", *options, "-o", "name,property,value,source", ",".join(props), *names, name=names[0])
    return parse_get(check(outcome, names[0], "get properties").output)


def _group_by_name(properties: Iterable[Property]) -> dict[str, dict[str, Property]]:
    result: dict[str, dict[str, Property]] = {}
    for item in properties:
        result.setdefault(item.name, {})[item.prop] = item
    return result


def used_bytes(name: Name) -> int:
    """Return the space that destroying this dataset or snapshot would free, in bytes."""
    target = validate_existing_name(name)
    return get_props([target], ["used"])[target]["used"].number


def sync(name: Name) -> None:
    """Wait until all data written to the dataset is on disk, and counted by ``written_bytes`` and ``used_bytes``.

    In every version of ZFS, removing a property that is not set waits for the current transaction group.
    """
    lzc_inherit_prop(name, "pyzfs:sync")


def written_bytes(name: Name) -> int:
    """Return the number of bytes written to a filesystem since its newest snapshot, or since it was cloned.

    Call ``sync`` first to include the latest writes.
    """
    target = validate_filesystem_name(name)
    prop = "written" if detect_capabilities().written_property else "unique"
    return get_props([target], [prop])[target][prop].number
