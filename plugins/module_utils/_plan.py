# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Plans as data: what would be done, with before and after. No Ansible and no network here.

A *view* is the declared part of a thing, as a dict: what a plan compares, changes and shows in a diff.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import KEYS, RESERVED

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
SANDBOX, SNAPSHOT, TEMPLATE, VOLUME = "sandbox", "snapshot", "template", "volume"
_ANEW = ("build", "clone", "fork", "replace")
"""Verbs after which a thing of the same name is another one."""
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
"""What else is another after a verb, and known only then."""


@dataclass(frozen=True)
class Change:
    """What happens to one thing: its view before (None: it is not there) and after (None: it is gone)."""

    name: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    kind: str = SANDBOX


@dataclass(frozen=True)
class Action:
    """One step: ``verb`` says what ``apply`` does with ``request``; it succeeds or fails as one."""

    verb: str
    changes: tuple[Change, ...]
    request: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Actions in their order, and by name what cannot be brought about."""

    actions: tuple[Action, ...] = ()
    refused: Mapping[str, Failure] = field(default_factory=dict)


class Planner:
    """Gathers a plan item by item: a refusal of one item leaves the others' actions alone."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._refused: dict[str, Failure] = {}

    def item(self, name: str, plan_one: Any) -> None:
        """``plan_one()`` gives the actions for ``name``; the Failure it may raise is kept."""
        try:
            self._actions.extend(plan_one())
        except Failure as failure:
            self._refused[name] = failure

    def plan(self) -> Plan:
        return Plan(tuple(self._actions), dict(self._refused))


def diff(actions: Iterable[Action]) -> dict[str, dict[str, Any]]:
    """Before and after of all that ``actions`` touch, by name; what is not there has no key."""
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
    """The shapes that ``actions`` would leave; what exists only after them (ids, dates, addresses) is None."""
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
    """The names, each once, if each may be one. Raises Failure with the rule, or where one is given twice."""
    result = []
    for name in names:
        if not _NAME.fullmatch(name):
            shown = name if len(name) <= 80 else name[:77] + "..."
            raise Failure(
                f"the {what} name {shown!r} is not allowed: use 1 to 64 letters, digits, '_', '.' or '-', "
                "starting with a letter or digit"
            )
        if name in result:
            raise Failure(f"the {what} name {name!r} is given twice")
        result.append(str(name))
    if not result:
        raise Failure(f"no {what} is named: give at least one name")
    return tuple(result)


def words(values: Mapping[str, Any] | None, what: str) -> dict[str, str] | None:
    """A mapping to strings, as the gateway keeps it: numbers in digits, booleans as true and false."""
    if values is None:
        return None
    result = {}
    for key, value in values.items():
        if isinstance(value, (dict, list, tuple)) or value is None:
            raise Failure(f"{what}.{key} must be a string, a number or a boolean")
        if what == "metadata" and str(key).startswith(RESERVED):
            raise Failure(
                f"metadata.{key} is not allowed: Ansible reads keys that begin with {RESERVED} as its own marks"
            )
        result[str(key)] = str(value).lower() if isinstance(value, bool) else str(value)
    return result


def at_least(value: Any, least: int, what: str) -> Any:
    """``value``, if it is unset or not below ``least``. Raises Failure."""
    if value is not None and value < least:
        raise Failure(f"{what} must be at least {least}, not {value}")
    return value


def networks(addresses: Iterable[str]) -> list[str]:
    """Addresses and CIDRs in one spelling and order, so that the same set compares equal; others as they are."""
    result = set()
    for address in addresses:
        try:
            result.add(str(ipaddress.ip_network(str(address).strip(), strict=False)))
        except ValueError:
            result.add(str(address))
    return sorted(result)


def succeeded(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The view ``before`` of what gives way to ``after``, as far as it is known what becomes of it."""
    return {key: value for key, value in before.items() if key in after}


def aside(name: str, ident: str) -> str:
    """The name a thing has while its successor is made: one that may be a name, and no other thing's."""
    return f"{name[:50]}.old-{ident[:8]}"
