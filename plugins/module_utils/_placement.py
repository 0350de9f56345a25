# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Choose the hosts of new sandboxes in a fleet, and recognize the copies of a template or snapshot on its hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ansible_collections.grove.sandbox.plugins.module_utils._client import PAGE_SIZE
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._fields import PLACEMENT_FIELDS
from ansible_collections.grove.sandbox.plugins.module_utils._plan import HOSTS_KEY, Action, stringify_values
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import HOST_KEY

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

PLACEMENT_OPTION: dict[str, Any] = {
    "type": "dict",
    "options": {
        "host": {"type": "str"},
        "labels": {"type": "dict"},
        "strategy": {"type": "str", "choices": ["local", "spread", "pack"]},
        "anti_affinity": {"type": "bool"},
    },
}


@dataclass(frozen=True)
class Placement:
    """The hosts that may get new sandboxes. None means that a suboption is not set."""

    host: str | None = None
    labels: Mapping[str, str] | None = None
    strategy: str | None = None
    anti_affinity: bool | None = None

    def build_request_fields(self) -> dict[str, Any]:
        values = {field: getattr(self, option) for option, field in PLACEMENT_FIELDS.items()}
        return {field: value for field, value in values.items() if value is not None}


def parse_placement(option: Mapping[str, Any] | None) -> Placement | None:
    """Return None if no suboption is set. Raises Failure."""
    placement = Placement(
        host=(option or {}).get("host") or None,
        labels=stringify_values((option or {}).get("labels"), "placement.labels"),
        strategy=(option or {}).get("strategy"),
        anti_affinity=(option or {}).get("anti_affinity"),
    )
    return None if placement == Placement() else placement


def check_placement(placement: Placement | None, source: Mapping[str, Any]) -> None:
    """Raise Failure if the gateway cannot choose hosts. ``source``: the shape of the template or snapshot to fork."""
    # The gateways of a fleet name the host of each object. Older ones, and those without a fleet, do not.
    if placement is not None and HOST_KEY not in source:
        raise Failure(
            "placement: not supported by this gateway, because it is not a member of a fleet, or is too old for "
            "fleets: remove this option, or upgrade the gateway and add the section [fleet] to its configuration",
            "unsupported",
        )


def add_planned_hosts(actions: Iterable[Action], shapes: Mapping[str, Mapping[str, Any]]) -> list[Action]:
    """Return the actions of a check-mode run with the hosts that the gateway has chosen, for the plan file.

    ``shapes``: the sandboxes after the actions, by name.
    """
    return [
        replace(action, request={**action.request, HOSTS_KEY: hosts})
        if (hosts := _find_hosts(action, shapes))
        else action
        for action in actions
    ]


def _find_hosts(action: Action, shapes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    if "placement" not in (action.request.get("body") or {}):
        return {}
    names = [change.name for change in action.changes]
    return {name: shapes[name][HOST_KEY] for name in names if HOST_KEY in shapes.get(name, ())}


def place_as_planned(action: Action, hosts: Mapping[str, str]) -> Action:
    """Return an action whose new sandboxes get the hosts that the plan contains. ``hosts``: by the name of the sandbox.

    If a host can no longer take its sandboxes, the gateway refuses the request.
    """
    body = action.request.get("body") or {}
    names = body.get("names") or [body.get("name")]
    if "placement" not in body or any(name not in hosts for name in names):
        return action
    placement = {**body["placement"], "hosts": [hosts[name] for name in names]}
    return replace(action, request={**action.request, "body": {**body, "placement": placement}})


def find_copies(client: Client, ref: str, entry: Mapping[str, Any]) -> frozenset[str]:
    """Return the ids of all copies of a template or snapshot in a fleet, including its own id.

    Several hosts can have copies with the same name, but each copy has its own id. ``ref``: the name or id in the task.
    ``entry``: the gateway's entry. Without a fleet, sends no request.
    """
    is_template = "snapshotID" not in entry or entry.get("kind") == "template"
    own_id = str(entry["templateID"] if "snapshotID" not in entry else entry["snapshotID"])
    names = entry.get("names") or []
    if not entry.get("sandboxHost") or ref == own_id or not names:
        return frozenset({own_id})
    name = ref if ref in names else names[0]
    path, id_key = ("/templates", "templateID") if is_template else ("/snapshots", "snapshotID")
    # Not with list_all, after which the client would take the last copy for the object with this name.
    entries = client.call("GET", path, query={"name": name, "limit": PAGE_SIZE}).data
    contents = {str(each[id_key]): _get_content(each) for each in entries}
    return frozenset({own_id, *(id for id, content in contents.items() if content == contents.get(own_id))})


def _get_content(entry: Mapping[str, Any]) -> str:
    """Return a text that is the same only for copies: the digest of a recipe, or the id of the first copy."""
    if "snapshotID" not in entry:
        return str(entry.get("digest") or entry["templateID"])
    return str((entry.get("imported") or {}).get("snapshotID") or entry["snapshotID"])
