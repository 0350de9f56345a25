"""Compare two plans.

Two check-mode runs of the same playbook differ in their times, and can differ in the order in which they run tasks on
different hosts. The comparison ignores both. Planned ids are numbered in this order, so the comparison replaces them
with the names of their objects.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TypeVar

from sandbox_gateway.cli.plan_file import PLANNED_ID_PREFIX, Entry, Plan, PlannedChange, iterate_changes

_HASH_PREFIX = "pbkdf2-sha256:"
_PLANNED_ID_PATTERN = re.compile(rf"{PLANNED_ID_PREFIX}[0-9a-f]+")
_Item = TypeVar("_Item")
_Identity = tuple[Hashable, ...]
Side = Literal["old", "new", "both"]


@dataclass(frozen=True)
class ChangeDifference:
    """A change that only one plan has, or whose ``properties`` differ, such as "after.cpus"."""

    side: Side
    change: PlannedChange
    """The new plan's change, if both plans have it."""
    properties: tuple[str, ...] = ()


@dataclass(frozen=True)
class VersionDifference:
    """An object that the two plans found in different versions. A version is empty if the object did not exist."""

    gateway: str
    path: str
    old: str
    new: str


@dataclass(frozen=True)
class TaskDifference:
    """A task that only one plan has, or whose ``properties`` differ, such as "costs"."""

    side: Side
    entry: Entry
    """The new plan's entry, if both plans have the task."""
    properties: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    changes: tuple[ChangeDifference, ...]
    versions: tuple[VersionDifference, ...]
    tasks: tuple[TaskDifference, ...]
    properties: tuple[str, ...]
    """Properties of the whole plans that differ, such as "problems"."""

    @property
    def is_equal(self) -> bool:
        return not (self.changes or self.versions or self.tasks or self.properties)


def compare(old: Plan, new: Plan) -> Comparison:
    """Return all differences between two plans, except those that this module ignores."""
    old_entries, new_entries = _replace_planned_ids(old), _replace_planned_ids(new)
    versions = tuple(_compare_versions(_find_first_versions(old_entries), _find_first_versions(new_entries)))
    old_tasks, new_tasks = _identify(old_entries, _identify_task), _identify(new_entries, _identify_task)
    properties = [name for name in ("problems", "playbooks", "gateways") if getattr(old, name) != getattr(new, name)]
    if [key for key in old_tasks if key in new_tasks] != [key for key in new_tasks if key in old_tasks]:
        properties.append("order of the tasks")
    return Comparison(
        tuple(_compare_changes(_list_changes(old_entries), _list_changes(new_entries))),
        versions,
        tuple(_compare_tasks(old_tasks, new_tasks, {(version.gateway, version.path) for version in versions})),
        tuple(properties),
    )


def _replace_planned_ids(plan: Plan) -> list[Entry]:
    """Return the entries, ordered by host, with ids such as "known-after-apply-web" instead of planned ids."""
    entries = sorted(plan.entries, key=attrgetter("host"))
    counts: Counter[tuple[str, str]] = Counter()
    new_ids: dict[tuple[str, str], str] = {}
    for entry in entries:
        for name, planned_id in entry.created.items():
            counts[entry.gateway, name] += 1
            suffix = f"#{count}" if (count := counts[entry.gateway, name]) > 1 else ""
            new_ids[entry.gateway, planned_id] = f"{PLANNED_ID_PREFIX}{name}{suffix}"

    def replace_ids(entry: Entry) -> Entry:
        def replace(match: re.Match[str]) -> str:
            return new_ids.get((entry.gateway, match[0]), match[0])

        def convert(text: str) -> str:
            # Each plan has its own salts, so comparing two hashes says nothing about the secrets.
            return "a secret" if text.startswith(_HASH_PREFIX) else _PLANNED_ID_PATTERN.sub(replace, text)

        fields = _map_texts(entry.model_dump(exclude={"created"}), convert)
        return Entry.model_validate({**fields, "created": entry.created})

    return [replace_ids(entry) for entry in entries]


def _map_texts(value: Any, convert: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return convert(value)
    if isinstance(value, Mapping):
        return {convert(key): _map_texts(item, convert) for key, item in value.items()}
    return [_map_texts(item, convert) for item in value] if isinstance(value, list) else value


def _identify(items: Iterable[_Item], identify: Callable[[_Item], _Identity]) -> dict[_Identity, _Item]:
    """Return the items by identity. A number is appended to each identity, because identities can repeat."""
    counts: Counter[_Identity] = Counter()
    result: dict[_Identity, _Item] = {}
    for item in items:
        identity = identify(item)
        counts[identity] += 1
        result[*identity, counts[identity]] = item
    return result


def _identify_task(entry: Entry) -> _Identity:
    # Ignore the path, because its line number changes with every edit above the task.
    return entry.host, entry.gateway, entry.task


def _identify_change(planned_change: PlannedChange) -> _Identity:
    return planned_change.entry.gateway, planned_change.change.kind, planned_change.change.name, planned_change.verb


def _list_changes(entries: Iterable[Entry]) -> dict[_Identity, PlannedChange]:
    return _identify(
        (planned_change for entry in entries for planned_change in iterate_changes(entry)), _identify_change
    )


def _find_differences(
    old: Mapping[_Identity, _Item],
    new: Mapping[_Identity, _Item],
    list_properties: Callable[[_Item, _Item], Iterable[str]],
) -> Iterator[tuple[Side, _Item, tuple[str, ...]]]:
    """Yield the items that only one plan has, and the new items for which ``list_properties`` finds differences."""
    for identity, item in old.items():
        if identity not in new:
            yield "old", item, ()
    for identity, item in new.items():
        if identity not in old:
            yield "new", item, ()
        elif properties := tuple(list_properties(old[identity], item)):
            yield "both", item, properties


def _compare_changes(
    old: Mapping[_Identity, PlannedChange], new: Mapping[_Identity, PlannedChange]
) -> Iterator[ChangeDifference]:
    for side, planned_change, properties in _find_differences(old, new, _list_change_properties):
        yield ChangeDifference(side, planned_change, properties)


def _list_change_properties(old: PlannedChange, new: PlannedChange) -> Iterator[str]:
    for name in ("before", "after"):
        old_view, new_view = getattr(old.change, name), getattr(new.change, name)
        if old_view is None or new_view is None:
            if old_view is not new_view:
                yield name
        else:
            yield from (f"{name}.{key}" for key in _list_different_keys(old_view, new_view))


def _list_different_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return sorted(
        key for key in old.keys() | new.keys() if key not in old or key not in new or _is_different(old[key], new[key])
    )


def _is_different(old: Any, new: Any) -> bool:
    # In Python, but not in JSON, 1 equals true.
    return json.dumps(old, sort_keys=True) != json.dumps(new, sort_keys=True)


def _find_first_versions(entries: Iterable[Entry]) -> dict[tuple[str, str], str]:
    """Return the version in which the plan found each object. Later versions are results of the plan itself."""
    versions: dict[tuple[str, str], str] = {}
    for entry in entries:
        for path, version in entry.reads.items():
            versions.setdefault((entry.gateway, path), version)
    return versions


def _compare_versions(
    old: Mapping[tuple[str, str], str], new: Mapping[tuple[str, str], str]
) -> Iterator[VersionDifference]:
    for (gateway, path), version in old.items():
        if (gateway, path) in new and new[gateway, path] != version:
            yield VersionDifference(gateway, path, version, new[gateway, path])


def _compare_tasks(
    old: Mapping[_Identity, Entry], new: Mapping[_Identity, Entry], different_objects: Set[tuple[str, str]]
) -> Iterator[TaskDifference]:
    def list_properties(old_entry: Entry, new_entry: Entry) -> Iterator[str]:
        old_properties, new_properties = (_describe_task(entry, different_objects) for entry in (old_entry, new_entry))
        return iter(_list_different_keys(old_properties, new_properties))

    for side, entry, properties in _find_differences(old, new, list_properties):
        yield TaskDifference(side, entry, properties)


def _describe_task(entry: Entry, different_objects: Set[tuple[str, str]]) -> dict[str, Any]:
    """Return the properties of a task, without those that are compared as changes or versions."""
    return {
        "path": entry.path,
        "actions": [
            [action.verb, [[change.kind, change.name] for change in action.changes]] for action in entry.actions
        ],
        "requests": [action.request for action in entry.actions],
        "reads": {path: text for path, text in entry.reads.items() if (entry.gateway, path) not in different_objects},
        "created": sorted(entry.created),
        "costs": entry.costs,
        "unknown": entry.unknown,
        "failure": entry.failure.model_dump() if entry.failure else None,
    }
