# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Describe the actions of a task as an entry of a saved plan, and compare a task with such entries.

This module is independent of Ansible and the network.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils._client import PLANNED_ID_PREFIX
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    ARCHIVES_KEY,
    HOSTS_KEY,
    LOGIN_KEY,
    SANDBOX,
    SNAPSHOT,
    VOLUME,
    is_planned_id,
)

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._plan import Action

_SECRET_FIELD = "envVars"
"""The field of request bodies that contains a sandbox's environment variables."""
_HASH_PREFIX = "pbkdf2-sha256:"
_HASH_ROUNDS = 100_000
_SALT = secrets.token_hex(16)
"""The salt of all hashes that this process makes, so that it hashes each secret only once."""
_UNKNOWABLE_VIEW_KEYS = frozenset(("diverged",))
"""Keys of views whose values only the run can know."""
_UNPLANNED_REQUEST_KEYS = frozenset(("end", LOGIN_KEY, ARCHIVES_KEY))
"""Keys of requests that a plan does not contain: the end depends on the time of the run, and the view contains the
timeout itself. A login is secret, and a run may have another one. Which archives are missing can change, too.
"""
TARGET_KEYS = {"export": ("file", "overwrites"), "push": ("reference", "replaces")}
"""For verbs of actions that write outside the gateway: in their requests, the key of the place, and the key of the id
of the snapshot in the existing file, or of the digest of the existing artifact; "" if there is none.
"""
_OVERWRITTEN_KEYS = tuple(key for _target_key, key in TARGET_KEYS.values())
_TIMEOUT_VERBS = ("clone", "create", "fork", "replace", "set_timeout")
"""Verbs of actions that set the timeout. The views of other actions contain the remaining time, which changes."""
_PLANNED_ID_PATTERN = re.compile(rf"({PLANNED_ID_PREFIX}[0-9a-f]{{4}})")
_REAL_ID_PATTERN = re.compile(r"[0-9a-f]{12}")
_ID_PATH_PATTERN = re.compile(rf"/({_REAL_ID_PATTERN.pattern}|{_PLANNED_ID_PATTERN.pattern})$")
_SHORT_PLANNED_ID = PLANNED_ID_PREFIX[:8]
"""The end of a replaced resource's temporary name if its id is planned; see ``_plan.make_temporary_name``."""
_TEMPORARY_SUFFIX = re.compile(r"\.old-[0-9a-f]{8}$")
"""The end of a replaced resource's temporary name if its id is real."""
_NEW_MARKER = "new"
_CONDITIONAL_VERBS = ("rollback", "capture")
"""Verbs of actions that a run may skip, because only the run knows whether the sandbox has diverged."""
_REMEDY = "this task changed nothing. Make a new plan with a check-mode run"
_REMEDY_BETWEEN_ACTIONS = "this task did not carry out the action that uses it. Make a new plan with a check-mode run"
PREDICTED_FAILURE = "the plan predicts that this fails, so the run has not tried it: "
"""The beginning of a message that ends with the predicted failure."""

Entry = Mapping[str, Any]
"""An entry of a plan file, as docs/plans.md describes it."""


def compute_object_version(
    path: str, data: Any, opened_at: str = "", *, is_removed: bool = False, is_mounted: bool = False
) -> str:
    """Return the version of an object or of a list, as ``key=value`` pairs. It is "" if the object does not exist.

    ``path``: the path of the object or the list in the API. ``opened_at``: when the plan session began, if there is
    one; the version of a newer volume contains no time, because only the run knows the time. ``is_removed``: whether
    the task removes the object, so its users matter even if it is a template. ``is_mounted``: whether the task mounts
    the volume, or captures or rolls it back with a sandbox, so the other sandboxes that mount it matter.
    """
    if data is None:
        return ""
    if isinstance(data, list):
        version = "entries=" + ",".join(f"{each.get('name', '')}:{each.get('snapshotID', '')}" for each in data)
        # The clones of other snapshots are users of sandboxes' snapshots. Older gateways do not list clones.
        own_snapshots = [each for each in data if not each.get("sandboxSnapshotID")]
        if all("clones" in each for each in own_snapshots):
            version += " clones=" + ",".join(
                f"{clone}:{each['snapshotID']}" for each in own_snapshots for clone in each["clones"]
            )
        return version
    if path.startswith("/volumes"):
        # A volume has no id in the API. Its owner or creation time distinguishes it from other volumes of that name.
        created_at = data.get("createdAt") or ""
        ident = data.get("ownerSandboxID") or (_NEW_MARKER if opened_at and created_at > opened_at else created_at)
    else:
        ident = data.get("sandboxID") if path.startswith("/sandboxes") else None
        ident = ident or data.get("snapshotID") or data.get("templateID") or ""
    version = f"id={ident}"
    if data.get("buildStatus", "ready") == "ready":  # Otherwise, it is a template that does not exist yet.
        version += f" generation={data.get('generation', 0)}"
    if (is_removed or data.get("kind", "template") != "template") and data.get("users") is not None:
        version += " users=" + ",".join(sorted(each["name"] for each in data["users"]))
    if is_mounted and data.get("mounts") is not None:
        mounts = [
            f"{each['sandboxName'] or each['sandboxID']}:{'ro' if each['readonly'] else 'rw'}"
            for each in data["mounts"]
        ]
        version += " mounts=" + ",".join(sorted(mounts))
    return version


def insert_planned_ids(text: str, bindings: Mapping[str, str]) -> str:
    """Return a name or a path of this run as the plan contains it: with planned ids in place of real ones.

    ``bindings``: see ``Approval``.
    """
    if _REAL_ID_PATTERN.search(text):
        for planned_id, real_id in bindings.items():
            if is_planned_id(planned_id):
                text = text.replace(real_id, planned_id)
    return text


def make_volume_key(name: str) -> str:
    """Return the key of the time when the run created a volume, in the bindings; see ``compute_object_version``.

    ``name``: its name in the plan.
    """
    return f"{_NEW_MARKER} {name}"


def describe_actions(actions: Iterable[Action]) -> list[dict[str, Any]]:
    """Return the actions as a plan file contains them, with secrets hashed."""
    return [
        {
            "verb": action.verb,
            "changes": [
                {
                    "kind": change.kind,
                    "name": change.name,
                    "before": None if change.before is None else dict(change.before),
                    "after": None if change.after is None else dict(change.after),
                }
                for change in action.changes
            ],
            "request": _hash_secrets(
                {key: value for key, value in action.request.items() if key not in _UNPLANNED_REQUEST_KEYS}
            ),
        }
        for action in actions
    ]


def estimate_costs(
    actions: Iterable[Action], shapes: Mapping[str, Mapping[str, Any]], typical_costs: Mapping[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the estimated costs of actions, as in a plan file, and a description of each unknown cost.

    ``shapes``: the existing resources by name. ``typical_costs``: the costs of recent captures, as the gateway reports
    them.
    """
    memory_mb = disk_bytes = 0
    pause_ms = 0.0
    capture_count = 0
    for action in actions:
        capture_count += action.verb == "clone"
        for change in action.changes:
            if change.kind == SANDBOX:
                memory_mb += _get_running_memory(change.after) - _get_running_memory(change.before)
            elif action.verb in ("import", "pull"):
                disk_bytes += action.request["data_bytes"]
            elif change.kind == SNAPSHOT and change.before is None:
                capture_count += 1
            elif change.kind == SNAPSHOT and change.after is None:
                shape = shapes.get(change.name, {})
                disk_bytes -= (shape.get("disk_bytes_unique") or 0) + (shape.get("memory_bytes_written") or 0)
    unknown_costs = []
    if capture_count and typical_costs is None:
        unknown_costs.append("the pause and the size of the gateway's first snapshots")
    elif capture_count and typical_costs is not None:
        pause_ms = round(capture_count * typical_costs["pauseMs"], 3)
        disk_bytes += capture_count * (typical_costs["memoryBytesWritten"] + typical_costs["diskBytesUnique"])
    costs = {"memory_mb": memory_mb, "disk_bytes": disk_bytes, "pause_ms": pause_ms}
    return {key: value for key, value in costs.items() if value}, unknown_costs


def _get_running_memory(view: Mapping[str, Any] | None) -> int:
    if view is None or view.get("state") != "running":
        return 0
    return view.get("memory_mb") or 0


def make_initial_state() -> dict[str, Any]:
    """Return the state of a run that has not applied anything yet.

    ``run``: the name by which a gateway finds the run. ``opened_at``: when each gateway first saw the run, by the ids
    of the gateway and of the run there. ``used``: the numbers of the entries that it has used. ``omitted``: for each of
    these numbers, as text, the objects whose changes failed. ``unneeded``: likewise, the objects that the task had no
    need to capture or roll back. ``swapped``: the hosts that have used each other's entries. ``bindings``: by the id of
    the gateway, and ``exported``: see ``Approval``.
    """
    return {
        "run": secrets.token_hex(16),
        "opened_at": {},
        "used": [],
        "omitted": {},
        "unneeded": {},
        "swapped": [],
        "bindings": {},
        "exported": {},
    }


def update_state(state: dict[str, Any], usage: Mapping[str, Any]) -> None:
    """Add a task's use of the plan to the state of the run; see ``_run.PLAN_KEY``."""
    state["used"].append(usage["number"])
    state["omitted"][str(usage["number"])] = usage["omitted"]
    state["unneeded"][str(usage["number"])] = usage["unneeded"]
    # The plan sessions of different gateways can assign the same ids.
    state["bindings"].setdefault(usage["gateway"], {}).update(usage["bindings"])
    state["opened_at"].update(usage["opened_at"])
    state["swapped"] = sorted({*state["swapped"], *usage["swapped"]})
    for file, snapshot_id in usage["exported"].items():
        state["exported"].setdefault(file, []).append(snapshot_id)


def make_approved_option(
    entries: Sequence[Entry], task_key: Mapping[str, Any], state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the option ``approved_plan`` of a task.

    ``entries``: all entries of the plan. ``task_key``: the host and path of the task. ``state``: see
    ``make_initial_state``.
    """
    bindings = state["bindings"]
    host = _find_planned_host(task_key["host"], bindings.values()) if "host" in task_key else ""
    task_entries = _find_task_entries(entries, task_key)
    hosts = {
        host,
        *(state["swapped"] if host in state["swapped"] else ()),
        *_find_hosts_sharing_objects(task_entries, host),
    }
    return {
        "run": state["run"],
        "opened_at": state["opened_at"],
        "exported": state["exported"],
        "host": host,
        "entries": [
            {**entry, "number": number}
            for number, entry in task_entries
            if number not in state["used"] and entry.get("host", "") in hosts
        ],
        "gateways": {
            gateway: {
                **_list_objects([entry for entry in entries if entry["gateway"] == gateway]),
                "bindings": bindings.get(gateway, {}),
            }
            for gateway in {entry["gateway"] for entry in entries}
        },
    }


def _list_objects(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """Return the objects that the entries of one gateway create and remove; see ``Approval``."""
    changes = [change for entry in entries for action in entry["actions"] for change in action["changes"]]
    created_names = {change["name"] for change in changes if change["before"] is None}
    removed_names = {change["name"] for change in changes if change["after"] is None}
    # A sandbox that is rolled back or replaced can become a user of another snapshot. The run may omit a rollback.
    moved_names = {
        change["after"]["name"]
        for entry in entries
        for action in entry["actions"]
        if action["verb"] in ("rollback", "replace")
        for change in action["changes"]
        if change["kind"] == SANDBOX
    }
    created_names |= moved_names
    removed_names |= moved_names
    for change in changes:
        if change["kind"] == VOLUME:
            before, after = (list_own_snapshots(change["name"], change[key]) for key in ("before", "after"))
            created_names |= after - before
            removed_names |= before - after
    return {
        "created": [ident for entry in entries for ident in entry["created"].values()],
        "created_names": sorted(created_names),
        "removed_names": sorted(removed_names),
        "mounting_names": sorted(_list_mounting_names(changes)),
    }


def _list_mounting_names(changes: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of the sandboxes that the entries of one gateway create or change.

    If another client mounts a volume in one of these sandboxes, the sandbox's generation shows that.
    """
    names = set()
    for change in changes:
        for view in filter(None, (change["before"], change["after"])):
            if change["kind"] == SANDBOX:
                names.update((change["name"], view.get("name", "")))
            elif change["kind"] == VOLUME:
                names.update(each["sandbox"] for each in view.get("attachments", ()))
    return names


def _find_task_entries(entries: Sequence[Entry], task_key: Mapping[str, Any]) -> list[tuple[int, Entry]]:
    """Return the entries of a task for all hosts, with their numbers."""
    location = [(key, value) for key, value in task_key.items() if key != "host"]
    return [
        (number, entry) for number, entry in enumerate(entries) if all(entry[key] == value for key, value in location)
    ]


def _list_hosts_by_object(task_entries: Sequence[tuple[int, Entry]]) -> list[tuple[set[str], set[str]]]:
    """Return the hosts that change and the hosts that read each object of a task.

    ``task_entries``: the entries of the task for all hosts.
    """
    hosts: dict[str, tuple[set[str], set[str]]] = {}
    for _number, entry in task_entries:
        host = entry.get("host", "")
        for ref in (*_list_changed_names(entry), *entry["created"].values()):
            hosts.setdefault(ref, (set(), set()))[0].add(host)
        for path in entry["reads"]:
            hosts.setdefault(path.split("/")[2], (set(), set()))[1].add(host)
    return list(hosts.values())


def _find_hosts_sharing_objects(task_entries: Sequence[tuple[int, Entry]], host: str) -> set[str]:
    """Return the other hosts that declare the same objects in a task as ``host``; any of them can make the changes.

    ``task_entries``: the entries of the task for all hosts.
    """
    sharing_hosts: set[str] = set()
    for changing_hosts, reading_hosts in _list_hosts_by_object(task_entries):
        if host in changing_hosts:
            sharing_hosts |= reading_hosts
        if host in reading_hosts:
            sharing_hosts |= changing_hosts
    return sharing_hosts - {host}


def shares_objects(entries: Sequence[Entry], task_key: Mapping[str, Any]) -> bool:
    """Return whether several hosts declare the same objects in a task, so that only one at a time may run it.

    ``entries``, ``task_key``: see ``make_approved_option``.
    """
    hosts_by_object = _list_hosts_by_object(_find_task_entries(entries, task_key))
    return any(
        changing_hosts and reading_hosts and len(changing_hosts | reading_hosts) > 1
        for changing_hosts, reading_hosts in hosts_by_object
    )


def _find_planned_host(host: str, bindings: Iterable[Mapping[str, str]]) -> str:
    """Return the name that a host had in the check-mode run, which may contain the planned id of a sandbox."""
    for each in bindings:
        host = insert_planned_ids(host, each)
    return host


def list_own_snapshots(volume: str, view: Mapping[str, Any] | None) -> set[str]:
    """Return the names of a volume's own snapshots, in the form VOLUME@SNAPSHOT, from its view."""
    return {f"{volume}@{snapshot}" for snapshot in (view or {}).get("snapshots", ())}


class Approval:
    """The part of an applied plan that concerns one task, which is the modules' option ``approved_plan``.

    ``exported``: for each file, the ids of the snapshots that this run has exported to it, on any host; for each
    reference, the digests of the artifacts that it has pushed. ``host``: the
    name that the task's host had in the check-mode run. ``entries``: the task's entries that this run has not
    used yet, each with its ``number``, including those of hosts that declare the same objects. ``gateways``: for
    each gateway, ``bindings``, the real ids that earlier tasks found for planned ones, and the times at which they
    created volumes; ``created``, the planned ids that the run itself has to create; ``created_names`` and
    ``removed_names``, the objects that the plan creates or removes; and ``mounting_names``, the sandboxes that the run
    may itself cause to mount a volume.

    ``read_version``: returns the current version of the object with a path in the API.
    """

    def __init__(self, option: Mapping[str, Any], gateway_id: str, read_version: Callable[[str], str]) -> None:
        self.host: str = option["host"]
        self._entries: list[Entry] = option["entries"]
        self._exported: Mapping[str, Sequence[str]] = option["exported"]
        self._gateway_id = gateway_id
        self._read_version = read_version
        objects = option["gateways"].get(gateway_id, {})
        self._created_ids = frozenset(objects.get("created", ()))
        self._created_names = frozenset(objects.get("created_names", ()))
        self._removed_names = frozenset(objects.get("removed_names", ()))
        self._mounting_names = frozenset(objects.get("mounting_names", ()))
        # Values of env and metadata can contain ids from other gateways, whose sessions assign the same planned ids.
        self._other_ids = tuple(
            (planned_id, real_id)
            for gateway, each in option["gateways"].items()
            for planned_id, real_id in each["bindings"].items()
            if gateway != gateway_id and is_planned_id(planned_id)
        )
        self._approved_entry: Entry | None = None
        self.bindings: dict[str, str] = dict(objects.get("bindings", {}))

    def find_entry(
        self,
        actions: Sequence[Action],
        reads: Mapping[str, str],
        own_paths: Iterable[str] = (),
        *,
        is_conditional: bool = False,
    ) -> tuple[Entry | None, list[Action]]:
        """Return the entry of a task, and the ``actions`` that the entry contains. Adds ids to ``bindings``.

        All actions are in the entry, except those that the check-mode run predicts to fail.

        ``reads``: the versions of the objects that the task has read, by path. ``own_paths``: the paths of the objects
        that the task declares. ``is_conditional``: whether the task captures or rolls back only if it is necessary;
        it may then leave out these actions for any of its objects.

        Raises Failure if no entry contains the actions, or if an object has changed since the plan was made. The entry
        is None if the task has no actions, and no entry is about its objects.
        """
        versions = self._substitute_planned_ids(reads)
        planned_own_paths = self._substitute_planned_ids(dict.fromkeys(own_paths, "")).keys()
        candidates = self._entries
        if not actions:
            candidates = [entry for entry in candidates if planned_own_paths <= entry["reads"].keys()]
            if not candidates:
                return None, []
        verbs = ", ".join(dict.fromkeys(each.verb for each in actions))
        names = {insert_planned_ids(change.name, self.bindings) for action in actions for change in action.changes}
        failures = []
        for entry in self._sort(candidates, names, versions.keys()):
            matching = _Matching(self.bindings, self._created_ids, self._other_ids)
            try:
                self._check_unchanged(entry, versions, matching)
                may_fail = entry["failure"] is not None and planned_own_paths <= entry["reads"].keys()
                if actions and not entry["actions"] and not may_fail:
                    raise _create_unplanned_error(f"the plan does not contain this task's changes ({verbs})")
                planned_actions = entry["actions"]
                if is_conditional:
                    planned_actions = _drop_unnecessary_actions(planned_actions, actions, matching.bindings)
                approved_actions = list(actions)
                if may_fail:
                    approved_actions = _drop_failing_actions(planned_actions, actions, matching)
                planned_actions = self._drop_repeated_exports(planned_actions, actions)
                if actions:
                    _match_actions(planned_actions, approved_actions, matching)
                    self._check_overwritten_files(planned_actions, approved_actions)
                elif planned_actions:
                    _check_no_actions(entry)
                self._check_unread_objects(entry, versions, matching)
            except Failure as failure:
                failures.append(failure)
            else:
                self.bindings = matching.bindings
                self._approved_entry = {**entry, "actions": planned_actions}
                return entry, approved_actions
        raise (
            failures[0]
            if failures
            else _create_unplanned_error(f"the plan does not contain this task's changes ({verbs})")
        )

    def find_hosts(self, names: Iterable[str]) -> dict[str, str]:
        """Return the hosts of new sandboxes in the entry of the task, by the names that they have in this run."""
        actions = self._approved_entry["actions"] if self._approved_entry is not None else ()
        hosts = {name: host for each in actions for name, host in each["request"].get(HOSTS_KEY, {}).items()}
        planned_names = {name: insert_planned_ids(name, self.bindings) for name in names}
        return {name: hosts[planned] for name, planned in planned_names.items() if planned in hosts}

    def list_unneeded_names(self, entry: Entry, actions: Sequence[Action]) -> list[str]:
        """Return the names of the objects that the entry captures or rolls back, but for which the task has no actions.

        ``entry`` and ``actions``: see ``find_entry``.
        """
        needed_actions = _drop_unnecessary_actions(entry["actions"], actions, self.bindings)
        unneeded_actions = [action for action in entry["actions"] if action not in needed_actions]
        return [change["name"] for action in unneeded_actions for change in action["changes"]]

    def check_unchanged_again(self, number: int, reads: Mapping[str, str]) -> None:
        """Raise Failure if another client has changed an object of an approved action since ``find_entry``.

        ``number``: the number of approved actions before this one. ``reads``: the new versions of these objects, by
        path. The run has created or removed none of them since.
        """
        if self._approved_entry is None:
            return
        # The snapshots of a volume that the earlier actions needed may be gone.
        entry = {**self._approved_entry, "actions": self._approved_entry["actions"][number:]}
        try:
            self._check_unchanged(
                entry, self._substitute_planned_ids(reads), _Matching(self.bindings, self._created_ids, self._other_ids)
            )
        except Failure as failure:
            raise Failure(failure.message.replace(_REMEDY, _REMEDY_BETWEEN_ACTIONS), failure.kind) from None

    def check_unchanged(self, reads: Mapping[str, str]) -> None:
        """Raise Failure if a change since the plan was made explains why the task cannot be carried out.

        ``reads``: see ``find_entry``.
        """
        versions = self._substitute_planned_ids(reads)
        candidates = [entry for entry in self._entries if entry["reads"].keys() & versions.keys()]
        failures = []
        for entry in self._sort(candidates, set(), versions.keys()):
            try:
                self._check_unchanged(entry, versions, _Matching(self.bindings, self._created_ids, self._other_ids))
            except Failure as failure:
                failures.append(failure)
            else:
                return
        if failures:
            raise failures[0]

    def _sort(self, entries: Iterable[Entry], names: Set[str], paths: Set[str]) -> list[Entry]:
        """Return the entries in the order in which to try them. A failure is about the first one.

        The host's own entries come first, among them those at this gateway, then those with the most similar objects.
        """
        return sorted(
            entries,
            key=lambda entry: (
                entry.get("host", "") != self.host,
                entry["gateway"] != self._gateway_id,
                len(names ^ _list_changed_names(entry)) + len(paths ^ entry["reads"].keys()),
            ),
        )

    def _substitute_planned_ids(self, reads: Mapping[str, str]) -> dict[str, str]:
        """Return ``reads`` with planned ids in place of the real ids in its paths."""
        return {insert_planned_ids(path, self.bindings): version for path, version in reads.items()}

    def _check_unchanged(self, entry: Entry, versions: Mapping[str, str], matching: _Matching) -> None:
        if entry["gateway"] != self._gateway_id:
            raise _create_unplanned_error("the plan was made for a different gateway")
        # The message is about the name of an object rather than its id.
        for path in sorted(entry["reads"], key=lambda path: bool(_ID_PATH_PATTERN.search(path))):
            if path in versions:
                self._check_version(entry, path, versions[path], matching)

    def _check_unread_objects(self, entry: Entry, versions: Mapping[str, str], matching: _Matching) -> None:
        """Compare the objects that only the check-mode run has read, such as a volume that no longer has its name."""
        for path in entry["reads"].keys() - versions.keys():
            real_path = _PLANNED_ID_PATTERN.sub(lambda m: matching.bindings.get(m[0], m[0]), path)
            if not _PLANNED_ID_PATTERN.search(real_path):
                self._check_version(entry, path, self._read_version(real_path), matching)

    def _check_overwritten_files(self, planned: Iterable[Mapping[str, Any]], actual: Iterable[Action]) -> None:
        """Check that an export overwrites only the snapshot that the check-mode run found, or a snapshot of this run.

        The same applies to the artifact that a push replaces. In a check-mode run, earlier tasks write no files, and
        push nothing.
        """
        for planned_action, action in zip(planned, actual):
            if action.verb not in TARGET_KEYS:
                continue
            target_key, overwritten_key = TARGET_KEYS[action.verb]
            target, overwritten_id = action.request[target_key], action.request[overwritten_key]
            planned_id = planned_action["request"].get(overwritten_key, "")
            if overwritten_id not in ("", planned_id, *self._exported.get(target, ())):
                noun = "snapshot" if action.verb == "export" else "artifact"
                before = f"{noun} {planned_id}" if planned_id else f"no {noun}"
                raise _create_unplanned_error(
                    f"{target} now contains {noun} {overwritten_id}, but contained {before} when the plan was made"
                )

    def _drop_repeated_exports(
        self, planned: Iterable[Mapping[str, Any]], actual: Iterable[Action]
    ) -> list[Mapping[str, Any]]:
        """Return the planned actions, except exports and pushes that this run itself has already made.

        In a check-mode run, a later task or another host does not find what an earlier one writes.
        """
        remaining = {(action.verb, insert_planned_ids(action.changes[0].name, self.bindings)) for action in actual}
        written = {insert_planned_ids(target, self.bindings) for target in self._exported}
        return [
            action
            for action in planned
            if action["verb"] not in TARGET_KEYS
            or (action["verb"], action["changes"][0]["name"]) in remaining
            or action["request"][TARGET_KEYS[action["verb"]][0]] not in written
        ]

    def _check_version(self, entry: Entry, path: str, actual: str, matching: _Matching) -> None:
        planned = entry["reads"][path]
        name = path.rpartition("/")[2]
        if planned == actual:
            return
        if not planned:
            raise _create_unplanned_error(
                f"{_describe_path(path)} did not exist when the plan was made, but exists now"
            )
        planned_parts, actual_parts = _parse_version(planned), _parse_version(actual)
        planned_ident = planned_parts.get("id", "")
        if not actual:
            raise self._create_missing_error(path, planned_ident, matching)
        if "entries" in planned_parts:
            self._check_snapshots(entry, path, planned_parts["entries"], actual_parts.get("entries", ""), matching)
            if "clones" in planned_parts and "clones" in actual_parts:
                self._check_clones(path, planned_parts["clones"], actual_parts["clones"], matching)
            return
        actual_ident = actual_parts.get("id", "")
        if planned_ident == _NEW_MARKER:
            is_same = matching.bindings.get(make_volume_key(name)) == actual_ident
        else:
            is_same = matching.match_text(planned_ident, actual_ident)
        if not is_same and path.startswith("/templates/") and is_planned_id(planned_ident):
            raise _create_unplanned_error(
                f"{_describe_path(path)} is not the one that this run builds: the build has not finished, or another "
                "client has replaced the template"
            )
        if not is_same:
            raise _create_unplanned_error(f"{_describe_path(path)} has been replaced since the plan was made")
        if not planned_parts.keys() & actual_parts.keys() >= {"generation"}:
            return  # The template is being built.
        planned_number, actual_number = planned_parts.get("generation", ""), actual_parts.get("generation", "")
        if planned_number != actual_number:
            raise _create_unplanned_error(
                f"{_describe_path(path)} has changed since the plan was made (its generation is {actual_number}, not "
                f"{planned_number})"
            )
        if "users" in planned_parts and "users" in actual_parts:
            texts = planned_parts["users"], insert_planned_ids(actual_parts["users"], matching.bindings)
            users = [set(text.split(",")) - {""} for text in texts]
            self._check_members(f"the users of {_describe_path(path)}", *users, self._created_names)
        if "mounts" in planned_parts and "mounts" in actual_parts:
            mounts = insert_planned_ids(actual_parts["mounts"], matching.bindings)
            self._check_mounts(path, planned_parts["mounts"], mounts)

    def _check_mounts(self, path: str, planned: str, actual: str) -> None:
        """Compare the sandboxes that mount a volume, given as ``name:ro`` or ``name:rw``.

        Sandboxes that no longer mount the volume make no difference.
        """
        new_mounts = sorted({*actual.split(",")} - {*planned.split(","), ""})
        names = [each.rpartition(":")[0] for each in new_mounts]
        # The task of another host may be replacing a sandbox, which then has a temporary name.
        other_names = [name for name in names if _TEMPORARY_SUFFIX.sub("", name) not in self._mounting_names]
        if other_names:
            raise _create_unplanned_error(
                f"{_describe_path(path)} has been mounted since the plan was made ({', '.join(other_names)})"
            )

    def _create_missing_error(self, path: str, planned_ident: str, matching: _Matching) -> Failure:
        """Return the error for an object that has lost its name, or that the run has not created.

        ``planned_ident``: its id when the plan was made.
        """
        subject = _describe_path(path)
        is_new_volume = planned_ident == _NEW_MARKER
        if matching.is_pending(planned_ident) or (
            is_new_volume and make_volume_key(path.rpartition("/")[2]) not in matching.bindings
        ):
            return _create_unplanned_error(
                f"{subject} does not exist, because this run has not carried out the task that creates it"
            )
        ident = matching.bindings.get(planned_ident, planned_ident)
        has_id = not path.startswith("/volumes/") and _REAL_ID_PATTERN.fullmatch(ident)
        if has_id and self._read_version(f"{path.rpartition('/')[0]}/{ident}"):
            return _create_unplanned_error(f"{subject} has been renamed (its id is {ident}) since the plan was made")
        return _create_unplanned_error(f"{subject} has been removed since the plan was made")

    def _check_snapshots(self, entry: Entry, path: str, planned: str, actual: str, matching: _Matching) -> None:
        """Compare the snapshots of a volume, which are ``name:id`` pairs."""
        subject = f"the snapshots of {_describe_path(path)}"
        volume = path.split("/")[2]
        planned_snapshots = _parse_pairs(planned)
        actual_snapshots = matching.parse_pairs(actual)
        used_names = {name for name in planned_snapshots if _uses_snapshot(entry, volume, name)}
        pending_names = {name for name, ident in planned_snapshots.items() if matching.is_pending(ident)} - used_names
        for name in planned_snapshots.keys() & actual_snapshots.keys():
            # The task of another host may be making this snapshot, and record its id only at the end.
            is_pending = name in pending_names
            if not is_pending and not matching.match_text(planned_snapshots[name], actual_snapshots[name]):
                raise _create_unplanned_error(f"{subject} have changed since the plan was made ({name})")
        if missing_names := used_names - actual_snapshots.keys():
            raise _create_unplanned_error(
                f"{subject} have changed since the plan was made ({', '.join(sorted(missing_names))})"
            )
        members = ({f"{volume}@{name}" for name in names} for names in (planned_snapshots, actual_snapshots))
        self._check_members(subject, *members, {f"{volume}@{name}" for name in pending_names})

    def _check_clones(self, path: str, planned: str, actual: str, matching: _Matching) -> None:
        """Compare the volumes that were created from the snapshots of a volume, which are ``name:id of snapshot``."""
        subject = f"the clones of {_describe_path(path)}"
        planned_clones, actual_clones = _parse_pairs(planned), matching.parse_pairs(actual)
        for name in planned_clones.keys() & actual_clones.keys():
            snapshot_ids = planned_clones[name], actual_clones[name]
            if not matching.is_pending(snapshot_ids[0]) and not matching.match_text(*snapshot_ids):
                raise _create_unplanned_error(f"{subject} have changed since the plan was made ({name})")
        self._check_members(subject, planned_clones.keys(), actual_clones.keys(), self._created_names)

    def _check_members(self, subject: str, planned: Set[str], actual: Set[str], pending_names: Set[str]) -> None:
        """Compare names that belong to an object. Other hosts of the run may already have made or removed theirs.

        ``pending_names``: planned ones that the run may not have made yet.
        """
        added_names = actual - planned - self._created_names
        removed_names = planned - actual - pending_names - self._removed_names
        # A volume snapshot that belongs to a sandbox snapshot has the sandbox snapshot's id.
        if other_names := sorted(
            name for name in added_names | removed_names if not is_planned_id(name.rpartition("@")[2])
        ):
            raise _create_unplanned_error(f"{subject} have changed since the plan was made ({', '.join(other_names)})")


def _uses_snapshot(entry: Entry, volume: str, snapshot: str) -> bool:
    """Return whether an action restores or removes a snapshot of a volume. Other actions name it by its id."""
    return any(
        action["verb"] == "remove" or action["request"].get("snapshot") == snapshot
        for action in entry["actions"]
        for change in action["changes"]
        if (change["kind"], change["name"]) == (VOLUME, volume)
    )


def _drop_unnecessary_actions(
    planned: Iterable[Mapping[str, Any]], actual: Iterable[Action], bindings: Mapping[str, str]
) -> list[Mapping[str, Any]]:
    """Return the planned actions, except captures and rollbacks of objects for which the task has no actions."""
    names = {insert_planned_ids(change.name, bindings) for action in actual for change in action.changes}
    return [
        action
        for action in planned
        if action["verb"] not in _CONDITIONAL_VERBS or any(change["name"] in names for change in action["changes"])
    ]


def _drop_failing_actions(
    planned: Iterable[Mapping[str, Any]], actual: Iterable[Action], matching: _Matching
) -> list[Action]:
    """Return the actions of a task, except those that the plan omits because they failed in the check-mode run.

    ``planned``: the actions in the plan, in the same order.
    """
    remaining = [(each["verb"], [change["name"] for change in _list_own_changes(each)]) for each in planned]
    kept_actions = []
    for action in actual:
        names = [insert_planned_ids(change.name, matching.bindings) for change in action.changes]
        if remaining and remaining[0] == (action.verb, names):
            del remaining[0]
            kept_actions.append(action)
    return kept_actions


def _check_no_actions(entry: Entry) -> None:
    if names := ", ".join(sorted(_list_changed_names(entry))):
        raise _create_unplanned_error(
            f"the plan contains changes for this task ({names}) that someone else has already made"
        )


class _Matching:
    """Compares the values of a plan with the values of a run, where each planned id stands for one real id.

    ``other_ids``: the pairs of planned and real ids of other gateways.
    """

    def __init__(
        self, bindings: Mapping[str, str], created_ids: Container[str], other_ids: Sequence[tuple[str, str]]
    ) -> None:
        self.bindings = dict(bindings)
        self._created_ids = created_ids
        self._other_ids = other_ids

    def match_text(self, planned: str, actual: str) -> bool:
        """Return whether two texts are equal. Adds the pairs of planned and real ids that it finds to ``bindings``."""
        if planned == actual:
            return True
        planned_ids = _PLANNED_ID_PATTERN.findall(planned)
        pattern = "".join(
            f"({_REAL_ID_PATTERN.pattern})" if is_planned_id(part) else re.escape(part)
            for part in _PLANNED_ID_PATTERN.split(planned)
        )
        match = re.fullmatch(pattern.replace(re.escape(f".old-{_SHORT_PLANNED_ID}"), r"\.old-[0-9a-f]{8}"), actual)
        return match is not None and all(map(self._bind, planned_ids, match.groups()))

    def _substitute_planned_ids(self, value: Any) -> Any:
        """Return a value with planned ids in place of the real ids that are bound to them, because a hash covers both.

        ``value``: strings by name, or anything else, which is returned unchanged.
        """
        if not isinstance(value, Mapping):
            return value
        result = dict(value)
        for planned_id, real_id in (*self.bindings.items(), *self._other_ids):
            if is_planned_id(planned_id):
                result = {key: text.replace(real_id, planned_id) for key, text in result.items()}
        return result

    def parse_pairs(self, actual: str) -> dict[str, str]:
        """Return the values of a run by name, as ``_parse_pairs`` does, with planned ids in the names."""
        return {insert_planned_ids(name, self.bindings): value for name, value in _parse_pairs(actual).items()}

    def is_pending(self, ident: str) -> bool:
        """Return whether a planned id stands for an object that the run has to create, but has not recorded yet."""
        return ident in self._created_ids and ident not in self.bindings

    def _bind(self, planned_id: str, real_id: str) -> bool:
        if (planned_id, real_id) in self._other_ids:
            return True
        if (
            planned_id not in self.bindings
            and planned_id not in self._created_ids
            and real_id not in self.bindings.values()
        ):
            self.bindings[planned_id] = real_id
        return self.bindings.get(planned_id) == real_id

    def check_value(self, planned: Any, actual: Any, location: str, ignored_keys: Container[str] = ()) -> None:
        """Compare two values. Raises Failure, whose message names the first difference.

        ``ignored_keys``: keys of the outermost mappings that are not compared.
        """
        if isinstance(planned, Mapping) and isinstance(actual, Mapping):
            for key in sorted({*planned, *actual}):
                if key in ignored_keys:
                    continue
                if key not in planned or key not in actual:
                    raise _create_difference_error(f"{location}.{key}", planned.get(key), actual.get(key))
                self.check_value(planned[key], actual[key], f"{location}.{key}")
        elif isinstance(planned, (list, tuple)) and isinstance(actual, (list, tuple)):
            if len(planned) != len(actual):
                raise _create_difference_error(location, planned, actual)
            for number, pair in enumerate(zip(planned, actual)):
                self.check_value(*pair, f"{location}.{number}")
        elif isinstance(planned, str) and planned.startswith(_HASH_PREFIX):
            if not _matches_hash(planned, self._substitute_planned_ids(actual)):
                raise _create_unplanned_error(f"the secrets in {location} differ from the secrets in the plan")
        elif isinstance(planned, str) and isinstance(actual, str):
            if not self.match_text(planned, actual):
                raise _create_difference_error(location, planned, actual)
        elif planned != actual:
            raise _create_difference_error(location, planned, actual)


def _create_unplanned_error(reason: str) -> Failure:
    return Failure(f"{reason}: {_REMEDY}", "not_planned")


def _list_changed_names(entry: Entry) -> set[str]:
    return {change["name"] for action in entry["actions"] for change in action["changes"]}


def _parse_version(version: str) -> dict[str, str]:
    return dict(part.partition("=")[::2] for part in version.split(" "))


def _parse_pairs(text: str) -> dict[str, str]:
    return dict(pair.partition(":")[::2] for pair in text.split(",") if pair)


def _describe_path(path: str) -> str:
    kind, _separator, ref = path.strip("/").partition("/")
    singular = {"sandboxes": "sandbox"}.get(kind, kind[:-1])
    return f"{singular} {ref.partition('/')[0]!r}"


def _match_actions(planned: Sequence[Mapping[str, Any]], actual: Sequence[Action], matching: _Matching) -> None:
    planned_verbs, actual_verbs = [each["verb"] for each in planned], [each.verb for each in actual]
    if planned_verbs != actual_verbs:
        raise _create_unplanned_error(
            f"the task would now carry out actions ({', '.join(actual_verbs)}) other than those in the plan "
            f"({', '.join(planned_verbs)})"
        )
    for planned_action, action in zip(planned, actual):
        verb, planned_changes = action.verb, _list_own_changes(planned_action)
        matching.check_value(
            [[each["kind"], each["name"]] for each in planned_changes],
            [[each.kind, each.name] for each in action.changes],
            f"{verb} objects",
        )
        ignored_keys = _UNKNOWABLE_VIEW_KEYS if verb in _TIMEOUT_VERBS else {*_UNKNOWABLE_VIEW_KEYS, "timeout"}
        for planned_change, change in zip(planned_changes, action.changes):
            matching.check_value(planned_change["after"], change.after, f"{verb} {change.name}", ignored_keys)
        ignored_request_keys = {*_UNPLANNED_REQUEST_KEYS, *_OVERWRITTEN_KEYS, HOSTS_KEY}
        matching.check_value(planned_action["request"], action.request, f"{verb} request", ignored_request_keys)


def _list_own_changes(action: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the changes of a planned action without the snapshots that a retention rule removes after it."""
    return [each for each in action["changes"] if action["verb"] != "capture" or each["after"] is not None]


def _create_difference_error(location: str, planned: Any, actual: Any) -> Failure:
    return _create_unplanned_error(f"{location} is {_shorten(actual)}, but {_shorten(planned)} in the plan")


def _shorten(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 200 else text[:197] + "..."


def _hash_secrets(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with a hash in place of the environment of a sandbox."""
    body = request.get("body")
    if not isinstance(body, Mapping) or not body.get(_SECRET_FIELD):
        return dict(request)
    return {**request, "body": {**body, _SECRET_FIELD: _hash(_serialize(body[_SECRET_FIELD]), _SALT)}}


def _serialize(value: Any) -> str:
    return json.dumps(dict(value) if isinstance(value, Mapping) else value, sort_keys=True)


@functools.lru_cache(maxsize=1000)
def _hash(text: str, salt: str) -> str:
    digest = hashlib.pbkdf2_hmac("sha256", text.encode(), salt.encode(), _HASH_ROUNDS).hex()
    return f"{_HASH_PREFIX}{salt}:{digest}"


def _matches_hash(planned: str, actual: Any) -> bool:
    salt = planned[len(_HASH_PREFIX) :].partition(":")[0]
    return hmac.compare_digest(planned, _hash(_serialize(actual), salt))
