# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Find taken names: sandboxes, snapshots, templates and volumes share one namespace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

_LISTS = {"sandbox": "/sandboxes", "snapshot": "/snapshots", "template": "/templates", "volume": "/volumes"}


def holders(client: Client, names: Iterable[str], *, other_than: str) -> dict[str, str]:
    """Return the ``names`` taken by resources of other kinds: name → kind. Sends no request without names."""
    wanted = set(names)
    if not wanted:
        return {}
    query = {"name": next(iter(wanted))} if len(wanted) == 1 else {}
    taken = {}
    for kind, place in _LISTS.items():
        if kind == other_than:
            continue
        for entry in client.pages(place, **query):
            if entry.get("buildStatus", "ready") != "ready":
                continue
            for name in [entry.get("name"), *(entry.get("names") or [])]:
                if name in wanted:
                    taken[name] = kind
    return taken
