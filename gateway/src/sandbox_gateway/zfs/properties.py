"""Read and set properties of datasets and snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sandbox_gateway.zfs.capabilities import detect_capabilities
from sandbox_gateway.zfs.exceptions import ZFSOutputError
from sandbox_gateway.zfs.listing import list_datasets
from sandbox_gateway.zfs.names import Name, existing_name, filesystem_name
from sandbox_gateway.zfs.options import Value, property_name, property_value
from sandbox_gateway.zfs.outcome import check
from sandbox_gateway.zfs.parse import Property, check_complete, parse_get, parse_table
from sandbox_gateway.zfs.run import run


def lzc_set_prop(name: Name, prop: Name, val: Value) -> None:
    """Set one property, in one transaction.

    Raises PropertyInvalid, DatasetNotFound, NoSpace, QuotaExceeded (a quota below the space in use).
    """
    target = existing_name(name)
    check(run("set", property_value(prop, val), target, name=target), target, "set a property")


def lzc_inherit_prop(name: Name, prop: Name) -> None:
    """Remove a property from ``name``, if it is set there. Raises PropertyInvalid, DatasetNotFound."""
    target = existing_name(name)
    check(run("inherit", property_name(prop), target, name=target), target, "inherit a property")


_NAMES_PER_COMMAND = 400


def get_props(names: Iterable[Name], props: Iterable[str]) -> dict[str, dict[str, Property]]:
    """Return ``{name: {property: Property}}``, complete; the ``value`` of a missing property is ``-``.

    Raises DatasetNotFound if one of the names does not exist, ZFSOutputError if the output is incomplete.
    """
    targets, wanted = [existing_name(name) for name in names], [property_name(prop) for prop in props]
    found: list[Property] = []
    for start in range(0, len(targets), _NAMES_PER_COMMAND):
        some = targets[start : start + _NAMES_PER_COMMAND]
        found += _get([], wanted, some)
    check_complete(found, targets, wanted)
    return _group_by_name(found)


def get_tree(root: Name, props: Iterable[str]) -> dict[str, dict[str, Property]]:
    """Return ``get_props`` of ``root`` and everything below it, snapshots included."""
    target, wanted = existing_name(root), [property_name(prop) for prop in props]
    found = _get(["-r"], wanted, [target])
    result = _group_by_name(found)
    check_complete(found, [target, *result], wanted)
    return result


def local_tree(root: Name) -> dict[str, dict[str, str]]:
    """Return ``{name: {user property: value}}``, as set on each dataset and snapshot itself, without inherited ones.

    A value that looks like output of ``zfs get`` is read with a separate command, so that it cannot fake other
    properties.
    """
    target = existing_name(root)
    try:
        return _local(["-r"], target)
    except ZFSOutputError:
        names = list_datasets(target, types="filesystem,volume,snapshot")
        return {name: props for name in names if (props := local_props(name))}


def local_props(name: Name) -> dict[str, str]:
    """Return the user properties set on this dataset or snapshot itself. Raises DatasetNotFound."""
    target = existing_name(name)
    try:
        return _local([], target).get(target, {})
    except ZFSOutputError:
        return _one_by_one(target)


def _local(options: Sequence[str], target: str) -> dict[str, dict[str, str]]:
    result: dict[str, dict[str, str]] = {}
    for item in _get([*options, "-s", "local,received"], ["all"], [target]):
        # A line that names another dataset is part of a value.
        if item.name != target and not (options and item.name.startswith((f"{target}/", f"{target}@"))):
            raise ZFSOutputError(item.name).with_details(f"the output is about another dataset than {target}")
        if ":" in item.prop and item.is_local:
            result.setdefault(item.name, {})[item.prop] = item.value
    return result


def _one_by_one(target: str) -> dict[str, str]:
    """Read each property with a separate command, whose output is unambiguous for every value."""
    outcome = run("get", "-H", "-s", "local,received", "-o", "property", "all", target, name=target)
    found = [prop for (prop,) in parse_table(check(outcome, target, "get properties").out, 1) if ":" in prop]
    result = {}
    for prop in found:
        outcome = run("get", "-H", "-o", "value", prop, target, name=target)
        result[prop] = check(outcome, target, "get a property").out.removesuffix("\n")
    return result


def _get(options: Sequence[str], props: Sequence[str], names: Sequence[str]) -> list[Property]:
    outcome = run("get", "-Hp", *options, "-o", "name,property,value,source", ",".join(props), *names, name=names[0])
    return parse_get(check(outcome, names[0], "get properties").out)


def _group_by_name(found: Iterable[Property]) -> dict[str, dict[str, Property]]:
    result: dict[str, dict[str, Property]] = {}
    for item in found:
        result.setdefault(item.name, {})[item.prop] = item
    return result


def used(name: Name) -> int:
    """Return the bytes that only this dataset or snapshot uses, and that its destruction would free."""
    target = existing_name(name)
    return get_props([target], ["used"])[target]["used"].number


def sync(name: Name) -> None:
    """Wait until all data written to the dataset so far is on disk, and therefore counted in ``written`` and ``used``.

    In every version, removing a property that is not set waits for the transaction group and writes nothing.
    """
    lzc_inherit_prop(name, "pyzfs:sync")


def written(name: Name) -> int:
    """Return the bytes written to a filesystem since its newest snapshot, or since it was cloned (see ``sync``)."""
    target = filesystem_name(name)
    prop = "written" if detect_capabilities().written_property else "unique"
    return get_props([target], [prop])[target][prop].number
