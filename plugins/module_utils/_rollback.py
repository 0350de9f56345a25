# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement ``sandbox_rollback``: restore a snapshot in existing sandboxes, which keep their ids and names."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._client import quote_segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, removal_explained
from ansible_collections.grove.sandbox.plugins.module_utils._mounts import list_volume_paths
from ansible_collections.grove.sandbox.plugins.module_utils._names import find_taken_names
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    SNAPSHOT,
    Action,
    Change,
    Plan,
    Planner,
    failures_conditional,
    make_diverged_condition,
    may_have_diverged,
    validate_names,
)
from ansible_collections.grove.sandbox.plugins.module_utils._sandbox import SIZE_KEYS
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import (
    SANDBOX_KEYS,
    SNAPSHOT_KEYS,
    make_sandbox_shape,
    make_snapshot_shape,
)
from ansible_collections.grove.sandbox.plugins.module_utils._snapshot import (
    check_running_for_capture,
    find_snapshots,
    predict_captured_view,
)

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

SINGULAR, PLURAL = "sandbox", "sandboxes"
RESULT_KEYS = {PLURAL: SANDBOX_KEYS, "backups": SNAPSHOT_KEYS}

ARGUMENTS: dict[str, Any] = {
    "sandbox": {"type": "list", "elements": "str", "required": True, "aliases": ["name", "names", "sandboxes"]},
    "snapshot": {"type": "str", "required": True},
    "unless_clean": {"type": "bool", "default": True},
    "backup_name": {"type": "list", "elements": "str"},
    "continue_on_error": {"type": "bool", "default": False},
}
RULES: dict[str, Any] = {}


@dataclass(frozen=True)
class DesiredState:
    """The user's options. ``backups`` maps each sandbox to the name of its backup; it is empty without backups."""

    names: tuple[str, ...]
    snapshot: str
    unless_clean: bool = True
    backups: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CurrentState:
    resources: Mapping[str, Mapping[str, Any]]
    snapshot: Mapping[str, Any]
    taken_names: Mapping[str, str] = field(default_factory=dict)
    backups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_session: bool = False
    """Whether this is the state of a plan session."""


def parse_desired_state(params: Mapping[str, Any]) -> DesiredState:
    names = validate_names(params["sandbox"], "sandbox")
    backup_names = params.get("backup_name") or []
    if backup_names and len(backup_names) != len(names):
        raise Failure(
            f"backup_name has {len(backup_names)} names, but there are {len(names)} sandboxes: list one name for "
            "each sandbox"
        )
    return DesiredState(
        names=names,
        snapshot=params["snapshot"],
        unless_clean=params.get("unless_clean") is not False,
        backups=dict(zip(names, validate_names(backup_names, "snapshot"))) if backup_names else {},
    )


def observe(client: Client, want: DesiredState) -> CurrentState:
    snapshot = make_snapshot_shape(client.get(f"/snapshots/{quote_segment(want.snapshot)}"))
    resources = {}
    for ref in want.names:
        entry = client.find(f"/sandboxes/{quote_segment(ref)}")
        if entry is not None:
            resources[ref] = make_sandbox_shape(entry)
    backup_names = tuple(want.backups.values())
    backups = find_snapshots(client, backup_names)
    taken_names = find_taken_names(
        client, [name for name in backup_names if name not in backups], excluded_kind="snapshot"
    )
    taken_names.update(dict.fromkeys(backups, "snapshot"))
    return CurrentState(resources, snapshot, taken_names, backups, is_session=client.is_planning)


def make_view(shape: Mapping[str, Any]) -> dict[str, Any]:
    return {key: shape[key] for key in ("name", "state", "snapshot_id", "diverged", *SIZE_KEYS)}


def list_named_paths(want: DesiredState, have: CurrentState) -> list[str]:
    mounts = [*have.snapshot["mounts"], *(each for shape in have.resources.values() for each in shape["volumes"])]
    return list_volume_paths([*have.snapshot["volumes"], *(each["name"] for each in mounts)])


def plan(want: DesiredState, have: CurrentState) -> Plan:
    planner = Planner()
    for name in want.names:
        planner.add(name, lambda name=name: _plan_sandbox(want, have, name))
    return planner.plan()


def _plan_sandbox(want: DesiredState, have: CurrentState, name: str) -> list[Action]:
    current_shape = have.resources.get(name)
    if current_shape is None:
        raise Failure(f"sandbox {name!r} not found: check the name, or create the sandbox first", "not_found")
    target_id = have.snapshot["id"]
    condition, is_expected = "", True
    if want.unless_clean and current_shape["snapshot_id"] == target_id:
        is_expected = current_shape["diverged"] is not False
        if not is_expected and not (have.is_session and may_have_diverged(current_shape)):
            return []
        condition = make_diverged_condition(current_shape)
    after = {"name": current_shape["name"], "state": "running", "snapshot_id": target_id, "diverged": False}
    # A diff cannot show the loss of processes and memory, so this key shows a rollback even if no file has changed.
    after["content_of"] = have.snapshot["name"] or target_id
    after.update({key: have.snapshot[key] for key in SIZE_KEYS})
    changes = [Change(name, make_view(current_shape), after)]
    request: dict[str, Any] = {"sandbox": current_shape["id"], "snapshot": target_id, "ref": want.snapshot}
    backup_name = want.backups.get(name)
    if backup_name:
        with failures_conditional(condition, is_expected=is_expected):
            if backup_name in have.taken_names:
                raise _refusals.create_name_taken_error(backup_name, have.taken_names[backup_name])
            check_running_for_capture(name, current_shape)
        changes.append(
            Change(
                backup_name,
                None,
                predict_captured_view(backup_name, current_shape, _make_backup_description(have)),
                SNAPSHOT,
            )
        )
        request["backup"] = {"name": backup_name, "description": _make_backup_description(have)}
    return [Action("rollback", tuple(changes), request, condition, is_expected)]


def _make_backup_description(have: CurrentState) -> str:
    return f"before the rollback to {have.snapshot['name'] or have.snapshot['id']}"


def apply(action: Action, client: Client) -> dict[str, Failure]:
    """Take the requested backup and roll back a sandbox. Removes the backup if the rollback fails. Raises Failure."""
    request = action.request
    path, target_id = f"/sandboxes/{quote_segment(request['sandbox'])}", request["snapshot"]
    with removal_explained("snapshot", request["ref"], target_id):
        if "backup" in request:
            client.get(f"/snapshots/{quote_segment(target_id)}")
            backup_id = client.post(f"{path}/snapshots", dict(request["backup"]))["snapshotID"]
        try:
            client.post(f"{path}/rollback", {"snapshotID": target_id})
        except Failure as failure:
            # Without a response, the rollback may still be running, and the backup may be the only remaining copy.
            if "backup" in request and failure.status is not None:
                with contextlib.suppress(Failure):
                    client.delete(f"/snapshots/{quote_segment(backup_id)}")
            raise
    return {}


def get_result_lists(want: DesiredState) -> dict[str, tuple[str, ...]]:
    """Return the keys of the result's lists, in order, with the names of the resources in each list."""
    return {PLURAL: want.names, "backups": tuple(want.backups.values())}


def get_resources_by_name(want: DesiredState, have: CurrentState) -> Mapping[str, Mapping[str, Any]]:
    return {**have.backups, **have.resources}
