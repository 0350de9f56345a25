# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Run a module or action plugin: observe, plan, apply the plan, and report.

A check-mode run applies the plan in a plan session, if the gateway has one. Otherwise, check mode ends after planning.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils._approval import (
    PREDICTED_FAILURE,
    Approval,
    compute_object_version,
    describe_actions,
    estimate_costs,
    insert_planned_ids,
    list_own_snapshots,
    make_volume_key,
)
from ansible_collections.grove.sandbox.plugins.module_utils._artifacts import find_artifact
from ansible_collections.grove.sandbox.plugins.module_utils._client import (
    ID_PATTERN,
    PAGE_SIZE,
    Client,
    quote_segment,
)
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure, join_failures
from ansible_collections.grove.sandbox.plugins.module_utils._info import Listing
from ansible_collections.grove.sandbox.plugins.module_utils._placement import add_planned_hosts, place_as_planned
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    ARCHIVES_KEY,
    LOGIN_KEY,
    RECREATING_VERBS,
    SNAPSHOT,
    TEMPLATE,
    UNFINISHED_BUILD_KEYS,
    VOLUME,
    Action,
    Change,
    Plan,
    diff,
    fill_values_from_session,
    hide_unknown_values,
    is_planned_id,
    predict,
)
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import HOST_KEY, make_snapshot_shape

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._kinds import ManagedKind, ResourceKind

MASK = "********"
PASSWORD_OPTIONS = ("gateway_token", "registry_password")
"""Options whose values no result and no log contains."""
PLAN_KEY = "_plan"
"""The key of a result for the action plugin: the task's entry for the plan file, or its use of the applied plan."""
SESSION_KEY = "_plan_session"
"""The key of a result for the action plugin: the path of the plan session or applied run that the task has used."""
OPENED_KEY = "_plan_opened"
"""The key of a result for the action plugin: the key of the plan session, and when it was opened."""
_OBJECT_PATHS = ("/sandboxes/", "/snapshots/", "/templates/", "/volumes/")
_USER_KEYS = ("metadata", "envVars")
"""The keys in a request body whose values can be any text that the user chooses. They name no objects."""
_REMOVED_KEYS = ("name", "description", "source_sandbox_id", "status", "volumes")
"""The keys with which an entry describes a snapshot that a retention rule removes."""
_RACE_WAIT_SECONDS = 0.2
_CONDITION_ON_KEY = "only if the run uses a key with the scope admin"
CONDITIONAL_OPTIONS = ("when_changed", "unless_clean")
"""Options with which a task captures or rolls back a sandbox only if it has diverged, which only the run can know."""


def run(
    resource_kind: ResourceKind, params: Mapping[str, Any], *, check_mode: bool, client: Client | None = None
) -> dict[str, Any]:
    """Make the changes that ``params`` request. In ``check_mode``, predict them, using a plan session if there is one.

    Returns the module's result. Errors that a user can cause are reported in ``failed`` and ``failure`` and do not
    raise an exception. The result has a ``diff``, unless ``resource_kind`` is a Listing.
    """
    gateway_client = client
    try:
        gateway_client = gateway_client or connect(params)
        gateway_client.is_predicting = check_mode
        try:
            if check_mode and params.get("check_run"):
                gateway_client.enter_plan(params["check_run"], params.get("check_sessions"))
            elif not check_mode and params.get("approved_plan") is not None:
                _join_run(gateway_client, params["approved_plan"])
            result = (
                resource_kind.make_result(gateway_client, params)
                if isinstance(resource_kind, Listing)
                else _Run(resource_kind, params, gateway_client, check_mode).carry_out_task()
            )
        finally:
            if client is None:
                gateway_client.close()
    except Failure as failure:
        result = make_failure_result(failure)
        if check_mode and gateway_client is not None and gateway_client.is_planning and not params.get("predict_only"):
            result[PLAN_KEY] = _make_failed_entry(gateway_client, failure)
    secrets = find_secrets(params)
    entry = result.pop(PLAN_KEY, None)
    masked_result: dict[str, Any] = mask_secrets(result, secrets)
    if params.get("is_async"):
        return masked_result
    if entry is not None:
        # The entry contains secrets only as hashes. Masking would change names that contain a short secret.
        masked_result[PLAN_KEY] = {
            **entry,
            **({"failure": mask_secrets(entry["failure"], secrets)} if "failure" in entry else {}),
        }
    is_in_session = params.get("check_run" if check_mode else "approved_plan") is not None
    if is_in_session and gateway_client is not None and gateway_client.session_path:
        masked_result[SESSION_KEY] = gateway_client.session_path
        if gateway_client.is_planning:
            masked_result[OPENED_KEY] = [gateway_client.plan_key, gateway_client.plan_opened_at]
    return masked_result


def _join_run(client: Client, approved_plan: Mapping[str, Any]) -> None:
    """Send requests as part of the run that applies the plan. Raises Failure if the gateway has forgotten the run."""
    client.enter_run(approved_plan["run"])
    if approved_plan["opened_at"].get(_make_run_key(client), client.run_opened_at) != client.run_opened_at:
        raise Failure(
            "the gateway was restarted during this run, so it no longer knows which changes are the run's own: this "
            "task changed nothing. Make a new plan with a check-mode run",
            "not_planned",
        )


def _make_run_key(client: Client) -> str:
    """Return the key of an applied run in ``opened_at``. A run has the same id in all gateways."""
    return f"{client.gateway_id}/{client.run_id}"


def connect(params: Mapping[str, Any]) -> Client:
    """Return a client for the gateway that the common options select. Raises Failure."""
    return Client(
        params.get("gateway_url") or "",
        params.get("gateway_token") or "",
        params.get("ca_path") or "",
        params.get("validate_certs") is not False,
        params.get("gateway_timeout") or 300,
    )


def make_failure_result(failure: Failure, **fields: Any) -> dict[str, Any]:
    return {"changed": False, **fields, "failed": True, "msg": failure.message, "failure": failure.to_dict()}


class _Run:
    def __init__(self, resource_kind: ManagedKind, params: Mapping[str, Any], client: Client, check_mode: bool) -> None:
        self.resource_kind = resource_kind
        self.client = client
        self.check_mode = check_mode
        self.continue_on_error = bool(params.get("continue_on_error"))
        self.predict_only = bool(params.get("predict_only"))
        self.approval = (
            Approval(params["approved_plan"], client.gateway_id, self._read_version) if client.run_id else None
        )
        self.want = resource_kind.parse_desired_state(params)
        self.failures: dict[str, Failure] = {}
        self.completed_actions: list[Action] = []
        self.planned_actions: list[Action] = []
        """The actions for the plan file: all that did not fail, even if a check-mode run does not expect them."""
        self._taken_ids: list[str] = []
        self._mounted_paths: set[str] = set()
        """The paths of the volumes that the task mounts, or captures or rolls back with a sandbox."""

    def carry_out_task(self) -> dict[str, Any]:
        """Carry out the task. Starts over if another client creates one of its objects at the same time."""
        deadline = time.monotonic() + self.client.timeout
        while True:
            result = self._plan_and_apply()
            taken_ids = self._find_taken_ids()
            # Otherwise, the object that has the name is not one that the task can use.
            if taken_ids is None or time.monotonic() > deadline or (taken_ids and taken_ids == self._taken_ids):
                return result
            self._taken_ids = taken_ids
            time.sleep(_RACE_WAIT_SECONDS)

    def _find_taken_ids(self) -> list[str] | None:
        """Return the ids of the objects whose names the gateway refused, or None if this is not why the task failed.

        The list is empty if the objects are still being created.
        """
        failures = [*self.failures.values()]
        # A failure of the task itself has no status.
        is_race = all(failure.kind == "name_taken" and failure.status for failure in failures)
        if not failures or not is_race or self.completed_actions:
            return None
        return sorted(ident for failure in failures for ident in failure.blockers)

    def _plan_and_apply(self) -> dict[str, Any]:
        self.client.forget_objects()
        self.client.started_builds.clear()
        self.client.uploaded_digests.clear()
        self.planned_actions = []
        try:
            have = self.resource_kind.observe(self.client, self.want)
            plan: Plan = self.resource_kind.plan(self.want, have)
        except Failure as failure:
            if self.approval is not None:
                self.approval.check_unchanged(self._read_versions(self.client.requested_paths))
            if not (self.check_mode and self.client.is_planning) or self.predict_only:
                raise
            return self._make_unobserved_result(failure)
        self.failures = dict(plan.failures)
        shapes = self.resource_kind.get_resources_by_name(self.want, have)
        reads = self._list_reads(plan, have)
        if self.failures and not self.continue_on_error:
            # Otherwise, the task would change other objects before the gateway refuses a request.
            if self.approval is not None:
                self.approval.check_unchanged(reads)
            return self._add_entry(self._build_result(shapes), Plan(), reads, shapes, shapes)
        if plan.actions:
            self.client.require_version()
        if self.approval is not None:
            return self._apply_approved_plan(self.approval, plan, shapes, reads)
        if self.check_mode and (self.predict_only or not self.client.is_planning):
            self.completed_actions = [action for action in plan.actions if action.is_expected]
            return self._build_result(predict(shapes, self.completed_actions))
        self._apply(plan.actions)
        if self.check_mode:
            planned_shapes = self._observe_again(shapes) if self.completed_actions else shapes
            new_shapes = fill_values_from_session(predict(shapes, self.completed_actions), planned_shapes)
            for name in self._list_unfinished_builds():
                new_shapes[name].update(dict.fromkeys(UNFINISHED_BUILD_KEYS))
            result = self._build_result(new_shapes)
            return self._add_entry(result, plan, reads, shapes, planned_shapes)
        if self.completed_actions or self.failures:
            shapes = self._observe_again(shapes)
        return self._build_result(shapes)

    def _make_unobserved_result(self, failure: Failure) -> dict[str, Any]:
        """Return the result of a task in a plan session that fails before it has a plan, with its entry."""
        paths = {*self.client.requested_paths}
        if failure.kind == "not_found":
            # If another client creates the missing object, a run that applies the plan compares the task with it.
            own_paths = self._list_own_paths()
            for path in own_paths:
                if path not in self.client.known_objects:
                    self._read_version(path)
            paths.update(own_paths)
        entry = _make_failed_entry(self.client, failure, reads=self._read_versions(paths))
        return {**make_failure_result(failure), PLAN_KEY: entry}

    def _list_reads(self, plan: Plan, have: Any) -> dict[str, str]:
        """Return the versions of the objects on which the task depends, by path. Call it before the plan is applied."""
        if not self.client.is_planning and self.approval is None:
            return {}
        named_paths = {*self.resource_kind.list_named_paths(self.want, have)}
        needed_paths = {*self._list_own_paths(), *named_paths}
        removed_paths = set()
        mentioned_texts = {name for names in self.resource_kind.get_result_lists(self.want).values() for name in names}
        for action in plan.actions:
            for change in action.changes:
                _collect_texts((change.name, change.before, change.after), mentioned_texts)
            removed_paths.update(_list_removed_templates(action))
            described_keys = action.request.keys() - {LOGIN_KEY, ARCHIVES_KEY}
            _collect_texts({key: action.request[key] for key in described_keys}, mentioned_texts)
            if sandbox_id := action.request.get("sandbox"):
                needed_paths.add(f"/sandboxes/{quote_segment(sandbox_id)}")
        known_objects = self.client.known_objects
        for path in {*needed_paths, *removed_paths}.difference(known_objects, self._list_own_paths()):
            self.client.find(path)
        needed_paths.update(
            path
            for path in known_objects
            if path in self.client.requested_paths or path.split("/")[2] in mentioned_texts
        )
        reads = self._read_versions(needed_paths)
        for path in removed_paths:
            reads[path] = compute_object_version(path, known_objects[path], is_removed=True)
        self._mounted_paths = {path for path in named_paths if path.startswith("/volumes/")}
        for path in self._mounted_paths:
            reads[path] = self._compute_version(path, known_objects.get(path))
        return reads

    def _compute_version(self, path: str, data: Any, *, is_removed: bool = False) -> str:
        return compute_object_version(
            path,
            data,
            self.client.plan_opened_at,
            is_removed=is_removed,
            is_mounted=path in self._mounted_paths,
        )

    def _read_version(self, path: str, *, is_removed: bool = False) -> str:
        """Return the version of an object that the plan depends on, even if the task has not read it."""
        query: dict[str, Any] = {}
        if path.startswith("/sandboxes/"):
            query["diverged"] = False  # Otherwise, the guest would write to its disk.
        elif path.count("/") > 2:
            query["limit"] = PAGE_SIZE
        return self._compute_version(path, self.client.find(path, **query), is_removed=is_removed)

    def _compare_again(self, approval: Approval, reads: Mapping[str, str], number: int, action: Action) -> None:
        """Raise Failure if another client has changed an object of ``action`` during the task's earlier actions.

        Sends a request for each object. ``number``: the number of actions before this one. ``reads``: see
        ``_list_reads``.
        """
        if number == 0:
            return  # The versions have just been compared.
        body = action.request.get("body") or {}
        refs: set[str] = set()
        _collect_texts([change.name for change in action.changes], refs)
        _collect_texts({**action.request, "body": {key: body[key] for key in body if key not in _USER_KEYS}}, refs)
        refs.update(text.split("/")[2] for text in [*refs] if text.startswith(_OBJECT_PATHS))
        removed_paths = _list_removed_templates(action)
        paths_by_object: dict[tuple[str, str], list[str]] = {}
        for path, version in reads.items():
            kind, ref = path.split("/")[1:3]
            # An object that did not exist is created by this task, or must not exist, which the gateway checks.
            is_used = (
                ref in refs or path in removed_paths or (action.verb == "rollback" and path in self._mounted_paths)
            )
            if version and is_used:
                ident = path if path.count("/") > 2 else version.partition(" ")[0]
                paths_by_object.setdefault((kind, ident), []).append(path)
        versions: dict[str, str] = {}
        for paths in paths_by_object.values():
            # A message about a name says more than one about an id.
            path = min(
                paths, key=lambda each: (each not in removed_paths, bool(ID_PATTERN.fullmatch(each.split("/")[2])))
            )
            version = self._read_version(path, is_removed=path in removed_paths)
            versions.update(dict.fromkeys(paths, version))
        approval.check_unchanged_again(number, versions)

    def _list_own_paths(self) -> list[str]:
        """Return the paths of the objects that the task declares."""
        return [
            f"/{'snapshots' if key == 'backups' else key}/{quote_segment(name)}"
            for key, names in self.resource_kind.get_result_lists(self.want).items()
            for name in names
        ]

    def _read_versions(self, paths: Iterable[str]) -> dict[str, str]:
        return {
            path: compute_object_version(path, self.client.known_objects.get(path), self.client.plan_opened_at)
            for path in sorted(paths)
            if path.startswith(_OBJECT_PATHS)
        }

    def _apply_approved_plan(
        self,
        approval: Approval,
        plan: Plan,
        shapes: Mapping[str, Mapping[str, Any]],
        reads: Mapping[str, str],
    ) -> dict[str, Any]:
        """Apply a plan if a saved plan contains the same actions on the same objects. Raises Failure if it does not."""
        is_conditional = any(getattr(self.want, option, False) for option in CONDITIONAL_OPTIONS)
        entry, actions = approval.find_entry(plan.actions, reads, self._list_own_paths(), is_conditional=is_conditional)
        hosts = approval.find_hosts(change.name for action in actions for change in action.changes)
        actions = [place_as_planned(action, hosts) for action in actions]
        self._apply(actions, lambda number, action: self._compare_again(approval, reads, number, action))
        if entry is not None:
            self._refuse_failing(plan.actions, actions, entry)
        new_shapes = self._observe_again(shapes) if self.completed_actions or self.failures else shapes
        bindings = approval.bindings
        real_ids = {
            insert_planned_ids(name, bindings): ident for name, ident in self._find_created_ids(new_shapes).items()
        }
        for name, planned_id in entry["created"].items() if entry is not None else ():
            if name in real_ids:
                bindings[planned_id] = real_ids[name]
        for action in self.completed_actions:
            for change in action.changes:
                if change.kind == VOLUME and change.before is None:
                    key = make_volume_key(insert_planned_ids(change.name, bindings))
                    bindings[key] = new_shapes.get(change.name, {}).get("created_at") or ""
        result = self._build_result(new_shapes)
        # After a failure before the first change, the task can be repeated.
        if entry is None or (plan.actions and not self.completed_actions):
            return result
        made_changes = {id(change) for action in self.completed_actions for change in action.changes}
        omitted_names = [
            change.name for action in actions for change in action.changes if id(change) not in made_changes
        ]
        usage = {
            "number": entry["number"],
            "swapped": [] if entry.get("host", "") == approval.host else [approval.host, entry["host"]],
            "omitted": omitted_names,
            "unneeded": approval.list_unneeded_names(entry, plan.actions),
            "gateway": self.client.gateway_id,
            "bindings": bindings,
            "exported": {
                action.request["file" if action.verb == "export" else "reference"]: self._find_exported_id(
                    action, change, new_shapes
                )
                for action in self.completed_actions
                for change in action.changes
                if action.verb in ("export", "push") and change.name in new_shapes
            },
            "opened_at": {_make_run_key(self.client): self.client.run_opened_at},
        }
        return {**result, PLAN_KEY: usage}

    def _find_exported_id(self, action: Action, change: Change, new_shapes: Mapping[str, Mapping[str, Any]]) -> str:
        """Return the id of the snapshot that an action has exported, or the digest of what it has pushed."""
        if action.verb == "push":
            artifact = None
            with contextlib.suppress(Failure):  # The change has been made.
                artifact = find_artifact(self.client, action.request["reference"])
            return artifact.digest if artifact is not None else ""
        if change.kind != VOLUME:
            return str(new_shapes[change.name]["id"])
        snapshots = self.client.known_objects.get(f"/volumes/{quote_segment(change.name)}/snapshots") or ()
        return next((str(each["snapshotID"]) for each in snapshots if each["name"] == action.request["snapshot"]), "")

    def _refuse_failing(
        self, actions: Iterable[Action], approved_actions: Iterable[Action], entry: Mapping[str, Any]
    ) -> None:
        """Report a failure for each object whose actions fail according to the plan, even if they would succeed now."""
        approved_changes = {id(change) for action in approved_actions for change in action.changes}
        for action in actions:
            names = [change.name for change in action.changes if id(change) not in approved_changes]
            if names and (self.continue_on_error or not self.failures):
                predicted = entry["failure"]
                failure = Failure(
                    f"{PREDICTED_FAILURE}{predicted['message']}",
                    predicted["kind"],
                    blockers=predicted["blockers"],
                    status=predicted["status"],
                )
                self.failures.update({name: failure for name in names if name not in self.failures})

    def _find_created_ids(self, new_shapes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Return the ids of the objects that the completed actions have created, by name.

        A snapshot of a volume has the name VOLUME@SNAPSHOT. ``new_shapes``: the resources after the actions.
        """
        ids: dict[str, str] = {}
        for action in self.completed_actions:
            for change in action.changes:
                is_new = change.before is None or action.verb in RECREATING_VERBS
                if is_new and "id" in new_shapes.get(change.name, {}):
                    ids[change.name] = new_shapes[change.name]["id"]
                if change.kind == VOLUME:
                    path = f"/volumes/{quote_segment(change.name)}/snapshots"
                    new_names = list_own_snapshots(change.name, change.after) - list_own_snapshots(
                        change.name, change.before
                    )
                    for each in self.client.known_objects.get(path) or ():
                        if (name := f"{change.name}@{each['name']}") in new_names:
                            ids[name] = each["snapshotID"]
        return ids

    def _list_unfinished_builds(self) -> list[str]:
        """Return the templates whose builds the task starts without waiting for them."""
        return [
            change.name
            for action in self.completed_actions
            if action.verb == "build" and not action.request["wait"]
            for change in action.changes
        ]

    def _add_entry(
        self,
        result: dict[str, Any],
        plan: Plan,
        reads: Mapping[str, str],
        shapes: Mapping[str, Mapping[str, Any]],
        planned_shapes: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Return ``result`` with the task's entry for the plan file, if it was carried out in a plan session.

        The entry does not contain the actions that failed there, because a run must not make them.
        """
        if not self.client.is_planning or self.predict_only:
            return result
        costs, unknown_costs = estimate_costs(self.completed_actions, shapes, self.client.typical_costs)
        conditional_actions = [action for action in self.planned_actions if action.condition]
        failures = [*self.failures.values(), *plan.unexpected_failures]
        conditional_steps = [*conditional_actions, *(each for each in failures if each.condition)]
        entry = _make_plan_entry(
            self.client,
            actions=describe_actions(add_planned_hosts(self.planned_actions, planned_shapes)),
            conditional=[
                change.name for action in conditional_actions for change in action.changes if change.before is None
            ],
            unfinished=self._list_unfinished_builds(),
            awaited=list(self.want.names) if getattr(self.want, "wait_timeout", 0) else [],
            mentions=self._list_mentions(plan.actions),
            reads=dict(reads),
            created={name: id for name, id in self._find_created_ids(planned_shapes).items() if is_planned_id(id)},
            costs=costs,
            unknown=[
                *([] if self.client.may_change or not self.planned_actions else [_CONDITION_ON_KEY]),
                *dict.fromkeys(each.condition for each in conditional_steps),
                *unknown_costs,
            ],
            failure=result.get("failure"),
        )
        return {**result, PLAN_KEY: entry}

    def _list_mentions(self, actions: Sequence[Action]) -> list[str]:
        """Return the names and ids of the objects that the task uses."""
        names = {name for names in self.resource_kind.get_result_lists(self.want).values() for name in names}
        names.update(change.name for action in actions for change in action.changes)
        return sorted(names.union(_list_requested_refs(self.client)))

    def _apply(
        self, actions: Iterable[Action], check: Callable[[int, Action], None] = lambda _number, _action: None
    ) -> None:
        """Carry out the actions. Before each action, calls ``check`` with its number; ``check`` can raise Failure."""
        for number, action in enumerate(actions):
            names = [change.name for change in action.changes]
            if any(name in self.failures for name in names):
                continue
            if not action.is_expected:
                self.planned_actions.append(action)
                continue
            series = self._list_series(action)
            try:
                check(number, action)
                failures = self.resource_kind.apply(action, self.client)
            except Failure as failure:
                failures = dict.fromkeys(names, failure)
            self.failures.update(failures)
            succeeded_changes = tuple(change for change in action.changes if change.name not in failures)
            if succeeded_changes:
                self.completed_actions.append(Action(action.verb, succeeded_changes, action.request))
            if not failures:
                self.planned_actions.append(self._add_removals(action, series))
            if failures and not self.continue_on_error:
                return

    def _list_series(self, action: Action) -> dict[str, dict[str, Any]]:
        """Return, in a check-mode run, the snapshots to which the retention rule of a new snapshot applies, by name."""
        if not self.client.is_planning or not action.request.get("body", {}).get("retention"):
            return {}
        snapshots = self.client.list_all("/snapshots", sandboxID=action.request["sandbox"])
        shapes = [make_snapshot_shape(snapshot) for snapshot in snapshots if snapshot.get("retention")]
        return {shape["name"] or shape["id"]: shape for shape in shapes}

    def _add_removals(self, action: Action, series: Mapping[str, Mapping[str, Any]]) -> Action:
        """Return the action with a removal for each snapshot that its retention rule does not keep.

        ``series``: the snapshots before the action.
        """
        if not series:
            return action
        kept_names = self._list_series(action).keys()
        removals = [
            Change(name, _select_keys(shape, _REMOVED_KEYS), None, SNAPSHOT)
            for name, shape in series.items()
            if name not in kept_names
        ]
        return replace(action, changes=(*action.changes, *removals))

    def _observe_again(self, shapes_before: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return self.resource_kind.get_resources_by_name(
                self.want, self.resource_kind.observe(self.client, self.want)
            )
        except Failure as failure:
            # The changes have been made, but their result cannot be read: report this as a failure.
            self.failures.setdefault("", failure)
            return shapes_before

    def _build_result(self, shapes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        if self.client.is_planning:
            shapes = {name: hide_unknown_values(shape, self.client.plan_opened_at) for name, shape in shapes.items()}
        names_by_list = self.resource_kind.get_result_lists(self.want)
        result: dict[str, Any] = {
            "changed": bool(self.completed_actions),
            "outcomes": self._list_outcomes([name for names in names_by_list.values() for name in names]),
            "diff": diff(self.completed_actions),
        }
        for key, names in names_by_list.items():
            result[key] = [
                _make_entry(shapes[name], self.resource_kind.RESULT_KEYS[key]) for name in names if name in shapes
            ]
        entries = result[self.resource_kind.PLURAL]
        if len(names_by_list[self.resource_kind.PLURAL]) == 1:
            result[self.resource_kind.SINGULAR] = entries[0] if entries else None
        if self.failures:
            return make_failure_result(join_failures(self.failures, max(len(result["outcomes"]), 1)), **result)
        return result

    def _list_outcomes(self, names: list[str]) -> list[dict[str, Any]]:
        """Return one outcome for each name.

        The list is empty if there was nothing to do. This saves memory, because Ansible copies each result several
        times.
        """
        if not self.completed_actions and not self.failures:
            return []
        verbs: dict[str, list[str]] = {name: [] for name in names}
        for action in self.completed_actions:
            for change in action.changes:
                verbs.setdefault(change.name, []).append(action.verb)
        for name in self.failures:
            verbs.setdefault(name, [])
        return [
            {
                "name": name,
                "changed": bool(actions),
                "actions": actions,
                "failed": name in self.failures,
                "failure": self.failures[name].to_dict() if name in self.failures else None,
            }
            for name, actions in verbs.items()
            if name
        ]


def _list_removed_templates(action: Action) -> set[str]:
    """Return the path at which the gateway lists the users of each template that an action removes."""
    return {
        action.request["path"].replace("/templates/", "/snapshots/", 1)
        for change in action.changes
        if change.kind == TEMPLATE and change.after is None
    }


def _collect_texts(value: Any, texts: set[str]) -> None:
    """Add all strings in a value to ``texts``."""
    if isinstance(value, str):
        texts.add(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect_texts(item, texts)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect_texts(item, texts)


def _list_requested_refs(client: Client) -> list[str]:
    """Return the names and ids of the objects that a task has requested."""
    return sorted({path.split("/")[2] for path in client.requested_paths if path.startswith(_OBJECT_PATHS)})


def _make_plan_entry(client: Client, **fields: Any) -> dict[str, Any]:
    """Return an entry of a plan file without the names of the host and the task, which the action plugin adds.

    ``_plan_conditions`` evaluates ``conditional``, ``unfinished``, ``awaited`` and ``mentions``.
    """
    defaults = {"actions": [], "reads": {}, "created": {}, "costs": {}, "unknown": [], "failure": None}
    defaults |= {"conditional": [], "unfinished": [], "awaited": [], "mentions": []}
    return {"gateway": client.gateway_id, "gateway_url": client.address.url, **defaults, **fields}


def _make_failed_entry(client: Client, failure: Failure, **fields: Any) -> dict[str, Any]:
    """Return the entry of a task that failed before it had a plan."""
    return _make_plan_entry(
        client,
        failure=failure.to_dict(),
        unknown=[failure.condition] if failure.condition else [],
        mentions=_list_requested_refs(client),
        **fields,
    )


def _make_entry(shape: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the entry of a result's list: the values of ``keys`` and, in a fleet, the name of the host."""
    return _select_keys(shape, (*keys, HOST_KEY) if HOST_KEY in shape else keys)


def _select_keys(shape: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: shape.get(key) for key in keys}


def find_secrets(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the passwords and all environment values, except short ones, which could match other text by chance."""
    values = [
        *map(params.get, PASSWORD_OPTIONS),
        *((params.get("env") or {}) if isinstance(params.get("env"), dict) else {}).values(),
    ]
    return tuple(str(value) for value in values if value is not None and len(str(value)) >= 8)


def mask_secrets(value: Any, secrets: tuple[str, ...]) -> Any:
    """Return ``value`` with all secrets in its strings masked."""
    if not secrets:
        return value
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
        return value
    if isinstance(value, dict):
        return {key: mask_secrets(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask_secrets(item, secrets) for item in value]
    return value
