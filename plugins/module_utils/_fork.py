# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement ``sandbox_fork``: siblings forked from a snapshot, or clones of a sandbox."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._client import segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, still_there
from ansible_collections.grove.sandbox.plugins.module_utils._mounts import (
    OPTIONS,
    Mount,
    check_there,
    desired_mounts,
    find_volumes,
)
from ansible_collections.grove.sandbox.plugins.module_utils._names import holders
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    Action,
    Change,
    Plan,
    aside,
    at_least,
    checked_names,
    succeeded,
    words,
)
from ansible_collections.grove.sandbox.plugins.module_utils._sandbox import (
    apply_to_one,
    check_mounts,
    check_sizes,
    checked_timeout,
    end_of_life,
    lifetime,
    lifetime_differs,
    mounts_of_fork,
    remount,
    remove,
    replace,
    size_words,
    view,
    view_after,
)
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import (
    sandbox_shape,
    snapshot_shape,
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
        "options": {**OPTIONS, "clone": {"type": "bool", "default": False}},
    },
    "recreate": {"type": "bool", "default": False},
    "continue_on_error": {"type": "bool", "default": False},
}
RULES: dict[str, Any] = {
    "mutually_exclusive": [("snapshot", "sandbox"), ("names", "count"), ("names", "name_prefix")],
    "required_one_of": [("snapshot", "sandbox"), ("names", "name_prefix")],
    "required_by": {"count": "name_prefix"},
}

SHOWN = {PLURAL: ("id", "name", "state", "address", "forked_from", "snapshot_id", "volumes")}
"""The keys of each entry. They are few, because Ansible copies a result several times and there can be many forks."""
MOST = 1000
"""Maximum number of forks in one request."""


@dataclass(frozen=True)
class Desired:
    """The user's options. ``prefix`` is empty if the names were listed."""

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
    recreate: bool = False


@dataclass(frozen=True)
class Current:
    """The current state. ``things``: all siblings, and other sandboxes with requested names; ``siblings``: their names.

    ``source``: the shape of the snapshot or sandbox; None if it no longer exists, which only ``absent`` accepts.
    ``volumes``: the gateway's entries by name. ``captures``: for each volume of the source, the id of its captured
    snapshot; empty for a sandbox, which is captured by the clone request.
    """

    things: Mapping[str, Mapping[str, Any]]
    siblings: frozenset[str]
    now: datetime
    source: Mapping[str, Any] | None = None
    taken: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, Any] = field(default_factory=dict)
    captures: Mapping[str, str] = field(default_factory=dict)


def desired(params: Mapping[str, Any]) -> Desired:
    kind = "snapshot" if params.get("snapshot") else "sandbox"
    prefix = params.get("name_prefix") or ""
    absent = params["state"] == "absent"
    return Desired(
        names=_names(params, prefix),
        state=params["state"],
        source_kind=kind,
        source=params[kind],
        prefix=prefix,
        exact=bool(params.get("exact")) or (absent and bool(prefix) and params.get("count") is None),
        concurrency=at_least(params.get("concurrency"), 1, "concurrency"),
        atomic=params.get("atomic") is not False,
        metadata=words(params.get("metadata"), "metadata"),
        timeout=checked_timeout(params.get("timeout")),
        paused=bool(params.get("paused")),
        cold_start=bool(params.get("cold_start")),
        sizes={word: at_least(params[word], 1, word) for word in ("cpus", "memory_mb") if params.get(word) is not None},
        mounts=desired_mounts(params.get("volumes")),
        recreate=bool(params.get("recreate")),
    )


def _names(params: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
    count = at_least(params.get("count"), 0, "count")
    if not prefix:
        names = params.get("names") or []
        if not names and params.get("exact"):
            return ()
        return checked_names(names, "sandbox")
    if count is None and params["state"] == "present":
        raise Failure("name_prefix needs count, the number of siblings: set it")
    if count is not None and count > MOST:
        raise Failure(f"count must be at most {MOST}, not {count}")
    checked_names([f"{prefix}-{count or 1}"], "sandbox")
    return tuple(f"{prefix}-{number}" for number in range(1, (count or 0) + 1))


def observe(client: Client, want: Desired) -> Current:
    """Query the current state, with one request in the most frequent case: all siblings of a snapshot exist."""
    if want.source_kind == "snapshot" and want.mounts is None:
        there = {shape["name"]: shape for shape in _forks(client, want.source)}
        if _is_complete(want, there):
            return Current(there, frozenset(there), client.now())
    source, captures = _source(client, want)
    everyone = {shape["name"]: shape for shape in map(sandbox_shape, client.pages("/sandboxes"))}
    siblings = _siblings(client, want, source, everyone.values()) if source else frozenset()
    things = {name: shape for name, shape in everyone.items() if name in siblings or name in want.names}
    missing = [] if want.state == "absent" else [name for name in want.names if name not in everyone]
    volumes = {} if want.state == "absent" else find_volumes(client, want.mounts, source)
    taken = holders(client, missing, other_than="sandbox")
    return Current(things, siblings, client.now(), source, taken, volumes, captures)


def _forks(client: Client, snapshot: str) -> Iterator[dict[str, Any]]:
    return map(sandbox_shape, client.pages("/sandboxes", snapshotID=snapshot))


def _is_complete(want: Desired, there: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether all siblings exist and are alive, so that the plan needs no other data."""
    return bool(there) and all(
        name in there
        and not _is_dead(there[name])
        and all(there[name][key] == size for key, size in want.sizes.items())
        for name in want.names
    )


def _source(client: Client, want: Desired) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Return the shape of the source (None: it does not exist) and its captures of volumes."""
    place = f"/{'snapshots' if want.source_kind == 'snapshot' else 'sandboxes'}/{segment(want.source)}"
    found = client.find(place) if want.state == "absent" else client.get(place)
    if found is None:
        return None, {}
    if want.source_kind == "snapshot":
        return snapshot_shape(found), {each["name"]: each["snapshotID"] for each in found.get("volumes") or []}
    shape = sandbox_shape(found)
    return {**shape, "mounts": shape["volumes"]}, {each["name"]: "" for each in shape["volumes"]}


def _siblings(
    client: Client, want: Desired, source: Mapping[str, Any], everyone: Iterable[Mapping[str, Any]]
) -> frozenset[str]:
    """Return the names of all forks of the snapshot, or of all clones: children of the sandbox from an unlisted
    snapshot.
    """
    if want.source_kind == "snapshot":
        return frozenset(shape["name"] for shape in everyone if shape["forked_from"] == source["id"])
    children = [shape for shape in everyone if shape["parent_sandbox_id"] == source["id"]]
    shown = {entry["snapshotID"] for entry in client.pages("/snapshots", sandboxID=source["id"])} if children else set()
    return frozenset(shape["name"] for shape in children if shape["forked_from"] not in shown)


def plan(want: Desired, have: Current) -> Plan:
    """Fork all missing siblings in one request, then make changes in place, then remove surplus siblings."""
    _check_not_itself(want, have)
    refused: dict[str, Failure] = {}
    fresh: list[tuple[str, Mapping[str, Any] | None]] = []
    actions: list[Action] = []
    for name in want.names:
        now = have.things.get(name)
        try:
            if want.state == "absent":
                actions += _removal(want, have, name, now)
            elif now is None or _must_replace(want, have, name, now):
                fresh.append((name, _free(have, name, now)))
            else:
                actions += _adjust(want, have, name, now)
        except Failure as failure:
            refused[name] = failure
    if fresh:
        try:
            actions.insert(0, _fork(want, have, fresh))
        except Failure as failure:
            refused.update((name, failure) for name, _now in fresh)
    return Plan((*actions, *_surplus(want, have)), refused)


def _check_not_itself(want: Desired, have: Current) -> None:
    ident = have.source["id"] if have.source is not None else ""
    for name in want.names:
        if have.things.get(name, {}).get("id") == ident:
            raise Failure(f"sandbox {name!r} cannot be a clone of itself: choose other names for the clones")


def _removal(want: Desired, have: Current, name: str, now: Mapping[str, Any] | None) -> list[Action]:
    if now is None:
        return []
    if name not in have.siblings:
        raise _foreign(want, name, now)
    return [remove(name, now)]


def _foreign(want: Desired, name: str, now: Mapping[str, Any]) -> Failure:
    hint = (
        "set recreate: true to replace it, which loses its content, or choose another name"
        if want.state == "present"
        else "to remove it, use the module grove.sandbox.sandbox"
    )
    return Failure(
        f"sandbox {name!r} exists but is not a fork of {want.source_kind} {want.source!r} (it was made from "
        f"{now['forked_from']}): {hint}",
        "conflict",
        blockers=[now["id"]],
    )


def _must_replace(want: Desired, have: Current, name: str, now: Mapping[str, Any]) -> bool:
    """Return whether to replace the sibling. Raises Failure for another sandbox or a fixed property, unless
    ``recreate`` is set.
    """
    if name not in have.siblings:
        if want.recreate:
            return True
        raise _foreign(want, name, now)
    other = [f"{key} {now[key]}, not {value}" for key, value in want.sizes.items() if now[key] != value]
    for mount in want.mounts or ():
        if mount.clone and _clone_of(want, have, now, mount) is None:
            other.append(f"no private clone of volume {mount.volume!r} at {mount.path}")
    if other and not want.recreate:
        raise Failure(
            f"sandbox {name!r} has {' and '.join(other)}, which cannot change during its lifetime: set "
            "recreate: true to replace it, which loses its content",
            "conflict",
            blockers=[now["id"]],
        )
    return bool(other) or _is_dead(now)


def _clone_of(want: Desired, have: Current, now: Mapping[str, Any], mount: Mount) -> str | None:
    """Return the name of the sibling's own clone for ``mount``, if it has one."""
    for each in now["volumes"]:
        volume = have.volumes.get(each["name"], {})
        right = want.source_kind == "sandbox" or volume.get("fromSnapshot") == have.captures.get(mount.volume)
        if (each["path"], each["read_only"]) == (mount.path, mount.read_only) and right:
            return each["name"] if volume.get("ownerSandboxID") == now["id"] else None
    return None


def _is_dead(now: Mapping[str, Any]) -> bool:
    """Return whether the sandbox is paused because its machine ended or its host went down, not by a request."""
    return now["state"] == "paused" and bool(now["state_reason"])


def _free(have: Current, name: str, now: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if now is None and name in have.taken:
        raise _refusals.name_taken(name, have.taken[name])
    return now


def _fork(want: Desired, have: Current, fresh: list[tuple[str, Mapping[str, Any] | None]]) -> Action:
    source = have.source or {}
    if want.source_kind == "snapshot":
        check_sizes(want.sizes, source, want.cold_start)
    else:
        check_running_for_capture(want.source, source)
        # A clone continues from the memory of its source on every host that captures memory.
        check_sizes(want.sizes, {**source, "memory": "auto"}, want.cold_start)
    check_mounts(want.mounts, source, have.volumes)
    _check_captured(want, have)
    changes = tuple(_change(name, now, _after(want, source, name)) for name, now in fresh)
    body: dict[str, Any] = {
        "names": [name for name, _now in fresh],
        "atomic": want.atomic,
        **size_words(want.sizes),
    }
    if want.mounts is not None:
        body["volumeMounts"] = [mount.words() for mount in want.mounts]
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
    old = tuple((now["id"], now["name"], aside(now["name"], now["id"])) for _name, now in fresh if now is not None)
    verb = "fork" if want.source_kind == "snapshot" else "clone"
    request = {"source": source.get("id", ""), "ref": (want.source_kind, want.source), "body": body, "old": old}
    return Action(verb, changes, request)


def _change(name: str, now: Mapping[str, Any] | None, after: Mapping[str, Any]) -> Change:
    return Change(name, None if now is None else succeeded(view(now), after), after)


def _check_captured(want: Desired, have: Current) -> None:
    """Raise Failure if the source does not include a volume that should be cloned."""
    for mount in want.mounts or ():
        if not mount.clone or mount.volume in have.captures:
            continue
        raise _refusals.nothing_to_clone(mount.volume, want.source_kind, want.source)


def _after(want: Desired, source: Mapping[str, Any], name: str) -> dict[str, Any]:
    after: dict[str, Any] = {
        "name": name,
        "state": "paused" if want.paused else "running",
        **{key: want.sizes.get(key, source[key]) for key in ("cpus", "memory_mb", "disk_mb")},
        "metadata": dict(want.metadata or {}),
    }
    if want.timeout is not None:
        after["timeout"] = want.timeout
    if not any(mount.clone for mount in want.mounts or ()):
        # The gateway chooses the names of clones.
        after["volumes"] = mounts_of_fork(want.mounts, source)
    if want.source_kind == "snapshot":
        after["forked_from"] = source["id"]
    else:
        after["parent_sandbox_id"] = source["id"]
    return after


def _adjust(want: Desired, have: Current, name: str, now: Mapping[str, Any]) -> list[Action]:
    """Return the changes in place. A sibling is resumed first and paused last."""
    if _is_as_requested(want, now):
        return []
    before = view(now)
    check_there(want.mounts, have.volumes)
    actions: list[Action] = []
    if not want.paused and before["state"] == "paused":
        actions.append(Action("resume", (Change(name, before, {**before, "state": "running"}),), {"id": now["id"]}))
        before = view_after(actions, before)
    if want.metadata is not None and want.metadata != before["metadata"]:
        after = {**before, "metadata": dict(want.metadata)}
        request = {"id": now["id"], "body": {"metadata": dict(want.metadata)}}
        actions.append(Action("update", (Change(name, before, after),), request))
        before = after
    actions += remount(name, now, before, _mounts_of(want, have, now))
    before = view_after(actions, before)
    if lifetime_differs(want.timeout, before["timeout"]):
        after = {**before, "timeout": want.timeout}
        request = {"id": now["id"], "end": end_of_life(want.timeout, name, now, have.now)}
        actions.append(Action("set_timeout", (Change(name, before, after),), request))
        before = after
    if want.paused and before["state"] == "running":
        actions.append(Action("pause", (Change(name, before, {**before, "state": "paused"}),), {"id": now["id"]}))
    return actions


def _is_as_requested(want: Desired, now: Mapping[str, Any]) -> bool:
    """Return whether nothing has to change. Compares without views, which would be slow for a hundred siblings."""
    state = "paused" if want.paused else "running"
    same_life = want.timeout is None or not lifetime_differs(want.timeout, lifetime(now))
    return now["state"] == state and want.metadata in (None, now["metadata"]) and want.mounts is None and same_life


def _mounts_of(want: Desired, have: Current, now: Mapping[str, Any]) -> tuple[Mount, ...] | None:
    """Return the requested mounts, with the names of this sibling's clones."""
    if want.mounts is None:
        return None
    return tuple(
        Mount(_clone_of(want, have, now, mount) or mount.volume, mount.path, mount.read_only) if mount.clone else mount
        for mount in want.mounts
    )


def _surplus(want: Desired, have: Current) -> list[Action]:
    """Remove surplus siblings. With a prefix, remove only siblings whose names are the prefix and a number."""
    if not want.exact:
        return []
    ours = re.compile(re.escape(want.prefix) + r"-[1-9]\d*" if want.prefix else r".*")
    extra = [name for name in have.siblings if name not in want.names and ours.fullmatch(name)]
    return [remove(name, have.things[name]) for name in sorted(extra, key=_in_order)]


def _in_order(name: str) -> tuple[str, int, str]:
    found = re.fullmatch(r"(.*?)(\d{1,9})", name)
    return (found.group(1), int(found.group(2)), name) if found else (name, 0, name)


def apply(action: Action, client: Client) -> dict[str, Failure]:
    """Carry out one action. Returns the failures by name if the request was not atomic. Raises Failure."""
    if action.verb not in ("fork", "clone"):
        apply_to_one(action, client)
        return {}
    request = action.request
    place = "/snapshots/{}/fork" if action.verb == "fork" else "/sandboxes/{}/clone"
    body = dict(request["body"])
    if request["old"]:
        # All replacements must exist before the first old sandbox is removed.
        body["atomic"] = True
    with still_there(*request["ref"], request["source"]):
        answer = replace(
            client, list(request["old"]), lambda: client.post(place.format(segment(request["source"])), body)
        )
    return _failed(answer)


def _failed(answer: Any) -> dict[str, Failure]:
    errors = (
        answer.get("errors") or []
        if isinstance(answer, dict)
        else [item["error"] for item in answer or [] if item.get("error")]
    )
    return {
        error.get("name", ""): Failure(
            error.get("message", "the fork failed"), error.get("kind", "backend_failed"), status=error.get("code")
        )
        for error in errors
    }


def lists(want: Desired) -> dict[str, tuple[str, ...]]:
    """Return the lists of a result, in order: key → names."""
    return {PLURAL: want.names}


def things_of(want: Desired, have: Current) -> Mapping[str, Mapping[str, Any]]:
    return have.things
