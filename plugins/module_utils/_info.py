# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Implement the ``*_info`` modules, which list resources in the same shapes as the results of the other modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional

from ansible_collections.grove.sandbox.plugins.module_utils._client import quote_segment
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._plan import hide_unknown_values, stringify_values
from ansible_collections.grove.sandbox.plugins.module_utils._shapes import (
    make_sandbox_shape,
    make_snapshot_shape,
    make_template_shape,
    make_volume_shape,
)

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

ShapeFunction = Callable[["Client", "dict[str, Any]"], Optional["dict[str, Any]"]]
"""A function that returns the shape of a list entry, or None if the resource has been removed in the meantime."""
_NAME_OPTION = {"name": {"type": "list", "elements": "str", "aliases": ["names"]}}


@dataclass(frozen=True)
class Listing:
    """Lists one kind of resource.

    ``plural`` is both the path of the gateway's list and the key of the result. ``id_field`` is the gateway's field
    for the id. ``options`` are the module options that select entries. ``query_parameters`` maps them to the gateway's
    query parameters.
    """

    plural: str
    id_field: str
    make_shape: ShapeFunction
    options: Mapping[str, Any] = field(default_factory=dict)
    query_parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def ARGUMENTS(self) -> dict[str, Any]:
        return {**_NAME_OPTION, **self.options}

    @property
    def RULES(self) -> dict[str, Any]:
        return {}

    def make_result(self, client: Client, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the module's result, which contains the selected resources. Raises Failure."""
        query = {
            parameter: _format_query_value(params.get(option)) for option, parameter in self.query_parameters.items()
        }
        names = params.get("name")
        entries = client.list_all(f"/{self.plural}", **query)
        shapes = [
            self.make_shape(client, entry)
            for entry in entries
            if names is None or not self._list_names(entry).isdisjoint(names)
        ]
        existing_shapes = [shape for shape in shapes if shape is not None]
        if client.is_planning:
            existing_shapes = [hide_unknown_values(shape, client.plan_opened_at) for shape in existing_shapes]
        return {"changed": False, self.plural: existing_shapes}

    def _list_names(self, entry: Mapping[str, Any]) -> set[str]:
        return {str(entry.get("name")), str(entry[self.id_field]), *(entry.get("names") or [])}


def _format_query_value(value: Any) -> Any:
    """Return the value as a query parameter. The client omits None and empty values."""
    if isinstance(value, dict):
        return stringify_values(value, "metadata")
    return ",".join(value) if isinstance(value, list) else value or None


def _fetch_volume_shape(client: Client, volume: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return make_volume_shape(volume, client.list_all(f"/volumes/{quote_segment(volume['name'])}/snapshots"))
    except Failure as failure:
        if failure.kind == "not_found":
            return None
        raise


SANDBOXES = Listing(
    "sandboxes",
    "sandboxID",
    lambda _client, entry: make_sandbox_shape(entry),
    {
        "state": {"type": "list", "elements": "str", "choices": ["running", "paused"]},
        "metadata": {"type": "dict"},
        "template": {"type": "str"},
        "snapshot": {"type": "str"},
        "started_after": {"type": "str"},
        "diverged": {"type": "bool", "default": False},
    },
    {
        "state": "state",
        "metadata": "metadata",
        "template": "template",
        "snapshot": "snapshotID",
        "started_after": "startedAfter",
        "diverged": "diverged",
    },
)
SNAPSHOTS = Listing(
    "snapshots",
    "snapshotID",
    lambda _client, entry: make_snapshot_shape(entry),
    {"sandbox": {"type": "str"}, "template": {"type": "str"}},
    {"sandbox": "sandboxID", "template": "templateID"},
)
TEMPLATES = Listing("templates", "templateID", lambda _client, entry: make_template_shape(entry))
VOLUMES = Listing("volumes", "volumeID", _fetch_volume_shape)
