# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement ``sandbox_rollback``: give sandboxes the state of a snapshot, under the same ids and names."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._client import segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, still_there
from ansible_collections.grove.sandbox.plugins.module_utils._names import holders
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    SNAPSHOT,
    Action,
    Change,
    Plan,
    Planner,
    checked_names,
)
from ansible_collections.grove.sandbox.plugins.module_utils._sandbox import SIZES
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import (
    SANDBOX_KEYS,
    SNAPSHOT_KEYS,
    sandbox_shape,
    snapshot_shape,
)
from ansible_collections.grove.sandbox.plugins.module_utils._snapshot import (
    captured_view,
    check_running_for_capture,
    find_snapshots,
)

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

SINGULAR, PLURAL = "sandbox", "sandboxes"
SHOWN = {PLURAL: SANDBOX_KEYS, "backups": SNAPSHOT_KEYS}

ARGUMENTS: dict[str, Any] = {
    "sandbox": {"type": "list", "elements": "str", "required": True, "aliases": ["name", "names", "sandboxes"]},
    "snapshot": {"type": "str", "required": True},
    "unless_clean": {"type": "bool", "default": True},
    "backup_name": {"type": "list", "elements": "str"},
    "continue_on_error": {"type": "bool", "default": False},
}
RULES: dict[str, Any] = {}


@dataclass(frozen=True)
class Desired:
    """The user's options. ``backups``: sandbox → name of the snapshot to take first; empty if none is requested."""

    names: tuple[str, ...]
    snapshot: str
    unless_clean: bool = True
    backups: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Current:
    things: Mapping[str, Mapping[str, Any]]
    snapshot: Mapping[str, Any]
    taken: Mapping[str, str] = field(default_factory=dict)
    backups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def desired(params: Mapping[str, Any]) -> Desired:
    names = checked_names(params["sandbox"], "sandbox")
    backups = params.get("backup_name") or []
    if backups and len(backups) != len(names):
        raise Failure(
            f"backup_name has {len(backups)} names, but there are {len(names)} sandboxes: list one name for "
            "each sandbox"
        )
    return Desired(
        names=names,
        snapshot=params["snapshot"],
        unless_clean=params.get("unless_clean") is not False,
        backups=dict(zip(names, checked_names(backups, "snapshot"))) if backups else {},
    )


def observe(client: Client, want: Desired) -> Current:
    snapshot = snapshot_shape(client.get(f"/snapshots/{segment(want.snapshot)}"))
    things = {}
    for ref in want.names:
        detail = client.find(f"/sandboxes/{segment(ref)}")
        if detail is not None:
            things[ref] = sandbox_shape(detail)
    names = tuple(want.backups.values())
    backups = find_snapshots(client, names)
    taken = holders(client, [name for name in names if name not in backups], other_than="snapshot")
    return Current(things, snapshot, {**taken, **dict.fromkeys(backups, "snapshot")}, backups)


def view(shape: Mapping[str, Any]) -> dict[str, Any]:
    return {key: shape[key] for key in ("name", "state", "snapshot_id", "diverged", *SIZES)}


def plan(want: Desired, have: Current) -> Plan:
    planner = Planner()
    for name in want.names:
        planner.item(name, lambda name=name: _plan_one(want, have, name))
    return planner.plan()


def _plan_one(want: Desired, have: Current, name: str) -> list[Action]:
    now = have.things.get(name)
    if now is None:
        raise Failure(f"sandbox {name!r} not found", "not_found")
    target = have.snapshot["id"]
    if want.unless_clean and now["snapshot_id"] == target and now["diverged"] is False:
        return []
    after = {"name": now["name"], "state": "running", "snapshot_id": target, "diverged": False}
    # A diff cannot show lost processes and memory, so this key marks a rollback even if no file has changed.
    after["content_of"] = have.snapshot["name"] or target
    after.update({key: have.snapshot[key] for key in SIZES})
    changes = [Change(name, view(now), after)]
    request: dict[str, Any] = {"sandbox": now["id"], "snapshot": target, "ref": want.snapshot}
    backup = want.backups.get(name)
    if backup:
        if backup in have.taken:
            raise _refusals.name_taken(backup, have.taken[backup])
        check_running_for_capture(name, now)
        changes.append(Change(backup, None, captured_view(backup, now, _reason(have)), SNAPSHOT))
        request["backup"] = {"name": backup, "description": _reason(have)}
    return [Action("rollback", tuple(changes), request)]


def _reason(have: Current) -> str:
    return f"before the rollback to {have.snapshot['name'] or have.snapshot['id']}"


def apply(action: Action, client: Client) -> dict[str, Failure]:
    """Take the backup first, and remove it if the rollback fails. Raises Failure."""
    request = action.request
    place, target = f"/sandboxes/{segment(request['sandbox'])}", request["snapshot"]
    with still_there("snapshot", request["ref"], target):
        if "backup" in request:
            client.get(f"/snapshots/{segment(target)}")
            taken = client.post(f"{place}/snapshots", dict(request["backup"]))["snapshotID"]
        try:
            client.post(f"{place}/rollback", {"snapshotID": target})
        except Failure as failure:
            # Without a response, the rollback may still be running, and the backup may be the only copy left.
            if "backup" in request and failure.status is not None:
                with contextlib.suppress(Failure):
                    client.delete(f"/snapshots/{segment(taken)}")
            raise
    return {}


def lists(want: Desired) -> dict[str, tuple[str, ...]]:
    """Return the lists of a result, in order: key → names."""
    return {PLURAL: want.names, "backups": tuple(want.backups.values())}


def things_of(want: Desired, have: Current) -> Mapping[str, Mapping[str, Any]]:
    return {**have.backups, **have.things}
