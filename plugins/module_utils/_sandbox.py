# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement ``sandbox``: create, change and remove named sandboxes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._client import ID_PATTERN, quote_segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, removal_explained
from ansible_collections.grove.sandbox.plugins.module_utils._fields import NETWORK_FIELDS, SIZE_FIELDS
from ansible_collections.grove.sandbox.plugins.module_utils._mounts import (
    MOUNT_OPTIONS,
    Mount,
    check_running,
    check_volumes_exist,
    find_missing_volumes,
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
    Planner,
    failures_conditional,
    keep_common_keys,
    make_temporary_name,
    normalize_networks,
    require_minimum,
    stringify_values,
    validate_names,
)
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import (
    HOST_KEY,
    SANDBOX_KEYS,
    make_sandbox_shape,
    make_snapshot_shape,
    make_template_shape,
    parse_time,
)

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

SINGULAR, PLURAL = "sandbox", "sandboxes"
RESULT_KEYS = {PLURAL: SANDBOX_KEYS}

ARGUMENTS: dict[str, Any] = {
    "name": {"type": "list", "elements": "str", "required": True, "aliases": ["names"]},
    "state": {"type": "str", "choices": ["present", "running", "paused", "absent"], "default": "present"},
    "template": {"type": "str"},
    "snapshot": {"type": "str"},
    "cpus": {"type": "int"},
    "memory_mb": {"type": "int"},
    "disk_mb": {"type": "int"},
    "cold_start": {"type": "bool", "default": False},
    "env": {"type": "dict"},
    "metadata": {"type": "dict"},
    "timeout": {"type": "int"},
    "network": {
        "type": "dict",
        "options": {
            "allow_internet": {"type": "bool"},
            "allow_out": {"type": "list", "elements": "str"},
            "deny_out": {"type": "list", "elements": "str"},
        },
    },
    "volumes": {"type": "list", "elements": "dict", "options": MOUNT_OPTIONS},
    "placement": PLACEMENT_OPTION,
    "recreate": {"type": "bool", "default": False},
    "continue_on_error": {"type": "bool", "default": False},
}
RULES: dict[str, Any] = {"mutually_exclusive": [("template", "snapshot")]}

SIZE_KEYS = tuple(SIZE_FIELDS)
TIMEOUT_TOLERANCE_SECONDS = 10
"""Seconds by which a sandbox's timeout may differ from the requested one, because of clock skew and request time."""
UNLIMITED_TIMEOUT = -1


@dataclass(frozen=True)
class DesiredState:
    """The user's options in canonical form. None means that an option is not set."""

    names: tuple[str, ...]
    state: str
    source_kind: str = ""
    source: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    cold_start: bool = False
    env: Mapping[str, str] | None = None
    metadata: Mapping[str, str] | None = None
    timeout: int | None = None
    network: Mapping[str, Any] | None = None
    mounts: tuple[Mount, ...] | None = None
    placement: Placement | None = None
    recreate: bool = False


@dataclass(frozen=True)
class CurrentState:
    """The state of the gateway that a plan needs.

    ``resources`` maps the requested names to sandboxes. ``taken_names`` and ``volumes`` are keyed by name. ``copies``
    holds the ids of other copies of the source in a fleet, if any sandbox may have been created from one.
    """

    resources: Mapping[str, Mapping[str, Any]]
    gateway_time: datetime
    source: Mapping[str, Any] | None = None
    taken_names: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, Any] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()


def parse_desired_state(params: Mapping[str, Any]) -> DesiredState:
    kind = next((option for option in ("template", "snapshot") if params.get(option)), "")
    return DesiredState(
        names=validate_names(params["name"], "sandbox"),
        state=params["state"],
        source_kind=kind,
        source=params[kind] if kind else "",
        sizes={
            option: require_minimum(params[option], 1, option) for option in SIZE_KEYS if params.get(option) is not None
        },
        cold_start=bool(params.get("cold_start")),
        env=stringify_values(params.get("env"), "env"),
        metadata=stringify_values(params.get("metadata"), "metadata"),
        timeout=validate_timeout(params.get("timeout")),
        network=_parse_network(params.get("network")),
        mounts=parse_mounts(params.get("volumes")),
        placement=_parse_placement(params),
        recreate=bool(params.get("recreate")),
    )


def _parse_placement(params: Mapping[str, Any]) -> Placement | None:
    placement = parse_placement(params.get("placement"))
    if placement and placement.anti_affinity and len(params["name"]) > 1:
        raise Failure(
            "placement.anti_affinity applies to the sandboxes of one request, but this module requests each sandbox "
            "on its own: use the module grove.sandbox.sandbox_fork, or set placement.host for each sandbox"
        )
    return placement


def validate_timeout(timeout: int | None) -> int | None:
    """Return ``timeout``, which may be None. Raises Failure if its value is not allowed."""
    if timeout != UNLIMITED_TIMEOUT:
        require_minimum(timeout, 1, "timeout (seconds, or -1 for never)")
    return timeout


def _parse_network(option: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if option is None:
        return None
    result = {key: value for key, value in option.items() if value is not None}
    for key, value in result.items():
        if isinstance(value, list):
            _check_addresses(value, f"network.{key}")
            result[key] = normalize_networks(value)
    return result


def _check_addresses(addresses: list[str], option: str) -> None:
    """Raise Failure if an entry has no address, because a template inserted a value that only the run can know."""
    for address in addresses:
        if address.partition("/")[0].strip() == "":
            with failures_conditional(f"only if {option} contains {address!r} in the run, too"):
                raise Failure(
                    f"{option} contains {address!r}, which has no address. In check mode, the address of a new sandbox "
                    "is null, for example: use an address that is known before the run, or give it a default for check "
                    "mode"
                )


def observe(client: Client, want: DesiredState) -> CurrentState:
    resources = find_sandboxes(client, want.names)
    if want.state == "absent":
        return CurrentState(resources, client.now())
    source, copies = None, frozenset[str]()
    if want.source:
        source = find_source(client, want.source_kind, want.source)
        copies = _find_copies(client, want, resources, source)
    missing_names = [name for name in want.names if name not in resources]
    taken_names = find_taken_names(client, missing_names, excluded_kind="sandbox")
    volumes = find_volumes(client, want.mounts, source)
    return CurrentState(resources, client.now(), source, taken_names, volumes, copies)


def _find_copies(
    client: Client, want: DesiredState, resources: Mapping[str, Mapping[str, Any]], source: Mapping[str, Any]
) -> frozenset[str]:
    """Return the ids of the source's copies in a fleet, if any sandbox was not created from ``source`` itself.

    Raises Failure if such a sandbox is on another host and was not created from a copy. Its host may have a different
    template with this name. With `recreate`, each task would then replace a sandbox that is as requested.
    """
    others = {name: shape for name, shape in resources.items() if shape["forked_from"] != source["id"]}
    if not others or HOST_KEY not in source:
        return frozenset()
    copies = find_copies(client, want.source, client.known_objects[_make_source_path(want.source_kind, want.source)])
    for name, shape in others.items():
        host = shape.get(HOST_KEY)
        if shape["forked_from"] not in copies and host and host != source[HOST_KEY]:
            raise Failure(
                f"sandbox {name!r} is on host {host!r}, but the gateway uses the {want.source_kind} {want.source!r} of "
                f"host {source[HOST_KEY]!r}, which is not the same: use the gateway of {host!r} for this task",
                "conflict",
                blockers=[shape["id"]],
            )
    return copies


def _make_source_path(kind: str, ref: str) -> str:
    return f"/{kind}s/{quote_segment(ref)}"


def find_sandboxes(client: Client, refs: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the shapes of the existing sandboxes among ``refs`` (names or ids), by ref.

    Usually sends one request.
    """
    if len(refs) == 1:
        # Use the list, because a request for a single sandbox makes the gateway check whether it has diverged.
        for detail in client.list_all("/sandboxes", name=refs[0]):
            return {refs[0]: make_sandbox_shape(detail)}
        detail = client.find(f"/sandboxes/{refs[0]}") if ID_PATTERN.fullmatch(refs[0]) else None
        return {} if detail is None else {refs[0]: make_sandbox_shape(detail)}
    shapes: dict[str, dict[str, Any]] = {}
    requested_refs = set(refs)
    for detail in client.list_all("/sandboxes"):
        shape = make_sandbox_shape(detail)
        for ref in requested_refs.intersection((shape["name"], shape["id"])):
            # A name takes precedence over an id, as in the gateway.
            if ref not in shapes or shape["name"] == ref:
                shapes[ref] = shape
    return shapes


def find_source(client: Client, kind: str, ref: str) -> dict[str, Any]:
    """Return the shape of a template or snapshot. Raises Failure if it does not exist, or is not ready."""
    entry = client.get(_make_source_path(kind, ref))
    if kind == "snapshot":
        return make_snapshot_shape(entry)
    shape = make_template_shape(entry)
    # The gateway also lists templates that are being built, and failed builds.
    if shape["status"] != "ready":
        raise _refusals.create_template_unusable_error(ref, shape["status"])
    return shape


def make_view(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a sandbox that a task can declare."""
    result = {key: shape[key] for key in ("name", "state", "forked_from", *SIZE_KEYS, "metadata", "volumes")}
    network = shape["network"]
    result["network"] = {
        "allow_internet": network["allow_internet"],
        "allow_out": normalize_networks(network["allow_out"]),
        "deny_out": normalize_networks(network["deny_out"]),
    }
    result["timeout"] = compute_timeout(shape)
    return result


def compute_timeout(shape: Mapping[str, Any]) -> int:
    """Return the timeout of a sandbox in seconds, starting at its creation, or -1 if it is unlimited."""
    created_at, end = parse_time(shape["created_at"]), parse_time(shape["end_at"])
    return UNLIMITED_TIMEOUT if created_at is None or end is None else round((end - created_at).total_seconds())


def list_named_paths(want: DesiredState, have: CurrentState) -> list[str]:
    return list_mounted_paths(want.mounts, have.source)


def plan(want: DesiredState, have: CurrentState) -> Plan:
    planner = Planner()
    for name in want.names:
        planner.add(name, lambda name=name: _plan_sandbox(want, have, name))
    return planner.plan()


def _plan_sandbox(want: DesiredState, have: CurrentState, name: str) -> list[Action]:
    current_shape = have.resources.get(name)
    if want.state == "absent":
        return [] if current_shape is None else [plan_removal(name, current_shape)]
    if current_shape is None:
        return [_plan_creation(want, have, name)]
    differences = _find_fixed_differences(want, have, current_shape)
    if differences and want.recreate:
        return [_plan_replacement(want, have, name, current_shape)]
    if differences:
        raise Failure(
            f"sandbox {name!r} {' and '.join(differences)}, which cannot change during its lifetime: set "
            "recreate: true to replace it, which loses its contents",
            "conflict",
            blockers=[current_shape["id"]],
        )
    return _plan_changes(want, have, name, current_shape)


def _find_fixed_differences(want: DesiredState, have: CurrentState, current_shape: Mapping[str, Any]) -> list[str]:
    differences = []
    if have.source is not None and current_shape["forked_from"] not in {have.source["id"], *have.copies}:
        differences.append(
            f"was created from {current_shape['forked_from']}, not from {want.source_kind} {want.source!r}"
        )
    for key, value in want.sizes.items():
        if current_shape[key] != value:
            differences.append(f"has {key} {current_shape[key]}, not {value}")
    return differences


def _plan_creation(want: DesiredState, have: CurrentState, name: str) -> Action:
    if name in have.taken_names:
        raise _refusals.create_name_taken_error(name, have.taken_names[name])
    if have.source is None:
        raise Failure(
            f"sandbox {name!r} does not exist, and creating it requires a source: set 'template' or 'snapshot'",
            "not_found",
        )
    check_placement(want.placement, have.source)
    check_sizes(want.sizes, have.source, want.cold_start)
    check_mounts(want.mounts, have.source, have.volumes)
    request = {"body": _build_request_body(want, name, have.source), "ref": (want.source_kind, want.source)}
    return Action("create", (Change(name, None, _make_new_view(want, name, have.source)),), request)


def _plan_replacement(want: DesiredState, have: CurrentState, name: str, current_shape: Mapping[str, Any]) -> Action:
    source = have.source
    if source is None:
        raise Failure(f"replacing sandbox {name!r} requires a source: set 'template' or 'snapshot'")
    check_placement(want.placement, source)
    check_sizes(want.sizes, source, want.cold_start)
    check_mounts(want.mounts, source, have.volumes)
    request = {
        "id": current_shape["id"],
        "temporary_name": make_temporary_name(current_shape["name"], current_shape["id"]),
        "body": _build_request_body(want, current_shape["name"], source),
        "ref": (want.source_kind, want.source),
    }
    after = _make_new_view(want, current_shape["name"], source)
    return Action("replace", (Change(name, keep_common_keys(make_view(current_shape), after), after),), request)


def _make_new_view(want: DesiredState, name: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the view of a new sandbox.

    Omits ``timeout`` if the gateway's configuration determines it, and ``forked_from`` if the gateway can choose a host
    with another copy of the source.
    """
    after: dict[str, Any] = {
        "name": name,
        "state": "paused" if want.state == "paused" else "running",
        "forked_from": source["id"],
        **{key: want.sizes.get(key, source[key]) for key in SIZE_KEYS},
        "metadata": dict(want.metadata or {}),
        "network": {"allow_internet": True, "allow_out": [], "deny_out": [], **(want.network or {})},
        "volumes": predict_mounts(want.mounts, source),
    }
    if want.timeout is not None:
        after["timeout"] = want.timeout
    if want.placement is not None:
        del after["forked_from"]
    return after


def _build_request_body(want: DesiredState, name: str, source: Mapping[str, Any]) -> dict[str, Any]:
    # All hosts with a copy know the name of the source, but only one knows its id.
    ref = source["id"] if want.placement is None else want.source
    body: dict[str, Any] = {"templateID": ref, "name": name, "metadata": dict(want.metadata or {})}
    if want.placement is not None:
        body["placement"] = want.placement.build_request_fields()
    body.update(build_size_fields(want.sizes))
    if want.env:
        body["envVars"] = dict(want.env)
    if want.network is not None:
        body["network"] = _build_network_fields(
            {"allow_internet": True, "allow_out": [], "deny_out": [], **want.network}
        )
    if want.mounts is not None:
        body["volumeMounts"] = [mount.build_request_fields() for mount in want.mounts]
    if want.timeout is not None:
        body["timeout"] = want.timeout
    if want.cold_start:
        body["coldStart"] = True
    if want.state == "paused":
        body["paused"] = True
    return body


def check_sizes(sizes: Mapping[str, int], source: Mapping[str, Any], cold_start: bool) -> None:
    """Raise Failure if a fork of ``source`` cannot have these sizes."""
    differences = [f"{key} {source[key]}, not {value}" for key, value in sizes.items() if source[key] != value]
    if sizes.get("disk_mb", source["disk_mb"]) < source["disk_mb"]:
        raise _refusals.create_disk_too_small_error(sizes["disk_mb"], source["disk_mb"])
    if differences and not cold_start and source.get("memory", "none") != "none":
        raise _refusals.create_sizes_differ_error(source["name"] or source["id"], differences)


def predict_mounts(mounts: tuple[Mount, ...] | None, source: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the mounts of a fork of ``source``, which inherits the source's mounts if ``mounts`` is None."""
    return (
        [dict(each) for each in source.get("mounts", [])] if mounts is None else [each.make_view() for each in mounts]
    )


def check_mounts(mounts: tuple[Mount, ...] | None, source: Mapping[str, Any], volumes: Mapping[str, Any]) -> None:
    """Raise Failure if a requested volume, or an inherited one if ``mounts`` is None, does not exist."""
    check_volumes_exist(mounts, volumes)
    missing_names = find_missing_volumes(source, volumes) if mounts is None else []
    if missing_names:
        raise _refusals.create_volumes_lost_error(source["name"] or source["id"], missing_names)


def build_size_fields(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes as the gateway's request fields."""
    return {SIZE_FIELDS[key]: value for key, value in sizes.items()}


def _build_network_fields(network: Mapping[str, Any]) -> dict[str, Any]:
    return {field: network[option] for option, field in NETWORK_FIELDS.items()}


def _plan_changes(want: DesiredState, have: CurrentState, name: str, current_shape: Mapping[str, Any]) -> list[Action]:
    """Return the actions that change an existing sandbox. Resuming comes first, and pausing comes last."""
    before = make_view(current_shape)
    actions: list[Action] = []

    def add_step(verb: str, request: Mapping[str, Any], **changes: Any) -> None:
        nonlocal before
        after = {**before, **changes}
        actions.append(Action(verb, (Change(name, before, after),), {"id": current_shape["id"], **request}))
        before = after

    check_volumes_exist(want.mounts, have.volumes)
    if want.state == "running" and current_shape["state"] == "paused":
        add_step("resume", {}, state="running")
    network = {**before["network"], **(want.network or {})}
    if network != before["network"]:
        add_step("set_network", {"body": _build_network_fields(network)}, network=network)
    if want.metadata is not None and want.metadata != before["metadata"]:
        add_step("update", {"body": {"metadata": dict(want.metadata)}}, metadata=dict(want.metadata))
    actions += plan_remounts(name, current_shape, before, want.mounts)
    before = get_final_view(actions, before)
    if timeout_differs(want.timeout, before["timeout"]):
        add_step(
            "set_timeout",
            {"end": compute_timeout_end(want.timeout, name, current_shape, have.gateway_time)},
            timeout=want.timeout,
        )
    if want.state == "paused" and before["state"] == "running":
        add_step("pause", {}, state="paused")
    return actions


def plan_remounts(
    name: str, current_shape: Mapping[str, Any], before: Mapping[str, Any], mounts: tuple[Mount, ...] | None
) -> list[Action]:
    """Return the actions that replace the mounts in the view ``before`` with ``mounts``. Detaching comes first."""
    requested_mounts = [] if mounts is None else [mount.make_view() for mount in mounts]
    surplus_mounts = [] if mounts is None else [each for each in before["volumes"] if each not in requested_mounts]
    missing_mounts = [mount for mount in mounts or () if mount.make_view() not in before["volumes"]]
    if missing_mounts:
        check_running(name, before, current_shape["id"])
    actions = []

    def add_step(verb: str, request: Mapping[str, Any], volumes: list[Any]) -> None:
        nonlocal before
        after = {**before, "volumes": sorted(volumes, key=lambda each: each["path"])}
        actions.append(Action(verb, (Change(name, before, after),), {"id": current_shape["id"], **request}))
        before = after

    for each in surplus_mounts:
        add_step("detach", {"volume": each["name"]}, [other for other in before["volumes"] if other != each])
    for mount in missing_mounts:
        add_step("attach", {"body": mount.build_request_fields()}, [*before["volumes"], mount.make_view()])
    return actions


def get_final_view(actions: list[Action], before: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the view of a resource after ``actions``, or ``before`` if there are none."""
    return actions[-1].changes[0].after or {} if actions else before


def timeout_differs(timeout: int | None, current_timeout: int) -> bool:
    """Return whether the requested ``timeout``, which may be None, requires a change of ``current_timeout``."""
    if timeout is None:
        return False
    if UNLIMITED_TIMEOUT in (timeout, current_timeout):
        return timeout != current_timeout
    return abs(timeout - current_timeout) > TIMEOUT_TOLERANCE_SECONDS


def compute_timeout_end(
    timeout: int | None, name: str, current_shape: Mapping[str, Any], now: datetime
) -> datetime | None:
    """Return the time ``timeout`` seconds after the sandbox's creation, or None if ``timeout`` sets no limit.

    Raises Failure if that time has already passed.
    """
    created_at = parse_time(current_shape["created_at"])
    if timeout in (None, UNLIMITED_TIMEOUT) or created_at is None:
        return None
    end = created_at + timedelta(seconds=timeout)
    if end <= now:
        raise Failure(
            f"sandbox {name!r} was created at {current_shape['created_at']} and is already older than the timeout of "
            f"{timeout} s: set a longer timeout, or remove the sandbox with state: absent",
            "conflict",
            blockers=[current_shape["id"]],
        )
    return end


def plan_removal(name: str, current_shape: Mapping[str, Any]) -> Action:
    return Action("remove", (Change(name, make_view(current_shape), None),), {"id": current_shape["id"]})


def apply(action: Action, client: Client) -> dict[str, Failure]:
    """Carry out one action. Returns {}, because each of these actions affects only one sandbox. Raises Failure."""
    request = action.request
    if action.verb in ("create", "replace"):
        body = dict(request["body"])
        old_sandboxes: list[tuple[str, str, str]] = []
        if action.verb == "replace":
            old_sandboxes = [(request["id"], body["name"], request["temporary_name"])]
        with removal_explained(*request["ref"], body["templateID"]):
            replace(client, old_sandboxes, lambda: client.post("/sandboxes", body))
    else:
        apply_to_sandbox(action, client)
    return {}


def apply_to_sandbox(action: Action, client: Client) -> None:
    """Carry out one action on an existing sandbox."""
    request = action.request
    path = f"/sandboxes/{quote_segment(request['id'])}"
    if action.verb == "remove":
        client.delete(path)
    elif action.verb == "resume":
        # After a reboot of the host, the gateway may already be starting the sandbox, which this request accepts.
        client.post(f"{path}/connect")
    elif action.verb == "pause":
        client.post(f"{path}/pause")
    elif action.verb == "set_network":
        client.put(f"{path}/network", dict(request["body"]))
    elif action.verb == "update":
        client.patch(path, dict(request["body"]))
    elif action.verb == "attach":
        client.post(f"{path}/volumes", dict(request["body"]))
    elif action.verb == "detach":
        client.delete(f"{path}/volumes/{quote_segment(request['volume'])}")
    elif action.verb == "set_timeout":
        client.post(f"{path}/timeout", {"timeout": _compute_remaining_seconds(request["end"], client)})
    else:
        raise ValueError(f"unknown action {action.verb}")


def _compute_remaining_seconds(end: datetime | None, client: Client) -> int:
    return UNLIMITED_TIMEOUT if end is None else max(1, round((end - client.now()).total_seconds()))


def replace(client: Client, old_sandboxes: list[tuple[str, str, str]], create: Any) -> Any:
    """Rename ``old_sandboxes``, create their replacements with ``create()``, then remove the old sandboxes.

    ``old_sandboxes`` lists (id, name, temporary name). On failure, the old sandboxes get their names back. Returns the
    result of ``create``.
    """
    renamed_sandboxes = []
    try:
        for ident, name, temporary_name in old_sandboxes:
            client.patch(f"/sandboxes/{quote_segment(ident)}", {"name": temporary_name})
            renamed_sandboxes.append((ident, name))
        result = create()
    except BaseException:
        for ident, name in renamed_sandboxes:
            client.patch(f"/sandboxes/{quote_segment(ident)}", {"name": name})
        raise
    for ident, _name in renamed_sandboxes:
        client.delete(f"/sandboxes/{quote_segment(ident)}")
    return result


def get_result_lists(want: DesiredState) -> dict[str, tuple[str, ...]]:
    """Return the keys of the result's lists, in order, with the names of the resources in each list."""
    return {PLURAL: want.names}


def get_resources_by_name(want: DesiredState, have: CurrentState) -> Mapping[str, Mapping[str, Any]]:
    return have.resources
