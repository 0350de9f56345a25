# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement ``sandbox_snapshot``: capture sandboxes in named snapshots, and remove snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    at_least,
    checked_names,
)
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import (
    SNAPSHOT_KEYS,
    sandbox_shape,
    snapshot_shape,
)

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

    Users = Mapping[str, tuple[str, ...]]
    """Names by kind of object: "sandbox" or "volume"."""

SINGULAR, PLURAL = "snapshot", "snapshots"
SHOWN = {PLURAL: SNAPSHOT_KEYS}

ARGUMENTS: dict[str, Any] = {
    "name": {"type": "list", "elements": "str", "required": True, "aliases": ["names"]},
    "sandbox": {"type": "list", "elements": "str", "aliases": ["sandboxes"]},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "description": {"type": "str"},
    "memory": {"type": "str", "choices": ["auto", "none"], "default": "auto"},
    "volumes": {"type": "list", "elements": "str"},
    "expires_in": {"type": "int"},
    "retention": {
        "type": "dict",
        "options": {"keep_last": {"type": "int"}, "keep_daily": {"type": "int"}, "max_age": {"type": "int"}},
        "required_one_of": [("keep_last", "keep_daily", "max_age")],
    },
    "when_changed": {"type": "bool", "default": False},
    "when_unused": {"type": "bool", "default": False},
    "continue_on_error": {"type": "bool", "default": False},
}
RULES: dict[str, Any] = {"required_if": [("state", "present", ("sandbox",))]}


@dataclass(frozen=True)
class Desired:
    """The user's options. ``sandboxes``: snapshot name → sandbox to capture; empty for ``absent``."""

    names: tuple[str, ...]
    state: str
    sandboxes: Mapping[str, str] = field(default_factory=dict)
    description: str | None = None
    memory: str = "auto"
    volumes: tuple[str, ...] | None = None
    expires_in: int | None = None
    retention: Mapping[str, int] | None = None
    when_changed: bool = False
    when_unused: bool = False


@dataclass(frozen=True)
class Current:
    """The current state: snapshots by requested name, sandboxes by the given ref, heads and users by id."""

    things: Mapping[str, Mapping[str, Any]]
    sandboxes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    heads: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    taken: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, Users] = field(default_factory=dict)


def desired(params: Mapping[str, Any]) -> Desired:
    names = checked_names(params["name"], "snapshot")
    sandboxes = params.get("sandbox") or []
    if params["state"] == "present" and len(sandboxes) not in (1, len(names)):
        raise Failure(
            f"there are {len(names)} names, but {len(sandboxes)} sandboxes: list one sandbox, or one for each name"
        )
    if len(sandboxes) == 1:
        sandboxes = sandboxes * len(names)
    if params.get("when_changed") and len(set(sandboxes)) < len(sandboxes):
        raise Failure("with when_changed a sandbox can be captured under only one name: use one name for each sandbox")
    return Desired(
        names=names,
        state=params["state"],
        sandboxes=dict(zip(names, sandboxes)),
        description=params.get("description"),
        memory=params.get("memory") or "auto",
        volumes=_volumes(params.get("volumes")),
        expires_in=at_least(params.get("expires_in"), 1, "expires_in (seconds)"),
        retention=_rule(params.get("retention")),
        when_changed=bool(params.get("when_changed")),
        when_unused=bool(params.get("when_unused")),
    )


def _rule(given: Mapping[str, Any] | None) -> dict[str, int] | None:
    """Return the request fields of the gateway."""
    if given is None:
        return None
    spelt = {"keep_last": "keepLast", "keep_daily": "keepDaily", "max_age": "maxAge"}
    return {spelt[key]: at_least(value, 1, f"retention.{key}") for key, value in given.items() if value is not None}


def _volumes(given: list[str] | None) -> tuple[str, ...] | None:
    return checked_names(given, "volume") if given else None if given is None else ()


def observe(client: Client, want: Desired) -> Current:
    things = find_snapshots(client, want.names)
    if want.state == "absent":
        return Current(things, users={} if want.when_unused else users_of(client, things.values()))
    missing = [name for name in want.names if name not in things]
    refs = dict.fromkeys(want.sandboxes[name] for name in want.names)
    needed = {want.sandboxes[name] for name in missing}
    sandboxes = {}
    for ref in refs:
        place = f"/sandboxes/{segment(ref)}"
        # A snapshot can outlive its sandbox: the sandbox only has to exist if a snapshot is still to be taken.
        detail = client.get(place) if ref in needed else client.find(place)
        if detail is not None:
            sandboxes[ref] = sandbox_shape(detail)
    heads = {}
    if want.when_changed:
        for ref in needed:
            head = client.find(f"/snapshots/{segment(sandboxes[ref]['snapshot_id'] or '-')}")
            if head is not None and head.get("kind", "snapshot") == "snapshot":
                heads[head["snapshotID"]] = snapshot_shape(head)
    return Current(things, sandboxes, heads, holders(client, missing, other_than="snapshot"))


def find_snapshots(client: Client, refs: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the shapes of the snapshots among ``refs`` (names or ids), by ref."""
    found = {}
    for ref in refs:
        snapshot = client.find(f"/snapshots/{segment(ref)}")
        # The gateway also returns templates here.
        if snapshot is not None and snapshot.get("kind", "snapshot") == "snapshot":
            found[ref] = snapshot_shape(snapshot)
    return found


def users_of(client: Client, snapshots: Iterable[Mapping[str, Any]]) -> dict[str, Users]:
    """Return what prevents the removal of ``snapshots`` or templates: snapshot id → kind of object → names.

    The gateway decides, because that depends on its host: it also names cloned volumes, and sandboxes that were rolled
    back to the snapshot.
    """
    found = {}
    for shape in snapshots:
        detail = client.find(f"/snapshots/{segment(shape['id'])}") or {}
        users: dict[str, tuple[str, ...]] = {}
        for each in detail.get("users") or ():
            users[each["kind"]] = (*users.get(each["kind"], ()), each["name"])
        if users:
            found[shape["id"]] = users
    return found


def view(shape: Mapping[str, Any]) -> dict[str, Any]:
    return {key: shape[key] for key in ("name", "description", "source_sandbox_id", "status", "volumes")}


def plan(want: Desired, have: Current) -> Plan:
    planner = Planner()
    for name in want.names:
        planner.item(name, lambda name=name: _plan_one(want, have, name))
    return planner.plan()


def _plan_one(want: Desired, have: Current, name: str) -> list[Action]:
    now = have.things.get(name)
    if want.state == "absent":
        return [] if now is None else [_remove(want, have, name, now)]
    if now is not None:
        _check_same(want, have, name, now)
        return []
    if name in have.taken:
        raise _refusals.name_taken(name, have.taken[name])
    sandbox = have.sandboxes[want.sandboxes[name]]
    if want.when_changed and unchanged_since(want, have, sandbox) is not None:
        return []
    check_running_for_capture(want.sandboxes[name], sandbox)
    return [_capture(want, name, sandbox)]


def _capture(want: Desired, name: str, sandbox: Mapping[str, Any]) -> Action:
    for volume in want.volumes or ():
        if all(each["name"] != volume for each in sandbox["volumes"]):
            raise _refusals.volume_not_mounted(volume, sandbox["name"], sandbox["id"])
    body: dict[str, Any] = {"name": name, "description": want.description or "", "memory": want.memory}
    if want.volumes:
        body["volumes"] = list(want.volumes)
    if want.expires_in is not None:
        body["expiresIn"] = want.expires_in
    if want.retention is not None:
        body["retention"] = dict(want.retention)
    after = captured_view(name, sandbox, want.description, want.volumes or ())
    request = {"sandbox": sandbox["id"], "ref": want.sandboxes[name], "body": body}
    return Action("capture", (Change(name, None, after, SNAPSHOT),), request)


def check_running_for_capture(ref: str, sandbox: Mapping[str, Any]) -> None:
    """Raise Failure for a paused sandbox, which cannot be captured."""
    if sandbox["state"] != "running":
        raise _refusals.paused_for_capture(ref, sandbox["id"])


def captured_view(
    name: str, sandbox: Mapping[str, Any], description: str | None, volumes: Iterable[str] = ()
) -> dict[str, Any]:
    return {
        "name": name,
        "description": description or "",
        "source_sandbox_id": sandbox["id"],
        "status": "ready",
        "mounts": sandbox["volumes"],
        "volumes": sorted(volumes),
        **{key: sandbox[key] for key in ("cpus", "memory_mb", "disk_mb")},
    }


def unchanged_since(want: Desired, have: Current, sandbox: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the sandbox's last snapshot, if its file system has not changed since and it holds the requested
    volumes.
    """
    head = have.heads.get(sandbox["snapshot_id"])
    if head is None or head["source_sandbox_id"] != sandbox["id"] or sandbox["diverged"] is not False:
        return None
    return head if set(want.volumes or ()) <= set(head["volumes"]) else None


def _check_same(want: Desired, have: Current, name: str, now: Mapping[str, Any]) -> None:
    """Raise Failure if the existing snapshot differs from the request, since snapshots never change."""
    sandbox = have.sandboxes.get(want.sandboxes[name])
    other = []
    if sandbox is not None and now["source_sandbox_id"] != sandbox["id"]:
        other.append(f"is of sandbox {now['source_sandbox_id']}, not of {want.sandboxes[name]!r}")
    if want.description is not None and now["description"] != want.description:
        other.append(f"has the description {now['description']!r}")
    if want.memory == "none" and now["memory"] != "none":
        other.append("holds memory")
    if want.volumes is not None and now["volumes"] != sorted(want.volumes):
        other.append(f"includes the volumes {', '.join(now['volumes'])}" if now["volumes"] else "includes no volume")
    if other:
        raise Failure(
            f"snapshot {name!r} exists and {' and '.join(other)}: a snapshot never changes, so choose "
            "another name, or remove it first with state: absent",
            "conflict",
            blockers=[now["id"]],
        )


def _remove(want: Desired, have: Current, name: str, now: Mapping[str, Any]) -> Action:
    check_unused("snapshot", name, have.users.get(now["id"]))
    request = {"place": f"/snapshots/{segment(now['id'])}", "when_unused": want.when_unused}
    return Action("remove", (Change(name, view(now), None, SNAPSHOT),), request)


def check_unused(what: str, name: str, users: Users | None) -> None:
    """Raise Failure for a resource in use; ``users`` is None if it is unused."""
    if users is not None:
        raise _refusals.in_use(what, name, users)


def apply(action: Action, client: Client) -> dict[str, Failure]:
    """Carry out one action. Raises Failure."""
    request = action.request
    if action.verb == "capture":
        with still_there("sandbox", request["ref"], request["sandbox"]):
            client.post(f"/sandboxes/{segment(request['sandbox'])}/snapshots", dict(request["body"]))
    elif action.verb == "remove":
        client.delete(request["place"], when="unused" if request["when_unused"] else "")
    else:
        raise ValueError(f"unknown action {action.verb}")
    return {}


def lists(want: Desired) -> dict[str, tuple[str, ...]]:
    """Return the lists of a result, in order: key → names."""
    return {PLURAL: want.names}


def things_of(want: Desired, have: Current) -> Mapping[str, Mapping[str, Any]]:
    """Return snapshots by name. If ``when_changed`` skipped a snapshot, the sandbox's last snapshot takes its place."""
    result = dict(have.things)
    for name, ref in want.sandboxes.items():
        sandbox = have.sandboxes.get(ref)
        if name not in result and sandbox is not None and want.when_changed:
            head = unchanged_since(want, have, sandbox)
            if head is not None:
                result[name] = head
    return result
