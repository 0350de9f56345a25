# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement ``sandbox_fork``: fork siblings from a snapshot, or clone a sandbox."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._client import quote_segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, removal_explained
from ansible_collections.grove.sandbox.plugins.module_utils._fields import replace_fields
from ansible_collections.grove.sandbox.plugins.module_utils._mounts import (
    MOUNT_OPTIONS,
    Mount,
    check_volumes_exist,
    find_volumes,
    list_mounted_paths,
    parse_mounts,
)
from ansible_collections.grove.sandbox.plugins.module_utils._names import find_taken_names
from ansible_collections.grove.sandbox.plugins.module_utils._placement import (
    PLACEMENT_OPTION,
    Placement,
    check_placement,
    find_copies,
    parse_placement,
)
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    Action,
    Change,
    Plan,
    keep_common_keys,
    make_temporary_name,
    require_minimum,
    stringify_values,
    validate_names,
)
from ansible_collections.grove.sandbox.plugins.module_utils._sandbox import (
    apply_to_sandbox,
    build_size_fields,
    check_mounts,
    check_sizes,
    compute_timeout,
    compute_timeout_end,
    get_final_view,
    make_view,
    plan_remounts,
    plan_removal,
    predict_mounts,
    replace,
    timeout_differs,
    validate_timeout,
)
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import (
    make_sandbox_shape,
    make_snapshot_shape,
)
from ansible_collections.grove.sandbox.plugins.module_utils._snapshot import check_running_for_capture

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

SINGULAR, PLURAL = "sandbox", "sandboxes"

ARGUMENTS: dict[str, Any] = {
    "snapshot": {"type": "str"},
    "sandbox": {"type": "str"},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "names": {"type": "list", "elements": "str"},
    "count": {"type": "int"},
    "name_prefix": {"type": "str"},
    "exact": {"type": "bool", "default": False},
    "concurrency": {"type": "int"},
    "atomic": {"type": "bool", "default": True},
    "metadata": {"type": "dict"},
    "timeout": {"type": "int"},
    "paused": {"type": "bool", "default": False},
    "cold_start": {"type": "bool", "default": False},
    "cpus": {"type": "int"},
    "memory_mb": {"type": "int"},
    "volumes": {
        "type": "list",
        "elements": "dict",
        "options": {**MOUNT_OPTIONS, "clone": {"type": "bool", "default": False}},
    },
    "placement": PLACEMENT_OPTION,
    "recreate": {"type": "bool", "default": False},
    "continue_on_error": {"type": "bool", "default": False},
}
RULES: dict[str, Any] = {
    "mutually_exclusive": [("snapshot", "sandbox"), ("names", "count"), ("names", "name_prefix")],
    "required_one_of": [("snapshot", "sandbox"), ("names", "name_prefix")],
    "required_by": {"count": "name_prefix"},
}

RESULT_KEYS = {PLURAL: ("id", "name", "state", "address", "forked_from", "snapshot_id", "volumes")}
"""The keys of each entry. There are only a few, because Ansible copies each result and there can be many forks."""
MAX_FORKS = 1000
"""Maximum number of forks in one request."""


@dataclass(frozen=True)
class DesiredState:
    """The user's options. ``prefix`` is empty if the user listed the names."""

    names: tuple[str, ...]
    state: str
    source_kind: str
    source: str
    prefix: str = ""
    exact: bool = False
    concurrency: int | None = None
    atomic: bool = True
    metadata: Mapping[str, str] | None = None
    timeout: int | None = None
    paused: bool = False
    cold_start: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    mounts: tuple[Mount, ...] | None = None
    placement: Placement | None = None
    recreate: bool = False


@dataclass(frozen=True)
class CurrentState:
    """The current state of the siblings and of their source.

    ``resources`` holds all siblings, and other sandboxes with requested names. ``siblings`` holds the names of the
    siblings. ``source`` is the shape of the snapshot or sandbox; it is None if the source no longer exists, which only
    ``absent`` accepts. ``volumes`` holds the gateway's entries by name. ``captures`` maps each volume of the source to
    the id of its snapshot, or to an empty string if the clone request will capture it.
    """

    resources: Mapping[str, Mapping[str, Any]]
    siblings: frozenset[str]
    gateway_time: datetime
    source: Mapping[str, Any] | None = None
    taken_names: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, Any] = field(default_factory=dict)
    captures: Mapping[str, str] = field(default_factory=dict)


def parse_desired_state(params: Mapping[str, Any]) -> DesiredState:
    kind = "snapshot" if params.get("snapshot") else "sandbox"
    prefix = params.get("name_prefix") or ""
    is_absent = params["state"] == "absent"
    return DesiredState(
        names=_list_requested_names(params, prefix),
        state=params["state"],
        source_kind=kind,
        source=params[kind],
        prefix=prefix,
        exact=bool(params.get("exact")) or (is_absent and bool(prefix) and params.get("count") is None),
        concurrency=require_minimum(params.get("concurrency"), 1, "concurrency"),
        atomic=params.get("atomic") is not False,
        metadata=stringify_values(params.get("metadata"), "metadata"),
        timeout=validate_timeout(params.get("timeout")),
        paused=bool(params.get("paused")),
        cold_start=bool(params.get("cold_start")),
        sizes={
            option: require_minimum(params[option], 1, option)
            for option in ("cpus", "memory_mb")
            if params.get(option) is not None
        },
        mounts=parse_mounts(params.get("volumes")),
        placement=_parse_placement(params, kind),
        recreate=bool(params.get("recreate")),
    )


def _parse_placement(params: Mapping[str, Any], source_kind: str) -> Placement | None:
    placement = parse_placement(params.get("placement"))
    if placement is not None and source_kind == "sandbox":
        raise Failure(
            "placement is not valid with sandbox, because the clones of a running sandbox stay on its host: remove "
            "this option, or take a snapshot with the module grove.sandbox.sandbox_snapshot and fork it"
        )
    return placement


def _list_requested_names(params: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
    count = require_minimum(params.get("count"), 0, "count")
    if not prefix:
        names = params.get("names") or []
        if not names and params.get("exact"):
            return ()
        return validate_names(names, "sandbox")
    if count is None and params["state"] == "present":
        raise Failure("name_prefix requires count, the number of siblings: set count")
    if count is not None and count > MAX_FORKS:
        raise Failure(f"count must be at most {MAX_FORKS}, not {count}")
    validate_names([f"{prefix}-{count or 1}"], "sandbox")
    return tuple(f"{prefix}-{number}" for number in range(1, (count or 0) + 1))


def observe(client: Client, want: DesiredState) -> CurrentState:
    """Query the current state. Sends only one request if all requested forks of a snapshot exist."""
    if want.source_kind == "snapshot" and want.mounts is None:
        existing_forks = {shape["name"]: shape for shape in _list_forks(client, want.source)}
        # If the forks in a fleet have several sources, some of those may not be copies.
        has_one_source = len({shape["forked_from"] for shape in existing_forks.values()}) == 1
        if has_one_source and _is_complete(want, existing_forks):
            return CurrentState(existing_forks, frozenset(existing_forks), client.now())
    source, captures = _find_source(client, want)
    all_sandboxes = {shape["name"]: shape for shape in map(make_sandbox_shape, client.list_all("/sandboxes"))}
    siblings = _find_siblings(client, want, source, all_sandboxes.values()) if source else frozenset()
    resources = {name: shape for name, shape in all_sandboxes.items() if name in siblings or name in want.names}
    missing_names = [] if want.state == "absent" else [name for name in want.names if name not in all_sandboxes]
    volumes = {} if want.state == "absent" else find_volumes(client, want.mounts, source)
    taken_names = find_taken_names(client, missing_names, excluded_kind="sandbox")
    return CurrentState(resources, siblings, client.now(), source, taken_names, volumes, captures)


def _list_forks(client: Client, snapshot: str) -> Iterator[dict[str, Any]]:
    return map(make_sandbox_shape, client.list_all("/sandboxes", snapshotID=snapshot))


def _is_complete(want: DesiredState, existing_forks: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether all requested siblings are alive and have the requested sizes, so that no other data is needed."""
    return all(
        name in existing_forks
        and not _is_dead(existing_forks[name])
        and all(existing_forks[name][key] == size for key, size in want.sizes.items())
        for name in want.names
    )


def _find_source(client: Client, want: DesiredState) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Return the shape of the source, or None if it does not exist, and its ``captures`` as in ``CurrentState``."""
    path = _make_source_path(want)
    entry = client.find(path) if want.state == "absent" else client.get(path)
    if entry is None:
        return None, {}
    if want.source_kind == "snapshot":
        return make_snapshot_shape(entry), {each["name"]: each["snapshotID"] for each in entry.get("volumes") or []}
    shape = make_sandbox_shape(entry)
    return {**shape, "mounts": shape["volumes"]}, {each["name"]: "" for each in shape["volumes"]}


def _make_source_path(want: DesiredState) -> str:
    return f"/{'snapshots' if want.source_kind == 'snapshot' else 'sandboxes'}/{quote_segment(want.source)}"


def _find_siblings(
    client: Client, want: DesiredState, source: Mapping[str, Any], all_sandboxes: Iterable[Mapping[str, Any]]
) -> frozenset[str]:
    """Return the names of all forks of the snapshot, or of all clones of the sandbox.

    A child of the sandbox is a clone if it was forked from a snapshot that the gateway does not list.
    """
    if want.source_kind == "snapshot":
        copies = find_copies(client, want.source, client.known_objects[_make_source_path(want)])
        return frozenset(shape["name"] for shape in all_sandboxes if shape["forked_from"] in copies)
    children = [shape for shape in all_sandboxes if shape["parent_sandbox_id"] == source["id"]]
    listed_snapshot_ids = (
        {entry["snapshotID"] for entry in client.list_all("/snapshots", sandboxID=source["id"])} if children else set()
    )
    return frozenset(shape["name"] for shape in children if shape["forked_from"] not in listed_snapshot_ids)


def list_named_paths(want: DesiredState, have: CurrentState) -> list[str]:
    return [_make_source_path(want), *list_mounted_paths(want.mounts, have.source)]


def plan(want: DesiredState, have: CurrentState) -> Plan:
    """Plan one request that forks all missing siblings, then changes to existing ones, then removal of surplus ones."""
    _check_source_not_requested(want, have)
    failures: dict[str, Failure] = {}
    fork_targets: list[tuple[str, Mapping[str, Any] | None]] = []
    actions: list[Action] = []
    for name in want.names:
        current_shape = have.resources.get(name)
        try:
            if want.state == "absent":
                actions += _plan_removal(want, have, name, current_shape)
            elif current_shape is None or _should_replace(want, have, name, current_shape):
                fork_targets.append((name, _require_free_name(have, name, current_shape)))
            else:
                actions += _plan_changes(want, have, name, current_shape)
        except Failure as failure:
            failures[name] = failure
    if fork_targets:
        try:
            actions.insert(0, _plan_fork(want, have, fork_targets))
        except Failure as failure:
            failures.update((name, failure) for name, _current in fork_targets)
    return Plan((*actions, *_plan_surplus_removal(want, have)), failures)


def _check_source_not_requested(want: DesiredState, have: CurrentState) -> None:
    ident = have.source["id"] if have.source is not None else ""
    for name in want.names:
        if have.resources.get(name, {}).get("id") == ident:
            raise Failure(f"sandbox {name!r} cannot be a clone of itself: choose other names for the clones")


def _plan_removal(
    want: DesiredState, have: CurrentState, name: str, current_shape: Mapping[str, Any] | None
) -> list[Action]:
    if current_shape is None:
        return []
    if name not in have.siblings:
        raise _create_foreign_sandbox_error(want, name, current_shape)
    return [plan_removal(name, current_shape)]


def _create_foreign_sandbox_error(want: DesiredState, name: str, current_shape: Mapping[str, Any]) -> Failure:
    remedy = (
        "set recreate: true to replace it, which loses its contents, or choose another name"
        if want.state == "present"
        else "to remove it, use the grove.sandbox.sandbox module"
    )
    return Failure(
        f"sandbox {name!r} exists but is not a fork of {want.source_kind} {want.source!r} (it was created from "
        f"{current_shape['forked_from']}): {remedy}",
        "conflict",
        blockers=[current_shape["id"]],
    )


def _should_replace(want: DesiredState, have: CurrentState, name: str, current_shape: Mapping[str, Any]) -> bool:
    """Return whether to replace the sandbox called ``name``.

    Without ``recreate``, raises Failure if it is not a sibling or differs in a fixed property.
    """
    if name not in have.siblings:
        if want.recreate:
            return True
        raise _create_foreign_sandbox_error(want, name, current_shape)
    differences = [
        f"{key} {current_shape[key]}, not {value}" for key, value in want.sizes.items() if current_shape[key] != value
    ]
    for mount in want.mounts or ():
        if mount.clone and _find_clone(want, have, current_shape, mount) is None:
            differences.append(f"no private clone of volume {mount.volume!r} at {mount.path}")
    if differences and not want.recreate:
        raise Failure(
            f"sandbox {name!r} has {' and '.join(differences)}, which cannot change during its lifetime: set "
            "recreate: true to replace it, which loses its contents",
            "conflict",
            blockers=[current_shape["id"]],
        )
    return bool(differences) or _is_dead(current_shape)


def _find_clone(want: DesiredState, have: CurrentState, current_shape: Mapping[str, Any], mount: Mount) -> str | None:
    """Return the name of the sibling's private clone for ``mount``, or None if it has none."""
    for each in current_shape["volumes"]:
        volume = have.volumes.get(each["name"], {})
        has_same_source = want.source_kind == "sandbox" or volume.get("fromSnapshot") == have.captures.get(mount.volume)
        if (each["path"], each["read_only"]) == (mount.path, mount.read_only) and has_same_source:
            return each["name"] if volume.get("ownerSandboxID") == current_shape["id"] else None
    return None


def _is_dead(current_shape: Mapping[str, Any]) -> bool:
    """Return whether the sandbox is paused because its machine or its host stopped, not because of a request."""
    return current_shape["state"] == "paused" and bool(current_shape["state_reason"])


def _require_free_name(
    have: CurrentState, name: str, current_shape: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    if current_shape is None and name in have.taken_names:
        raise _refusals.create_name_taken_error(name, have.taken_names[name])
    return current_shape


def _plan_fork(
    want: DesiredState, have: CurrentState, fork_targets: list[tuple[str, Mapping[str, Any] | None]]
) -> Action:
    source = have.source or {}
    check_placement(want.placement, source)
    if want.source_kind == "snapshot":
        check_sizes(want.sizes, source, want.cold_start)
    else:
        check_running_for_capture(want.source, source)
        # A clone continues from the memory of its source on every host that captures memory.
        check_sizes(want.sizes, {**source, "memory": "auto"}, want.cold_start)
    check_mounts(want.mounts, source, have.volumes)
    _check_captures_exist(want, have)
    changes = tuple(
        _make_fork_change(name, current_shape, _predict_view(want, source, name))
        for name, current_shape in fork_targets
    )
    body: dict[str, Any] = {
        "names": [name for name, _current in fork_targets],
        "atomic": want.atomic,
        **build_size_fields(want.sizes),
    }
    if want.mounts is not None:
        body["volumeMounts"] = [mount.build_request_fields() for mount in want.mounts]
    if want.placement is not None:
        body["placement"] = want.placement.build_request_fields()
    if want.concurrency is not None:
        body["concurrency"] = want.concurrency
    if want.metadata:
        body["metadata"] = dict(want.metadata)
    if want.timeout is not None:
        body["timeout"] = want.timeout
    if want.paused:
        body["paused"] = True
    if want.cold_start:
        body["coldStart"] = True
    replaced_sandboxes = tuple(
        (current_shape["id"], current_shape["name"], make_temporary_name(current_shape["name"], current_shape["id"]))
        for _name, current_shape in fork_targets
        if current_shape is not None
    )
    verb = "fork" if want.source_kind == "snapshot" else "clone"
    request = {
        # All hosts with a copy know the name of the snapshot, but only one knows its id.
        "source": source.get("id", "") if want.placement is None else want.source,
        "ref": (want.source_kind, want.source),
        "body": body,
        "old": replaced_sandboxes,
    }
    return Action(verb, changes, request)


def _make_fork_change(name: str, current_shape: Mapping[str, Any] | None, after: Mapping[str, Any]) -> Change:
    return Change(name, None if current_shape is None else keep_common_keys(make_view(current_shape), after), after)


def _check_captures_exist(want: DesiredState, have: CurrentState) -> None:
    """Raise Failure if the source does not include a volume that the user wants to clone."""
    for mount in want.mounts or ():
        if not mount.clone or mount.volume in have.captures:
            continue
        raise _refusals.create_nothing_to_clone_error(mount.volume, want.source_kind, want.source)


def _predict_view(want: DesiredState, source: Mapping[str, Any], name: str) -> dict[str, Any]:
    fork_view: dict[str, Any] = {
        "name": name,
        "state": "paused" if want.paused else "running",
        **{key: want.sizes.get(key, source[key]) for key in ("cpus", "memory_mb", "disk_mb")},
        "metadata": dict(want.metadata or {}),
    }
    if want.timeout is not None:
        fork_view["timeout"] = want.timeout
    if not any(mount.clone for mount in want.mounts or ()):
        # The gateway chooses the names of clones.
        fork_view["volumes"] = predict_mounts(want.mounts, source)
    if want.source_kind == "snapshot":
        # With a placement, the gateway can choose hosts with other copies.
        if want.placement is None:
            fork_view["forked_from"] = source["id"]
    else:
        fork_view["parent_sandbox_id"] = source["id"]
    return fork_view


def _plan_changes(want: DesiredState, have: CurrentState, name: str, current_shape: Mapping[str, Any]) -> list[Action]:
    """Return the actions that change an existing sibling. A resume comes first, a pause last."""
    if _matches_request(want, current_shape):
        return []
    current_view = make_view(current_shape)
    check_volumes_exist(want.mounts, have.volumes)
    actions: list[Action] = []
    if not want.paused and current_view["state"] == "paused":
        actions.append(
            Action(
                "resume",
                (Change(name, current_view, {**current_view, "state": "running"}),),
                {"id": current_shape["id"]},
            )
        )
        current_view = get_final_view(actions, current_view)
    if want.metadata is not None and want.metadata != current_view["metadata"]:
        new_view = {**current_view, "metadata": dict(want.metadata)}
        request = {"id": current_shape["id"], "body": {"metadata": dict(want.metadata)}}
        actions.append(Action("update", (Change(name, current_view, new_view),), request))
        current_view = new_view
    actions += plan_remounts(name, current_shape, current_view, _resolve_mounts(want, have, current_shape))
    current_view = get_final_view(actions, current_view)
    if timeout_differs(want.timeout, current_view["timeout"]):
        new_view = {**current_view, "timeout": want.timeout}
        request = {
            "id": current_shape["id"],
            "end": compute_timeout_end(want.timeout, name, current_shape, have.gateway_time),
        }
        actions.append(Action("set_timeout", (Change(name, current_view, new_view),), request))
        current_view = new_view
    if want.paused and current_view["state"] == "running":
        actions.append(
            Action(
                "pause", (Change(name, current_view, {**current_view, "state": "paused"}),), {"id": current_shape["id"]}
            )
        )
    return actions


def _matches_request(want: DesiredState, current_shape: Mapping[str, Any]) -> bool:
    """Return whether the sibling needs no change. Does not create views, which would be slow for a hundred siblings."""
    requested_state = "paused" if want.paused else "running"
    has_same_timeout = want.timeout is None or not timeout_differs(want.timeout, compute_timeout(current_shape))
    return (
        current_shape["state"] == requested_state
        and want.metadata in (None, current_shape["metadata"])
        and want.mounts is None
        and has_same_timeout
    )


def _resolve_mounts(
    want: DesiredState, have: CurrentState, current_shape: Mapping[str, Any]
) -> tuple[Mount, ...] | None:
    """Return the requested mounts, with the names of this sibling's clones in place of the cloned volumes."""
    if want.mounts is None:
        return None
    return tuple(
        Mount(_find_clone(want, have, current_shape, mount) or mount.volume, mount.path, mount.read_only)
        if mount.clone
        else mount
        for mount in want.mounts
    )


def _plan_surplus_removal(want: DesiredState, have: CurrentState) -> list[Action]:
    """Plan the removal of surplus siblings.

    With a prefix, this applies only to siblings whose names consist of the prefix and a number.
    """
    if not want.exact:
        return []
    pattern = re.compile(re.escape(want.prefix) + r"-[1-9]\d*" if want.prefix else r".*")
    surplus_names = [name for name in have.siblings if name not in want.names and pattern.fullmatch(name)]
    return [plan_removal(name, have.resources[name]) for name in sorted(surplus_names, key=_make_natural_sort_key)]


def _make_natural_sort_key(name: str) -> tuple[str, int, str]:
    match = re.fullmatch(r"(.*?)(\d{1,9})", name)
    return (match.group(1), int(match.group(2)), name) if match else (name, 0, name)


def apply(action: Action, client: Client) -> dict[str, Failure]:
    """Carry out one action. Raises Failure.

    Returns the failures by name if only some forks of a non-atomic request fail.
    """
    if action.verb not in ("fork", "clone"):
        apply_to_sandbox(action, client)
        return {}
    request = action.request
    path = "/snapshots/{}/fork" if action.verb == "fork" else "/sandboxes/{}/clone"
    body = dict(request["body"])
    if request["old"]:
        # All replacements must exist before the first old sandbox is removed.
        body["atomic"] = True
    with removal_explained(*request["ref"], request["source"]):
        response = replace(
            client, list(request["old"]), lambda: client.post(path.format(quote_segment(request["source"])), body)
        )
    return _parse_failures(response)


def _parse_failures(response: Any) -> dict[str, Failure]:
    errors = (
        response.get("errors") or []
        if isinstance(response, dict)
        else [item["error"] for item in response or [] if item.get("error")]
    )
    return {
        error.get("name", ""): Failure(
            replace_fields(error.get("message", "the fork failed")),
            error.get("kind", "backend_failed"),
            status=error.get("code"),
        )
        for error in errors
    }


def get_result_lists(want: DesiredState) -> dict[str, tuple[str, ...]]:
    """Return the keys of the result's lists, in order, with the names of the resources in each list."""
    return {PLURAL: want.names}


def get_resources_by_name(want: DesiredState, have: CurrentState) -> Mapping[str, Mapping[str, Any]]:
    return have.resources
