"""List datasets, and get, set and inherit their properties."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from zfs_core.cli.failures import CommandError, Kind
from zfs_core.cli.lookups import require_existing
from zfs_core.cli.report import Report
from zfs_core.cli.values import parse_size
from zfs_core.exceptions import PropertyInvalid
from zfs_core.listing import list_datasets
from zfs_core.parse import Property
from zfs_core.properties import get_props, get_tree, lzc_inherit_prop, set_writable_property


def list_command(options: Namespace, report: Report) -> None:
    require_existing(report, *options.roots)
    names = list(dict.fromkeys(name for root in options.roots for name in _list_below(root, options)))
    report.results["names"] = names
    if options.properties:
        report.results["properties"] = _as_json(get_props(names, options.properties) if names else {})


def _list_below(root: str, options: Namespace) -> list[str]:
    dataset_types = [each for each in options.types if each in ("filesystem", "volume")]
    point_types = [each for each in options.types if each not in dataset_types]
    depth = options.depth
    names = list_datasets(root, types=",".join(dataset_types), depth=depth) if dataset_types else []
    if point_types:
        # ZFS counts a snapshot as one level deeper than its filesystem.
        found_names = list_datasets(root, types=",".join(point_types), depth=None if depth is None else depth + 1)
        times = get_props(found_names, ["createtxg"]) if found_names else {}
        names += sorted(found_names, key=lambda name: (times[name]["createtxg"].number, name))
    return names


def get(options: Namespace, report: Report) -> None:
    names = options.names
    if options.if_present:
        names = [name for name in names if report.exists(name)]
    else:
        require_existing(report, *names)
    result: dict[str, dict[str, Property]] = {}
    for name in names:
        if options.recursive:
            result |= get_tree(name, options.properties)
        elif options.if_present:
            result[name] = _get_known_props(name, options.properties)
        else:
            result |= get_props([name], options.properties)
    report.results["properties"] = _as_json(result)


def _get_known_props(name: str, props: list[str]) -> dict[str, Property]:
    """Return the properties that this version of ZFS knows."""
    result: dict[str, Property] = {}
    for prop in props:
        try:
            result |= get_props([name], [prop])[name]
        except PropertyInvalid:
            continue
    return result


def _as_json(properties: dict[str, dict[str, Property]]) -> dict[str, dict[str, dict[str, str]]]:
    return {
        name: {prop: {"value": item.value, "source": item.source} for prop, item in props.items()}
        for name, props in properties.items()
    }


def set_command(options: Namespace, report: Report) -> None:
    names = [word for word in options.words if isinstance(word, str)]
    assignments = dict(word for word in options.words if not isinstance(word, str))
    if not names or not assignments:
        raise CommandError(Kind.INVALID, "pass at least one PROPERTY=VALUE and one name: lzc set quota=10G tank/data")
    require_existing(report, *names)
    for name, props in get_props(names, assignments).items():
        for prop, value in assignments.items():
            if has_value(props[prop], value) or (not report.check and not _set(props[prop], value)):
                report.keep(f"{name} {prop}")
            else:
                report.changes.append(
                    {"action": "set", "name": name, "property": prop, "before": props[prop].value, "after": value}
                )


def _set(item: Property, value: str) -> bool:
    """Set a property. Returns whether it changed: ZFS stores some values in another form, such as ``auto``."""
    set_writable_property(item.name, item.prop, value)
    return get_props([item.name], [item.prop])[item.name][item.prop] != item


_ALIASES = {
    "aclinherit": {"secure": "restricted"},
    "acltype": {"disabled": "off", "noacl": "off", "posixacl": "posix"},
    "compression": {"gzip-6": "gzip"},
}
"""Values that ZFS accepts, and the values that it prints instead. Older versions print some of them."""
_UNLIMITED = ("0", str(2**64 - 1))
"""The numbers that ZFS prints for the value ``none``."""


def has_value(item: Property, value: str) -> bool:
    """Return whether a property is set to ``value`` on the dataset itself. Sizes such as 1G are compared in bytes."""
    if not item.is_local:
        return False
    aliases = _ALIASES.get(item.prop, {})
    if aliases.get(item.value, item.value) == aliases.get(value, value):
        return True
    if ":" in item.prop or not item.value.isdigit():
        return False
    return (value == "none" and item.value in _UNLIMITED) or parse_size(value) == int(item.value)


def inherit(options: Namespace, report: Report) -> None:
    require_existing(report, *options.names)
    for name, props in get_props(options.names, options.properties).items():
        for prop, item in props.items():
            if item.is_local:
                report.change("inherit", name, partial(lzc_inherit_prop, name, prop), property=prop, before=item.value)
            else:
                report.keep(f"{name} {prop}")
