# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Plans as data: actions with the states before and after. Independent of Ansible and the network.

A *view* is the declared part of a resource as a dict. Plans compare and change views, and diffs show them.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import KEYS, RESERVED

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
SANDBOX, SNAPSHOT, TEMPLATE, VOLUME = "sandbox", "snapshot", "template", "volume"
_ANEW = ("build", "clone", "fork", "replace")
"""Verbs that create another resource under the same name."""
_UNSETTLED = {
    "attach": ("used_mb",),
    "capture": ("used_mb",),
    "detach": ("used_mb",),
    "grow": ("used_mb",),
    "pause": ("address",),
    "resume": ("address", "started_at", "state_reason"),
    "rollback": ("address", "started_at", "state_reason", "used_mb", "volumes"),
    "set_timeout": ("end_at",),
}
"""Keys whose new values are unknown until the action is done, by verb."""


@dataclass(frozen=True)
class Change:
    """A change of one resource: its view before (None: it does not exist) and after (None: it is removed)."""

    name: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    kind: str = SANDBOX


@dataclass(frozen=True)
class Action:
    """One step, which succeeds or fails as a whole: ``apply`` does ``verb`` with ``request``."""

    verb: str
    changes: tuple[Change, ...]
    request: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The actions in order, and the refusals by name."""

    actions: tuple[Action, ...] = ()
    refused: Mapping[str, Failure] = field(default_factory=dict)


class Planner:
    """Builds a plan item by item. A refused item does not affect the actions of the others."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._refused: dict[str, Failure] = {}

    def item(self, name: str, plan_one: Any) -> None:
        """Add the actions for ``name`` from ``plan_one()``, or store the Failure that it raises."""
        try:
            self._actions.extend(plan_one())
        except Failure as failure:
            self._refused[name] = failure

    def plan(self) -> Plan:
        return Plan(tuple(self._actions), dict(self._refused))


def diff(actions: Iterable[Action]) -> dict[str, dict[str, Any]]:
    """Return all changed resources before and after ``actions``, by name. Nonexistent resources have no key."""
    first: dict[str, Mapping[str, Any] | None] = {}
    last: dict[str, Mapping[str, Any] | None] = {}
    for action in actions:
        for change in action.changes:
            first.setdefault(change.name, change.before)
            last[change.name] = change.after
    return {
        "before": {name: dict(view) for name, view in first.items() if view is not None},
        "after": {name: dict(view) for name, view in last.items() if view is not None},
    }


def predict(shapes: Mapping[str, Mapping[str, Any]], actions: Iterable[Action]) -> dict[str, dict[str, Any]]:
    """Return the shapes after ``actions``. Values that only a run creates (ids, dates, addresses) are None."""
    result = {name: dict(shape) for name, shape in shapes.items()}
    for action in actions:
        for change in action.changes:
            if change.after is None:
                result.pop(change.name, None)
                continue
            keys = KEYS[change.kind]
            fresh = change.before is None or action.verb in _ANEW
            known = dict.fromkeys(keys) if fresh else result.get(change.name, dict.fromkeys(keys))
            known.update((key, None) for key in _UNSETTLED.get(action.verb, ()) if key in keys)
            result[change.name] = {**known, **{key: value for key, value in change.after.items() if key in keys}}
    return result


def checked_names(names: Iterable[str], what: str) -> tuple[str, ...]:
    """Return the names. Raises Failure if a name is invalid or is listed twice."""
    result = []
    for name in names:
        if not _NAME.fullmatch(name):
            raise _refusals.name_not_allowed(what, name)
        if name in result:
            raise Failure(f"the {what} name {name!r} is listed twice: list each name once")
        result.append(str(name))
    if not result:
        raise Failure(f"the list of {what} names is empty: list at least one name")
    return tuple(result)


def words(values: Mapping[str, Any] | None, what: str) -> dict[str, str] | None:
    """Return the mapping with values as strings, as the gateway stores them: numbers in digits, and booleans as true or
    false.
    """
    if values is None:
        return None
    result = {}
    for key, value in values.items():
        if isinstance(value, (dict, list, tuple)) or value is None:
            raise Failure(f"{what}.{key} must be a string, a number or a boolean")
        if what == "metadata" and str(key).startswith(RESERVED):
            raise Failure(
                f"metadata.{key} is not allowed, because Ansible reserves keys that begin with {RESERVED}: "
                "choose another key"
            )
        result[str(key)] = str(value).lower() if isinstance(value, bool) else str(value)
    return result


def at_least(value: Any, least: int, what: str) -> Any:
    """Return ``value``, which may be None. Raises Failure if it is less than ``least``."""
    if value is not None and value < least:
        raise Failure(f"{what} must be at least {least}, not {value}")
    return value


def networks(addresses: Iterable[str]) -> list[str]:
    """Return addresses and CIDRs, normalized and sorted so that equal sets compare equal.

    Invalid entries are not changed.
    """
    result = set()
    for address in addresses:
        try:
            result.add(str(ipaddress.ip_network(str(address).strip(), strict=False)))
        except ValueError:
            result.add(str(address))
    return sorted(result)


def succeeded(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of ``before`` whose keys are also in ``after``, the view of its replacement."""
    return {key: value for key, value in before.items() if key in after}


def aside(name: str, ident: str) -> str:
    """Return a free temporary name for a resource while its replacement is created."""
    return f"{name[:50]}.old-{ident[:8]}"
