# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Find names that are already taken, since sandboxes, snapshots, templates and volumes share one namespace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

_LIST_PATHS = {"sandbox": "/sandboxes", "snapshot": "/snapshots", "template": "/templates", "volume": "/volumes"}


def find_taken_names(client: Client, names: Iterable[str], *, excluded_kind: str) -> dict[str, str]:
    """Return ``{name: kind}`` for the ``names`` that other kinds of resources use. Without names, sends no request."""
    requested_names = set(names)
    if not requested_names:
        return {}
    query = {"name": next(iter(requested_names))} if len(requested_names) == 1 else {}
    taken_names = {}
    for kind, path in _LIST_PATHS.items():
        if kind == excluded_kind:
            continue
        for entry in client.list_all(path, **query):
            if entry.get("buildStatus", "ready") != "ready":
                continue
            for name in [entry.get("name"), *(entry.get("names") or [])]:
                if name in requested_names:
                    taken_names[name] = kind
    return taken_names
