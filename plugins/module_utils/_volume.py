# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement ``sandbox_volume``: create, change and remove volumes with their snapshots and attachments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._client import segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._mounts import (
    check_apart,
    check_running,
    checked_path,
)
from ansible_collections.grove.sandbox.plugins.module_utils._names import holders
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    VOLUME,
    Action,
    Change,
    Plan,
    Planner,
    at_least,
    checked_names,
)
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import VOLUME_KEYS, sandbox_shape, volume_shape

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

SINGULAR, PLURAL = "volume", "volumes"
SHOWN = {PLURAL: VOLUME_KEYS}

ARGUMENTS: dict[str, Any] = {
    "name": {"type": "list", "elements": "str", "required": True, "aliases": ["names"]},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "size_mb": {"type": "int"},
    "from_snapshot": {"type": "str"},
    "attachments": {
        "type": "list",
        "elements": "dict",
        "options": {
            "sandbox": {"type": "str", "required": True},
            "path": {"type": "str", "required": True},
            "read_only": {"type": "bool", "default": False},
        },
    },
    "snapshots": {"type": "list", "elements": "str"},
    "rollback_to": {"type": "str"},
    "force": {"type": "bool", "default": False},
    "purge": {"type": "bool", "default": False},
    "continue_on_error": {"type": "bool", "default": False},
}
RULES: dict[str, Any] = {}

DEFAULT_MB = 1024
SMALLEST_MB = 64


@dataclass(frozen=True)
class Desired:
    """The user's options; None: not set. ``attachments``: sandbox → (path, read-only)."""

    names: tuple[str, ...]
    state: str
    size_mb: int | None = None
    source: tuple[str, str] | None = None
    attachments: Mapping[str, tuple[str, bool]] | None = None
    snapshots: tuple[str, ...] | None = None
    rollback_to: str = ""
    force: bool = False
    purge: bool = False


@dataclass(frozen=True)
class Current:
    """The current state: volumes and sandboxes by requested name. ``source``: the snapshot to copy, None if missing.

    ``captures``: names and ids of each volume's snapshots, including those captured with sandboxes.
    """

    things: Mapping[str, Mapping[str, Any]]
    captures: Mapping[str, frozenset[str]] = field(default_factory=dict)
    sandboxes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: Mapping[str, Any] | None = None
    taken: Mapping[str, str] = field(default_factory=dict)


def desired(params: Mapping[str, Any]) -> Desired:
    names = checked_names(params["name"], "volume")
    attachments = _attachments(params.get("attachments"))
    absent = params["state"] == "absent"
    if attachments and len(names) > 1:
        raise Failure(
            f"attachments are set for {len(names)} volumes, but a sandbox cannot mount two volumes at one "
            "path: use one task for each volume"
        )
    if attachments and absent:
        raise Failure(
            "with state: absent a volume cannot have attachments: set attachments to [] to detach it everywhere"
        )
    snapshots = params.get("snapshots")
    rollback_to = params.get("rollback_to") or ""
    if rollback_to and params.get("purge") and snapshots is not None and rollback_to not in snapshots:
        raise Failure(
            f"rollback_to {rollback_to!r} is not in snapshots, and purge would remove it: add it to snapshots"
        )
    return Desired(
        names=names,
        state=params["state"],
        size_mb=at_least(params.get("size_mb"), SMALLEST_MB, "size_mb"),
        source=_source(params.get("from_snapshot")),
        attachments=attachments,
        snapshots=checked_names(snapshots, "snapshot") if snapshots else None if snapshots is None else (),
        rollback_to=rollback_to,
        force=bool(params.get("force")),
        purge=bool(params.get("purge")),
    )


def _attachments(given: Iterable[Mapping[str, Any]] | None) -> dict[str, tuple[str, bool]] | None:
    if given is None:
        return None
    result: dict[str, tuple[str, bool]] = {}
    for each in given:
        if each["sandbox"] in result:
            raise Failure(
                f"sandbox {each['sandbox']!r} is listed twice, but it can mount the volume at only one path: "
                "list it once"
            )
        result[each["sandbox"]] = (checked_path(each["path"]), bool(each.get("read_only")))
    return result


def _source(given: str | None) -> tuple[str, str] | None:
    if not given:
        return None
    volume, _at, snapshot = given.partition("@")
    if not volume or not snapshot:
        raise Failure(f"from_snapshot {given!r} is not a snapshot of a volume: use VOLUME@SNAPSHOT")
    return volume, snapshot


def observe(client: Client, want: Desired) -> Current:
    things, captures = {}, {}
    for name in want.names:
        found = client.find(f"/volumes/{segment(name)}")
        if found is not None:
            snapshots = list(client.pages(f"/volumes/{segment(name)}/snapshots"))
            things[name] = volume_shape(found, snapshots)
            captures[name] = frozenset(ref for each in snapshots for ref in (each["name"], each["snapshotID"]))
    if want.state == "absent":
        return Current(things, captures)
    sandboxes = {}
    for ref in want.attachments or ():
        detail = client.find(f"/sandboxes/{segment(ref)}")
        if detail is not None:
            sandboxes[ref] = sandbox_shape(detail)
    missing = [name for name in want.names if name not in things]
    taken = holders(client, missing, other_than="volume")
    return Current(things, captures, sandboxes, _find_source(client, want), taken)


def _find_source(client: Client, want: Desired) -> Mapping[str, Any] | None:
    if want.source is None:
        return None
    volume, snapshot = want.source
    place = f"/volumes/{segment(volume)}"
    if client.find(place) is None:
        return None
    entries = client.pages(f"{place}/snapshots")
    return next((each for each in entries if snapshot in (each["name"], each["snapshotID"])), None)


def view(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declared part of a volume."""
    return {key: shape[key] for key in ("name", "size_mb", "attachments", "snapshots", "from_snapshot")}


def plan(want: Desired, have: Current) -> Plan:
    planner = Planner()
    for name in want.names:
        planner.item(name, lambda name=name: _plan_one(want, have, name))
    return planner.plan()


def _plan_one(want: Desired, have: Current, name: str) -> list[Action]:
    now = have.things.get(name)
    if want.state == "absent":
        return [] if now is None else _remove(want, name, now)
    steps = _Steps(want, have, name)
    if now is None:
        steps.create()
    else:
        steps.before = view(now)
        _check_same(want, have, name, now)
    steps.detach()
    steps.capture()
    steps.rollback()
    steps.grow()
    steps.attach()
    steps.purge()
    return steps.actions


class _Steps:
    """The steps of one volume's plan.

    Detaches first, then takes snapshots, rolls back, grows, attaches, and removes surplus snapshots.
    """

    def __init__(self, want: Desired, have: Current, name: str) -> None:
        self.want = want
        self.have = have
        self.name = name
        self.before: dict[str, Any] | None = None
        self.actions: list[Action] = []
        self.owner = have.things.get(name, {}).get("owner_sandbox_id", "")

    def _step(self, verb: str, request: Mapping[str, Any], **to: Any) -> None:
        after = {**(self.before or {}), **to}
        self.actions.append(Action(verb, (Change(self.name, self.before, after, VOLUME),), request))
        self.before = after

    @property
    def _now(self) -> dict[str, Any]:
        if self.before is None:
            raise LookupError(f"volume {self.name} does not exist")
        return self.before

    def create(self) -> None:
        want, source = self.want, self.have.source
        if self.name in self.have.taken:
            raise _refusals.name_taken(self.name, self.have.taken[self.name])
        if want.source is not None and source is None:
            raise Failure(f"snapshot {want.source[1]!r} of volume {want.source[0]!r} not found", "not_found")
        least = source["sizeMB"] if source is not None else SMALLEST_MB
        size = want.size_mb or (source["sizeMB"] if source is not None else DEFAULT_MB)
        if size < least:
            raise _refusals.smaller_volume(self.name, size, least)
        body: dict[str, Any] = {"name": self.name, "sizeMB": size}
        if source is not None:
            body["fromSnapshot"] = source["snapshotID"]
        fresh = {
            "name": self.name,
            "size_mb": size,
            "attachments": [],
            "snapshots": [],
            "from_snapshot": body.get("fromSnapshot", ""),
        }
        self._step("create", {"body": body}, **fresh)

    def _wanted(self) -> list[dict[str, Any]]:
        """Return the requested attachments in the form of the volume's shape."""
        result = []
        for ref, (path, read_only) in (self.want.attachments or {}).items():
            sandbox = self.have.sandboxes.get(ref)
            if sandbox is None:
                raise Failure(
                    f"sandbox {ref!r} does not exist, so volume {self.name!r} cannot be attached to it: "
                    "create the sandbox first, or remove it from attachments",
                    "not_found",
                )
            entry = {"sandbox": sandbox["name"], "sandbox_id": sandbox["id"], "path": path, "read_only": read_only}
            result.append({**entry, "state": sandbox["state"]})
        idents = [entry["sandbox_id"] for entry in result]
        for entry in result:
            if idents.count(entry["sandbox_id"]) > 1:
                raise Failure(f"sandbox {entry['sandbox']!r} is listed twice, by its name and by its id: list it once")
        return result

    def detach(self) -> None:
        if self.want.attachments is None:
            return
        wanted = [_key(entry) for entry in self._wanted()]
        surplus = [each for each in self._now["attachments"] if _key(each) not in wanted]
        if self.owner and surplus and len(surplus) == len(self._now["attachments"]):
            raise Failure(
                f"volume {self.name!r} is a private clone of sandbox {self.owner} and is removed with its "
                "last attachment: keep this attachment, or remove the volume with state: absent and attachments: []",
                "conflict",
                blockers=[self.owner],
            )
        for entry in surplus:
            rest = [each for each in self._now["attachments"] if each != entry]
            self._step("detach", {"sandbox": entry["sandbox_id"]}, attachments=rest)

    def capture(self) -> None:
        for snapshot in self.want.snapshots or ():
            if snapshot not in self._now["snapshots"]:
                snapshots = sorted([*self._now["snapshots"], snapshot])
                self._step("capture", {"snapshot": snapshot}, snapshots=snapshots)

    def rollback(self) -> None:
        target = self.want.rollback_to
        if not target:
            return
        if target not in self._now["snapshots"] and target not in self.have.captures.get(self.name, ()):
            raise Failure(f"snapshot {target!r} of volume {self.name!r} not found", "not_found")
        writers = [each for each in self._now["attachments"] if not each["read_only"]]
        if writers and not self.want.force:
            raise _refusals.volume_has_writers(self.name, writers)
        self._step("rollback", {"snapshot": target, "force": self.want.force}, content_of=target)

    def grow(self) -> None:
        size = self.want.size_mb
        if size is None or size == self._now["size_mb"]:
            return
        if size < self._now["size_mb"]:
            raise _refusals.volume_cannot_shrink(self.name, self._now["size_mb"], size)
        self._step("grow", {"size": size}, size_mb=size)

    def attach(self) -> None:
        if self.want.attachments is None:
            return
        there = [_key(each) for each in self._now["attachments"]]
        for entry in self._wanted():
            if _key(entry) in there:
                continue
            sandbox = next(each for each in self.have.sandboxes.values() if each["id"] == entry["sandbox_id"])
            check_running(sandbox["name"], sandbox, sandbox["id"])
            others = [each["path"] for each in sandbox["volumes"] if each["name"] != self.name]
            check_apart([*others, entry["path"]])
            attachments = sorted(
                [*self._now["attachments"], entry], key=lambda each: (each["sandbox"], each["sandbox_id"])
            )
            body = {"name": self.name, "path": entry["path"], "readOnly": entry["read_only"]}
            self._step("attach", {"sandbox": sandbox["id"], "body": body}, attachments=attachments)

    def purge(self) -> None:
        if not self.want.purge or self.want.snapshots is None:
            return
        for snapshot in [each for each in self._now["snapshots"] if each not in self.want.snapshots]:
            rest = [each for each in self._now["snapshots"] if each != snapshot]
            self._step("remove_snapshot", {"snapshot": snapshot}, snapshots=rest)


def _key(entry: Mapping[str, Any]) -> tuple[str, str, bool]:
    """Return the properties of an attachment that cannot change in place."""
    return entry["sandbox_id"], entry["path"], entry["read_only"]


def _check_same(want: Desired, have: Current, name: str, now: Mapping[str, Any]) -> None:
    """Raise Failure if the volume was created from another snapshot than requested, if that is still known."""
    if want.source is not None and (have.source or {}).get("snapshotID", now["from_snapshot"]) != now["from_snapshot"]:
        found = f"from snapshot {now['from_snapshot']}" if now["from_snapshot"] else "empty"
        raise Failure(
            f"volume {name!r} was made {found}, not from {'@'.join(want.source)}, which cannot change: choose another "
            "name, or remove it first with state: absent, which loses its content",
            "conflict",
        )


def _remove(want: Desired, name: str, now: Mapping[str, Any]) -> list[Action]:
    """Detach the volume if requested, and remove it. Raises Failure with all reasons that prevent the removal."""
    before = view(now)
    detached = want.attachments is not None
    reasons = []
    if now["attachments"] and not detached:
        shown = ", ".join(each["sandbox"] for each in now["attachments"])
        reasons.append(f"is mounted in {shown} (set attachments: [] to detach it)")
    if now["snapshots"] and not want.purge:
        reasons.append(f"has snapshots: {', '.join(now['snapshots'])} (set purge: true to remove them as well)")
    if now["captured_by"]:
        reasons.append(
            f"is part of snapshots of sandboxes ({', '.join(now['captured_by'])}), which must be removed first"
        )
    if reasons:
        attached = [] if detached else [each["sandbox_id"] for each in now["attachments"]]
        kept = [] if want.purge else now["snapshots"]
        raise Failure(
            f"volume {name!r} {' and '.join(reasons)}", "in_use", blockers=[*attached, *kept, *now["captured_by"]]
        )
    actions = []
    for number, entry in enumerate(now["attachments"], 1):
        after: dict[str, Any] | None = {**before, "attachments": now["attachments"][number:]}
        if now["owner_sandbox_id"] and number == len(now["attachments"]) and not now["snapshots"]:
            after = None
        actions.append(Action("detach", (Change(name, before, after, VOLUME),), {"sandbox": entry["sandbox_id"]}))
        if after is None:
            # The gateway removes a sandbox's private clone with its last attachment.
            return actions
        before = after
    request = {"with_snapshots": want.purge}
    return [*actions, Action("remove", (Change(name, before, None, VOLUME),), request)]


def apply(action: Action, client: Client) -> dict[str, Failure]:
    """Carry out one action. Raises Failure."""
    request, name = action.request, action.changes[0].name
    place = f"/volumes/{segment(name)}"
    if action.verb == "create":
        client.post("/volumes", dict(request["body"]))
    elif action.verb == "detach":
        client.delete(f"/sandboxes/{segment(request['sandbox'])}/volumes/{segment(name)}")
    elif action.verb == "attach":
        client.post(f"/sandboxes/{segment(request['sandbox'])}/volumes", dict(request["body"]))
    elif action.verb == "capture":
        client.post(f"{place}/snapshots", {"name": request["snapshot"]})
    elif action.verb == "rollback":
        client.post(f"{place}/rollback", dict(request))
    elif action.verb == "grow":
        client.patch(place, {"sizeMB": request["size"]})
    elif action.verb == "remove_snapshot":
        client.delete(f"{place}/snapshots/{segment(request['snapshot'])}")
    elif action.verb == "remove":
        client.delete(place, withSnapshots=request["with_snapshots"])
    else:
        raise ValueError(f"unknown action {action.verb}")
    return {}


def lists(want: Desired) -> dict[str, tuple[str, ...]]:
    """Return the lists of a result, in order: key → names."""
    return {PLURAL: want.names}


def things_of(want: Desired, have: Current) -> Mapping[str, Mapping[str, Any]]:
    return have.things
