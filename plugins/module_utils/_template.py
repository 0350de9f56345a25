# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement ``sandbox_template``: build templates from a recipe, and remove templates."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils import _refusals
from ansible_collections.grove.sandbox.plugins.module_utils._client import segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._names import holders
from ansible_collections.grove.sandbox.plugins.module_utils._plan import (
    TEMPLATE,
    Action,
    Change,
    Plan,
    Planner,
    at_least,
    checked_names,
)
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import RECIPE_WORDS, TEMPLATE_KEYS, template_shape
from ansible_collections.grove.sandbox.plugins.module_utils._snapshot import check_unused, users_of

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

SINGULAR, PLURAL = "template", "templates"
SHOWN = {PLURAL: TEMPLATE_KEYS}

ARGUMENTS: dict[str, Any] = {
    "name": {"type": "list", "elements": "str", "required": True, "aliases": ["names"]},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "from": {"type": "str", "choices": ["debootstrap", "rootfs"], "default": "debootstrap"},
    "suite": {"type": "str", "default": "bookworm"},
    "mirror": {"type": "str", "default": ""},
    "packages": {"type": "list", "elements": "str", "default": []},
    "path": {"type": "str", "default": ""},
    "setup": {"type": "list", "elements": "str", "default": []},
    "start_command": {"type": "str", "default": ""},
    "ready_probe": {"type": "str", "default": ""},
    "ready_timeout": {"type": "float", "default": 60},
    "setup_timeout": {"type": "float", "default": 1800},
    "cpus": {"type": "int", "default": 1},
    "memory_mb": {"type": "int", "default": 256},
    "disk_mb": {"type": "int", "default": 2048},
    "rebuild_outdated": {"type": "bool", "default": True},
    "wait_timeout": {"type": "int", "default": 3600},
    "when_unused": {"type": "bool", "default": False},
    "continue_on_error": {"type": "bool", "default": False},
}
RULES: dict[str, Any] = {"required_if": [("from", "rootfs", ("path",))]}

TAIL = 20
"""Number of log lines in the message of a failed build."""
POLL_SECONDS = (0.1, 2.0)


@dataclass(frozen=True)
class Desired:
    """The user's options. ``recipe`` uses the names of module options, with defaults for options that are not set."""

    names: tuple[str, ...]
    state: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    rebuild_outdated: bool = True
    wait_timeout: int = 0
    when_unused: bool = False


@dataclass(frozen=True)
class Current:
    things: Mapping[str, Mapping[str, Any]]
    taken: Mapping[str, str] = field(default_factory=dict)
    users: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)


def desired(params: Mapping[str, Any]) -> Desired:
    recipe = {word: params[word] for word in RECIPE_WORDS}
    recipe["packages"] = sorted(set(recipe["packages"]))
    for word in ("cpus", "memory_mb", "disk_mb", "ready_timeout", "setup_timeout"):
        at_least(recipe[word], 1, word)
    return Desired(
        names=checked_names(params["name"], "template"),
        state=params["state"],
        recipe=recipe,
        rebuild_outdated=params.get("rebuild_outdated") is not False,
        wait_timeout=at_least(params.get("wait_timeout") or 0, 0, "wait_timeout"),
        when_unused=bool(params.get("when_unused")),
    )


def observe(client: Client, want: Desired) -> Current:
    things = {}
    for name in want.names:
        found = client.find(f"/templates/{segment(name)}")
        if found is not None:
            things[name] = template_shape(found)
    if want.state == "absent":
        return Current(things, users={} if want.when_unused else users_of(client, things.values()))
    missing = [name for name in want.names if name not in things]
    return Current(things, holders(client, missing, other_than="template"))


def view(shape: Mapping[str, Any]) -> dict[str, Any]:
    outdated = {"outdated": True} if shape["outdated"] else {}
    return {"name": shape["name"], "status": shape["status"], **outdated, "recipe": dict(shape["recipe"])}


def plan(want: Desired, have: Current) -> Plan:
    planner = Planner()
    for name in want.names:
        planner.item(name, lambda name=name: _plan_one(want, have, name))
    return planner.plan()


def _plan_one(want: Desired, have: Current, name: str) -> list[Action]:
    now = have.things.get(name)
    if want.state == "absent":
        if now is not None and now["status"] == "building":
            raise _refusals.building(name)
        return [] if now is None or now["status"] == "error" else [_remove(want, have, name, now)]
    if now is None and name in have.taken:
        raise _refusals.name_taken(name, have.taken[name])
    if now is not None and _is_up_to_date(want, now):
        return []
    before = None if now is None else view(now)
    after: dict[str, Any] = {"name": name, "recipe": dict(want.recipe)}
    if before and "outdated" in before:
        after["outdated"] = False
    if want.wait_timeout:
        after["status"] = "ready"
    body = {"name": name, **{RECIPE_WORDS[word]: value for word, value in want.recipe.items()}}
    return [Action("build", (Change(name, before, after, TEMPLATE),), {"body": body, "wait": want.wait_timeout})]


def _is_up_to_date(want: Desired, now: Mapping[str, Any]) -> bool:
    """Return whether the template was built from the recipe, or is being built from it if the task does not wait.

    A template of which the gateway cannot tell whether it is outdated counts as up to date.
    """
    fine = ("ready",) if want.wait_timeout else ("ready", "building")
    same = all(now["recipe"].get(word) == value for word, value in want.recipe.items())
    return now["status"] in fine and same and not (want.rebuild_outdated and now["outdated"])


def _remove(want: Desired, have: Current, name: str, now: Mapping[str, Any]) -> Action:
    check_unused("template", name, have.users.get(now["id"]))
    request = {"place": f"/templates/{segment(now['id'])}", "when_unused": want.when_unused}
    return Action("remove", (Change(name, view(now), None, TEMPLATE),), request)


def apply(action: Action, client: Client) -> dict[str, Failure]:
    """Carry out one action. Raises Failure. For a failed build, the message shows the end of its log."""
    request = action.request
    if action.verb == "build":
        started = client.post("/templates", dict(request["body"]))
        if started.get("buildStatus") != "ready" and request["wait"]:
            _wait(client, action.changes[0].name, started, request["wait"])
    elif action.verb == "remove":
        client.delete(request["place"], when="unused" if request["when_unused"] else "")
    else:
        raise ValueError(f"unknown action {action.verb}")
    return {}


def _wait(client: Client, name: str, started: Mapping[str, Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    place = f"/templates/{segment(started['templateID'])}/builds/{segment(started['buildID'])}/status"
    pause, longest = POLL_SECONDS
    lines: list[str] = []
    offset = 0
    while True:
        build = client.get(place, logsOffset=offset)
        fresh = build.get("logs") or []
        offset += len(fresh)
        lines = [*lines, *fresh][-TAIL:]
        if build["status"] == "ready":
            return
        if build["status"] == "error":
            reason = build.get("reason") or "the gateway reported no reason"
            raise Failure(_with_log(f"the build of template {name!r} failed: {reason}", lines), "backend_failed")
        left = deadline - time.monotonic()
        if left <= 0:
            story = (
                f"template {name!r} is still being built after {seconds:g} s: run the task again to continue waiting"
            )
            raise Failure(_with_log(story, lines), "timeout", blockers=[started["buildID"]])
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, longest)


def _with_log(sentence: str, lines: list[str]) -> str:
    return "\n".join([sentence, "The end of its log:", *lines]) if lines else sentence


def lists(want: Desired) -> dict[str, tuple[str, ...]]:
    return {PLURAL: want.names}


def things_of(want: Desired, have: Current) -> Mapping[str, Mapping[str, Any]]:
    return have.things
