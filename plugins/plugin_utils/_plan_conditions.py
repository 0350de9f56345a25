# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Mark the entries of a plan that depend on objects that the run might not create."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def mark_dependent_entries(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries in the form of a plan file, with a note in ``unknown`` about what each depends on.

    ``entries``: the entries of a run in their order, as the modules return them: they also have the keys
    ``conditional``, the names of the objects that the run might not create, and ``mentions``, the names and ids of the
    objects that the task uses.
    """
    uncertain_names: dict[tuple[str, str], str] = {}
    """By gateway, and name or id: the name of an object that the run might not create."""
    marked_entries = []
    for entry in entries:
        conditional_names = entry.get("conditional", [])
        gateway = entry["gateway"]
        keys = ((gateway, text) for text in entry.get("mentions", []))
        used_names = sorted({uncertain_names[key] for key in keys if key in uncertain_names})
        if used_names:
            changes = [change for action in entry["actions"] for change in action["changes"]]
            conditional_names = [change["name"] for change in changes if change["before"] is None]
        for name in conditional_names:
            uncertain_names[gateway, name] = name
            if name in entry["created"]:
                uncertain_names[gateway, entry["created"][name]] = name
        marked_entry = {key: value for key, value in entry.items() if key not in ("conditional", "mentions")}
        marked_entry["unknown"] = [
            *entry["unknown"],
            *(f"depends on {name}, which the run might not create" for name in used_names),
        ]
        marked_entries.append(marked_entry)
    return marked_entries
