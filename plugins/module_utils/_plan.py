# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Plans, which list the actions of a task with the state of each resource before and after.

This module is independent of Ansible and the network.

A *view* is a dict with the properties of a resource that a task can declare. Plans compare views; diffs show them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._client import PLANNED_ID_PREFIX
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import HOST_KEY, KEYS_BY_KIND, RESERVED_PREFIX

_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
SANDBOX, SNAPSHOT, TEMPLATE, VOLUME = "sandbox", "snapshot", "template", "volume"
LOGIN_KEY = "login"
"""The key of a request with a user name and a password. Plan files do not contain it."""
ARCHIVES_KEY = "archives"
"""The key of a request with the archives to upload. Plan files contain only their digests, in the recipe."""
HOSTS_KEY = "hosts"
"""The key of a request in a plan file with the hosts of the new sandboxes, by name. The run chooses the same ones."""
RECREATING_VERBS = ("build", "clone", "fork", "replace")
"""Verbs of actions that create another resource under the same name."""
_UNKNOWN_KEYS = {
    "attach": ("used_mb",),
    "capture": ("used_mb",),
    "detach": ("used_mb",),
    "grow": ("used_mb",),
    "pause": ("address",),
    "resume": ("address", "started_at", "state_reason"),
    "rollback": ("address", "started_at", "state_reason", "used_mb", "volumes"),
    "set_timeout": ("end_at",),
}
"""For each verb, the keys whose new values are unknown until the action has been carried out."""
UNFINISHED_BUILD_KEYS = ("status", "memory", "memory_problem", "cpus", "memory_mb", "disk_mb", "prewarm")
"""The keys whose values depend on whether the build of a template has finished."""


_TIME_KEYS = ("created_at", "started_at", "end_at", "updated_at", "expires_at")
_MEASURED_KEYS = ("used_mb", "pause_ms", "memory", "memory_bytes_written", "disk_bytes_unique")


@dataclass(frozen=True)
class Change:
    """A change to one resource. ``before`` is None if it is created, and ``after`` is None if it is removed."""

    name: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    kind: str = SANDBOX


@dataclass(frozen=True)
class Action:
    """One step of a plan. ``request`` contains the arguments that ``apply`` needs for ``verb``.

    ``condition``: "only if …" with the condition under which the run takes this step; empty if it always does.
    ``is_expected``: whether a check-mode run predicts that the condition holds.
    """

    verb: str
    changes: tuple[Change, ...]
    request: Mapping[str, Any] = field(default_factory=dict)
    condition: str = ""
    is_expected: bool = True


@dataclass(frozen=True)
class Plan:
    """The actions, in order, and the failures of refused resources by name.

    ``unexpected_failures``: failures under conditions that a check-mode run expects not to hold.
    """

    actions: tuple[Action, ...] = ()
    failures: Mapping[str, Failure] = field(default_factory=dict)
    unexpected_failures: tuple[Failure, ...] = ()


class Planner:
    """Builds a plan one resource at a time. A refused resource does not affect the actions of other resources."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._failures: dict[str, Failure] = {}
        self._unexpected_failures: list[Failure] = []

    def add(self, name: str, plan_one: Any) -> None:
        """Add the actions for ``name`` from ``plan_one()``, or store the Failure that it raises."""
        try:
            self._actions.extend(plan_one())
        except Failure as failure:
            if failure.is_expected:
                self._failures[name] = failure
            else:
                self._unexpected_failures.append(failure)

    def add_unexpected_failure(self, failure: Failure, condition: str) -> None:
        """Add a failure that occurs only under ``condition``, which a check-mode run expects not to hold."""
        failure.condition, failure.is_expected = condition, False
        self._unexpected_failures.append(failure)

    def plan(self) -> Plan:
        return Plan(tuple(self._actions), dict(self._failures), tuple(self._unexpected_failures))


def diff(actions: Iterable[Action]) -> dict[str, dict[str, Any]]:
    """Return the views of all changed resources before and after ``actions``, by name. Omits nonexistent resources."""
    views_before: dict[str, Mapping[str, Any] | None] = {}
    views_after: dict[str, Mapping[str, Any] | None] = {}
    for action in actions:
        for change in action.changes:
            views_before.setdefault(change.name, change.before)
            views_after[change.name] = change.after
    return {
        "before": {name: dict(view) for name, view in views_before.items() if view is not None},
        "after": {name: dict(view) for name, view in views_after.items() if view is not None},
    }


def predict(shapes: Mapping[str, Mapping[str, Any]], actions: Iterable[Action]) -> dict[str, dict[str, Any]]:
    """Return the expected shapes after ``actions``. Values that are not known in advance, such as ids, are None."""
    result = {name: dict(shape) for name, shape in shapes.items()}
    for action in actions:
        for change in action.changes:
            if change.after is None:
                result.pop(change.name, None)
                continue
            keys = KEYS_BY_KIND[change.kind]
            is_new = change.before is None or action.verb in RECREATING_VERBS
            shape = dict.fromkeys(keys) if is_new else result.get(change.name, dict.fromkeys(keys))
            shape.update((key, None) for key in _UNKNOWN_KEYS.get(action.verb, ()) if key in keys)
            result[change.name] = {**shape, **{key: value for key, value in change.after.items() if key in keys}}
    return result


def fill_values_from_session(
    predicted_shapes: Mapping[str, Mapping[str, Any]], planned_shapes: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the predicted shapes, with None replaced by the values of the session, except for measurements.

    ``planned_shapes``: the shapes of the same objects in the session. Later tasks use the ids that it gave to new
    objects. Whether a sandbox has diverged is unknown if the session does not know it. Objects that the session has
    already removed again are omitted, such as snapshots that a retention rule does not keep.
    """
    result = {}
    for name, shape in predicted_shapes.items():
        if name not in planned_shapes:
            continue
        planned_shape = planned_shapes[name]
        values = {
            key: planned_shape.get(key) for key, value in shape.items() if value is None and key not in _MEASURED_KEYS
        }
        result[name] = {**shape, **values}
        # The prediction assumes that the guest does not write between the action and the end of the task, and that the
        # volumes of a snapshot remain: the gateway removes a clone that is no longer mounted.
        result[name].update(
            (key, planned_shape[key]) for key in ("diverged", "mounts") if key in shape.keys() & planned_shape
        )
        if HOST_KEY in planned_shape:
            result[name][HOST_KEY] = planned_shape[HOST_KEY]
    return result


def hide_unknown_values(shape: Mapping[str, Any], opened_at: str) -> dict[str, Any]:
    """Return the shape of an object in a plan session, with None for values that only the run can know.

    These are times after the session began, at ``opened_at``, measurements of new objects, and whether a sandbox has
    diverged if its disk does not show it.
    """
    # A template that another client is building already has its real id.
    is_new = is_planned_id(shape.get("id")) or (shape.get("created_at") or "") > opened_at
    return {
        key: None
        if (key in _TIME_KEYS and value is not None and value > opened_at)
        or (is_new and key in _MEASURED_KEYS)
        or (key == "diverged" and may_have_diverged(shape))
        else value
        for key, value in shape.items()
    }


def may_have_diverged(sandbox: Mapping[str, Any]) -> bool:
    """Return whether a sandbox of a plan session may have diverged, although its disk shows no change.

    Its guest may not have written everything to the disk, and it can write more until the run.
    """
    return sandbox["diverged"] is False and sandbox["state"] == "running"


def make_diverged_condition(sandbox: Mapping[str, Any]) -> str:
    """Return the condition of an action that only a diverged sandbox needs, or "" if it is known to need the action."""
    if sandbox["diverged"]:
        return ""
    hint = ", which its disk does not show" if sandbox["diverged"] is False else ""
    return f"only if sandbox {sandbox['name']} has diverged by then{hint}"


@contextlib.contextmanager
def failures_conditional(condition: str, *, is_expected: bool = True) -> Iterator[None]:
    """Mark a Failure that is raised inside this context as one that occurs only under ``condition``.

    An empty condition changes nothing.
    """
    try:
        yield
    except Failure as failure:
        if condition:
            failure.condition, failure.is_expected = condition, is_expected
        raise


def is_planned_id(value: Any) -> bool:
    """Return whether a value is the id of an object that only the run creates."""
    return isinstance(value, str) and value.startswith(PLANNED_ID_PREFIX)


def validate_names(names: Iterable[str], kind: str) -> tuple[str, ...]:
    """Return the names. Raises Failure if the list is empty, or a name is invalid or listed twice."""
    result = []
    for name in names:
        if not _NAME_PATTERN.fullmatch(name):
            raise _refusals.create_name_not_allowed_error(kind, name)
        if name in result:
            raise Failure(f"the {kind} name {name!r} is listed twice: list each name once")
        result.append(str(name))
    if not result:
        raise Failure(f"the list of {kind} names is empty: list at least one name")
    return tuple(result)


def stringify_values(values: Mapping[str, Any] | None, option: str) -> dict[str, str] | None:
    """Return the mapping with all values converted to strings, as the gateway stores them. Raises Failure."""
    if values is None:
        return None
    result = {}
    for key, value in values.items():
        if value is None:
            # In a check-mode run, the value may be one that only the run can know.
            with failures_conditional(f"only if {option}.{key} is null in the run, too"):
                raise Failure(
                    f"{option}.{key} is null, but must be a string, a number or a boolean. In check mode, the address "
                    "of a new sandbox is null, for example: use a value that is known before the run, such as the "
                    "sandbox's id or name, or give it a default for check mode"
                )
        if isinstance(value, (dict, list, tuple)):
            raise Failure(f"{option}.{key} must be a string, a number or a boolean")
        if option == "metadata" and str(key).startswith(RESERVED_PREFIX):
            raise Failure(
                f"metadata.{key} is not allowed, because Ansible reserves keys that begin with {RESERVED_PREFIX}: "
                "choose another key"
            )
        result[str(key)] = str(value).lower() if isinstance(value, bool) else str(value)
    return result


def require_minimum(value: Any, minimum: int, option: str) -> Any:
    """Return ``value``, which may be None. Raises Failure if it is less than ``minimum``."""
    if value is not None and value < minimum:
        raise Failure(f"{option} must be at least {minimum}, not {value}")
    return value


def normalize_networks(addresses: Iterable[str]) -> list[str]:
    """Return the addresses and networks in CIDR notation, sorted, so that equal sets compare equal.

    Invalid entries stay unchanged, because the gateway reports them.
    """
    result = set()
    for address in addresses:
        try:
            result.add(str(ipaddress.ip_network(str(address).strip(), strict=False)))
        except ValueError:
            result.add(str(address))
    return sorted(result)


def keep_common_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of the view ``before`` whose keys are also in ``after``, the view of the replacement."""
    return {key: value for key, value in before.items() if key in after}


def make_temporary_name(name: str, ident: str) -> str:
    """Return the temporary name that a resource has while its replacement is created."""
    return f"{name[:50]}.old-{ident[:8]}"
