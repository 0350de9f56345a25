# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement ``sandbox``: create, change and remove named sandboxes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._client import segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, still_there
from ansible_collections.grove.sandbox.plugins.module_utils._mounts import (
    OPTIONS,
    Mount,
    check_running,
    check_there,
    desired_mounts,
    find_volumes,
    missing_volumes,
)
from ansible_collections.grove.sandbox.plugins.module_utils._names import holders
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    Action,
    Change,
    Plan,
    Planner,
    aside,
    at_least,
    checked_names,
    networks,
    succeeded,
    words,
)
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import (
    SANDBOX_KEYS,
    moment,
    sandbox_shape,
    snapshot_shape,
    template_shape,
)

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

SINGULAR, PLURAL = "sandbox", "sandboxes"
SHOWN = {PLURAL: SANDBOX_KEYS}

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
    "volumes": {"type": "list", "elements": "dict", "options": OPTIONS},
    "recreate": {"type": "bool", "default": False},
    "continue_on_error": {"type": "bool", "default": False},
}
RULES: dict[str, Any] = {"mutually_exclusive": [("template", "snapshot")]}

SIZES = ("cpus", "memory_mb", "disk_mb")
LIFETIME_TOLERANCE = 10
"""Tolerated difference of a lifetime from ``timeout`` in seconds, for clock skew and request time."""
NEVER = -1
_ID = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class Desired:
    """The user's options in canonical form; None: not set."""

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
    recreate: bool = False


@dataclass(frozen=True)
class Current:
    """The gateway's state: sandboxes by requested name, the source's shape, names that are taken, volumes by name."""

    things: Mapping[str, Mapping[str, Any]]
    now: datetime
    source: Mapping[str, Any] | None = None
    taken: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, Any] = field(default_factory=dict)


def desired(params: Mapping[str, Any]) -> Desired:
    kind = next((word for word in ("template", "snapshot") if params.get(word)), "")
    return Desired(
        names=checked_names(params["name"], "sandbox"),
        state=params["state"],
        source_kind=kind,
        source=params[kind] if kind else "",
        sizes={word: at_least(params[word], 1, word) for word in SIZES if params.get(word) is not None},
        cold_start=bool(params.get("cold_start")),
        env=words(params.get("env"), "env"),
        metadata=words(params.get("metadata"), "metadata"),
        timeout=checked_timeout(params.get("timeout")),
        network=_network(params.get("network")),
        mounts=desired_mounts(params.get("volumes")),
        recreate=bool(params.get("recreate")),
    )


def checked_timeout(timeout: int | None) -> int | None:
    """Return Return ``timeout``. Raises Failure if it is not a valid lifetime."""
    if timeout != NEVER:
        at_least(timeout, 1, "timeout (seconds, or -1 for never)")
    return timeout


def _network(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    result = {key: value for key, value in given.items() if value is not None}
    return {key: networks(value) if isinstance(value, list) else value for key, value in result.items()}


def observe(client: Client, want: Desired) -> Current:
    things = find_sandboxes(client, want.names)
    if want.state == "absent":
        return Current(things, client.now())
    source = find_source(client, want.source_kind, want.source) if want.source else None
    missing = [name for name in want.names if name not in things]
    taken = holders(client, missing, other_than="sandbox")
    return Current(things, client.now(), source, taken, find_volumes(client, want.mounts, source))


def find_sandboxes(client: Client, refs: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the shapes of the existing ``refs`` (names or ids), by ref.

    One request, unless there are several pages.
    """
    if len(refs) == 1:
        # List it instead of getting it: for a single sandbox, the gateway first checks for divergence.
        for detail in client.pages("/sandboxes", name=refs[0]):
            return {refs[0]: sandbox_shape(detail)}
        detail = client.find(f"/sandboxes/{refs[0]}") if _ID.fullmatch(refs[0]) else None
        return {} if detail is None else {refs[0]: sandbox_shape(detail)}
    found: dict[str, dict[str, Any]] = {}
    wanted = set(refs)
    for detail in client.pages("/sandboxes"):
        shape = sandbox_shape(detail)
        for ref in wanted.intersection((shape["name"], shape["id"])):
            # A name takes precedence over an id, as in the gateway.
            if ref not in found or shape["name"] == ref:
                found[ref] = shape
    return found


def find_source(client: Client, kind: str, ref: str) -> dict[str, Any]:
    """Return the shape of a template or snapshot. Raises Failure if it does not exist."""
    found = client.get(f"/{kind}s/{segment(ref)}")
    return template_shape(found) if kind == "template" else snapshot_shape(found)


def view(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declared part of a sandbox."""
    result = {key: shape[key] for key in ("name", "state", "forked_from", *SIZES, "metadata", "volumes")}
    network = shape["network"]
    result["network"] = {
        "allow_internet": network["allow_internet"],
        "allow_out": networks(network["allow_out"]),
        "deny_out": networks(network["deny_out"]),
    }
    result["timeout"] = lifetime(shape)
    return result


def lifetime(shape: Mapping[str, Any]) -> int:
    """Return the seconds from a sandbox's creation to its end; -1: unlimited. A rollback or resume restarts it."""
    begin, end = moment(shape["created_at"]), moment(shape["end_at"])
    return NEVER if begin is None or end is None else round((end - begin).total_seconds())


def plan(want: Desired, have: Current) -> Plan:
    planner = Planner()
    for name in want.names:
        planner.item(name, lambda name=name: _plan_one(want, have, name))
    return planner.plan()


def _plan_one(want: Desired, have: Current, name: str) -> list[Action]:
    now = have.things.get(name)
    if want.state == "absent":
        return [] if now is None else [remove(name, now)]
    if now is None:
        return [_create(want, have, name)]
    fixed = _fixed_differences(want, have, now)
    if fixed and want.recreate:
        return [_replace(want, have, name, now)]
    if fixed:
        raise Failure(
            f"sandbox {name!r} {' and '.join(fixed)}, which cannot change during its lifetime: set "
            "recreate: true to replace it, which loses its content",
            "conflict",
            blockers=[now["id"]],
        )
    return _adjust(want, have, name, now)


def _fixed_differences(want: Desired, have: Current, now: Mapping[str, Any]) -> list[str]:
    found = []
    if have.source is not None and now["forked_from"] != have.source["id"]:
        found.append(f"was made from {now['forked_from']}, not from {want.source_kind} {want.source!r}")
    for key, value in want.sizes.items():
        if now[key] != value:
            found.append(f"has {key} {now[key]}, not {value}")
    return found


def _create(want: Desired, have: Current, name: str) -> Action:
    if name in have.taken:
        raise _refusals.name_taken(name, have.taken[name])
    if have.source is None:
        raise Failure(
            f"sandbox {name!r} does not exist, and creating it needs a source: set 'template' or 'snapshot'",
            "not_found",
        )
    check_sizes(want.sizes, have.source, want.cold_start)
    check_mounts(want.mounts, have.source, have.volumes)
    request = {"body": _body(want, name, have.source), "ref": (want.source_kind, want.source)}
    return Action("create", (Change(name, None, _fresh(want, name, have.source)),), request)


def _replace(want: Desired, have: Current, name: str, now: Mapping[str, Any]) -> Action:
    source = have.source
    if source is None:
        raise Failure(f"replacing sandbox {name!r} needs a source: set 'template' or 'snapshot'")
    check_sizes(want.sizes, source, want.cold_start)
    check_mounts(want.mounts, source, have.volumes)
    request = {
        "id": now["id"],
        "aside": aside(now["name"], now["id"]),
        "body": _body(want, now["name"], source),
        "ref": (want.source_kind, want.source),
    }
    after = _fresh(want, now["name"], source)
    return Action("replace", (Change(name, succeeded(view(now), after), after),), request)


def _fresh(want: Desired, name: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the view of a new sandbox, without a lifetime if the gateway's configuration decides it."""
    after: dict[str, Any] = {
        "name": name,
        "state": "paused" if want.state == "paused" else "running",
        "forked_from": source["id"],
        **{key: want.sizes.get(key, source[key]) for key in SIZES},
        "metadata": dict(want.metadata or {}),
        "network": {"allow_internet": True, "allow_out": [], "deny_out": [], **(want.network or {})},
        "volumes": mounts_of_fork(want.mounts, source),
    }
    if want.timeout is not None:
        after["timeout"] = want.timeout
    return after


def _body(want: Desired, name: str, source: Mapping[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"templateID": source["id"], "name": name, "metadata": dict(want.metadata or {})}
    body.update(size_words(want.sizes))
    if want.env:
        body["envVars"] = dict(want.env)
    if want.network is not None:
        body["network"] = _network_words({"allow_internet": True, "allow_out": [], "deny_out": [], **want.network})
    if want.mounts is not None:
        body["volumeMounts"] = [mount.words() for mount in want.mounts]
    if want.timeout is not None:
        body["timeout"] = want.timeout
    if want.cold_start:
        body["coldStart"] = True
    if want.state == "paused":
        body["paused"] = True
    return body


def check_sizes(sizes: Mapping[str, int], source: Mapping[str, Any], cold_start: bool) -> None:
    """Raise Failure for sizes that a fork of ``source`` cannot have."""
    other = [f"{key} {source[key]}, not {value}" for key, value in sizes.items() if source[key] != value]
    if sizes.get("disk_mb", source["disk_mb"]) < source["disk_mb"]:
        raise _refusals.smaller_disk(sizes["disk_mb"], source["disk_mb"])
    if other and not cold_start and source.get("memory", "none") != "none":
        raise _refusals.other_sizes(source["name"] or source["id"], other)


def mounts_of_fork(mounts: tuple[Mount, ...] | None, source: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the mounts of a fork of ``source``."""
    return [dict(each) for each in source.get("mounts", [])] if mounts is None else [each.view() for each in mounts]


def check_mounts(mounts: tuple[Mount, ...] | None, source: Mapping[str, Any], volumes: Mapping[str, Any]) -> None:
    """Raise Failure for volumes that a fork of ``source`` cannot have. None means the volumes of ``source``."""
    check_there(mounts, volumes)
    lost = missing_volumes(source, volumes) if mounts is None else []
    if lost:
        raise _refusals.volumes_lost(source["name"] or source["id"], lost)


def size_words(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes with the field names of the gateway."""
    names = {"cpus": "cpuCount", "memory_mb": "memoryMB", "disk_mb": "diskSizeMB"}
    return {names[key]: value for key, value in sizes.items()}


def _network_words(network: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "allowInternetAccess": network["allow_internet"],
        "allowOut": network["allow_out"],
        "denyOut": network["deny_out"],
    }


def _adjust(want: Desired, have: Current, name: str, now: Mapping[str, Any]) -> list[Action]:
    """Return the changes in place. A sandbox is resumed first and paused last."""
    before = view(now)
    actions: list[Action] = []

    def step(verb: str, request: Mapping[str, Any], **to: Any) -> None:
        nonlocal before
        after = {**before, **to}
        actions.append(Action(verb, (Change(name, before, after),), {"id": now["id"], **request}))
        before = after

    check_there(want.mounts, have.volumes)
    if want.state == "running" and now["state"] == "paused":
        step("resume", {}, state="running")
    network = {**before["network"], **(want.network or {})}
    if network != before["network"]:
        step("set_network", {"body": _network_words(network)}, network=network)
    if want.metadata is not None and want.metadata != before["metadata"]:
        step("update", {"body": {"metadata": dict(want.metadata)}}, metadata=dict(want.metadata))
    actions += remount(name, now, before, want.mounts)
    before = view_after(actions, before)
    if lifetime_differs(want.timeout, before["timeout"]):
        step("set_timeout", {"end": end_of_life(want.timeout, name, now, have.now)}, timeout=want.timeout)
    if want.state == "paused" and before["state"] == "running":
        step("pause", {}, state="paused")
    return actions


def remount(
    name: str, now: Mapping[str, Any], before: Mapping[str, Any], mounts: tuple[Mount, ...] | None
) -> list[Action]:
    """Return the actions that change the volumes in the view ``before`` to ``mounts``. Detaches come first."""
    wanted = [] if mounts is None else [mount.view() for mount in mounts]
    surplus = [] if mounts is None else [each for each in before["volumes"] if each not in wanted]
    missing = [mount for mount in mounts or () if mount.view() not in before["volumes"]]
    if missing:
        check_running(name, before, now["id"])
    actions = []

    def step(verb: str, request: Mapping[str, Any], volumes: list[Any]) -> None:
        nonlocal before
        after = {**before, "volumes": sorted(volumes, key=lambda each: each["path"])}
        actions.append(Action(verb, (Change(name, before, after),), {"id": now["id"], **request}))
        before = after

    for each in surplus:
        step("detach", {"volume": each["name"]}, [other for other in before["volumes"] if other != each])
    for mount in missing:
        step("attach", {"body": mount.words()}, [*before["volumes"], mount.view()])
    return actions


def view_after(actions: list[Action], before: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the view after ``actions`` on one resource whose view was ``before``."""
    return actions[-1].changes[0].after or {} if actions else before


def lifetime_differs(timeout: int | None, lifetime: int) -> bool:
    """Return whether this lifetime differs from the requested ``timeout``. None: no timeout is requested."""
    if timeout is None:
        return False
    if NEVER in (timeout, lifetime):
        return timeout != lifetime
    return abs(timeout - lifetime) > LIFETIME_TOLERANCE


def end_of_life(timeout: int | None, name: str, now: Mapping[str, Any], clock: datetime) -> datetime | None:
    """Return the end of a lifetime of ``timeout`` seconds from the sandbox's creation; None: never. Raises Failure."""
    begin = moment(now["created_at"])
    if timeout in (None, NEVER) or begin is None:
        return None
    end = begin + timedelta(seconds=timeout)
    if end <= clock:
        raise Failure(
            f"sandbox {name!r} was created at {now['created_at']} and is already older than the timeout of "
            f"{timeout} s: set a longer timeout, or remove the sandbox with state: absent",
            "conflict",
            blockers=[now["id"]],
        )
    return end


def remove(name: str, now: Mapping[str, Any]) -> Action:
    return Action("remove", (Change(name, view(now), None),), {"id": now["id"]})


def apply(action: Action, client: Client) -> dict[str, Failure]:
    """Carry out one action. Returns {}, because these actions cannot fail in part. Raises Failure."""
    request = action.request
    if action.verb in ("create", "replace"):
        body = dict(request["body"])
        old = [(request["id"], body["name"], request["aside"])] if action.verb == "replace" else []
        with still_there(*request["ref"], body["templateID"]):
            replace(client, old, lambda: client.post("/sandboxes", body))
    else:
        apply_to_one(action, client)
    return {}


def apply_to_one(action: Action, client: Client) -> None:
    """Carry out one action on an existing sandbox."""
    request = action.request
    place = f"/sandboxes/{segment(request['id'])}"
    if action.verb == "remove":
        client.delete(place)
    elif action.verb == "resume":
        # After a reboot of the host, the gateway may already be starting the sandbox, which this request accepts.
        client.post(f"{place}/connect")
    elif action.verb == "pause":
        client.post(f"{place}/pause")
    elif action.verb == "set_network":
        client.put(f"{place}/network", dict(request["body"]))
    elif action.verb == "update":
        client.patch(place, dict(request["body"]))
    elif action.verb == "attach":
        client.post(f"{place}/volumes", dict(request["body"]))
    elif action.verb == "detach":
        client.delete(f"{place}/volumes/{segment(request['volume'])}")
    elif action.verb == "set_timeout":
        client.post(f"{place}/timeout", {"timeout": _remaining(request["end"], client)})
    else:
        raise ValueError(f"unknown action {action.verb}")


def _remaining(end: datetime | None, client: Client) -> int:
    return NEVER if end is None else max(1, round((end - client.now()).total_seconds()))


def replace(client: Client, old: list[tuple[str, str, str]], make: Any) -> Any:
    """Create the replacements of ``old`` [(id, name, temporary name)] with ``make()``, then remove the old sandboxes.

    On failure the old sandboxes get their names back. Returns the result of ``make``.
    """
    moved = []
    try:
        for ident, name, other in old:
            client.patch(f"/sandboxes/{segment(ident)}", {"name": other})
            moved.append((ident, name))
        made = make()
    except BaseException:
        for ident, name in moved:
            client.patch(f"/sandboxes/{segment(ident)}", {"name": name})
        raise
    for ident, _name in moved:
        client.delete(f"/sandboxes/{segment(ident)}")
    return made


def lists(want: Desired) -> dict[str, tuple[str, ...]]:
    """Return the lists of a result, in order: key → names."""
    return {PLURAL: want.names}


def things_of(want: Desired, have: Current) -> Mapping[str, Mapping[str, Any]]:
    return have.things
