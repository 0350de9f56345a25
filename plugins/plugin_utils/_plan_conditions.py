# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Mark the entries of a plan that depend on objects that the run might not create in time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ansible_collections.grove.sandbox.plugins.module_utils._approval import TARGET_KEYS

_JOURNAL_KEYS = ("conditional", "unfinished", "awaited", "mentions")
"""Keys of entries that a plan file does not contain."""


def mark_dependent_entries(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries in the form of a plan file, with a note in ``unknown`` about what each depends on.

    ``entries``: the entries of a run in their order, as the modules return them: they also have the keys
    ``conditional``, the names of the objects that the run might not create; ``unfinished``, the names of the templates
    whose builds the task starts without waiting for them; ``awaited``, the names of the templates for whose builds it
    waits; and ``mentions``, the names and ids of the objects that the task uses.
    """
    uncertain_names: dict[tuple[str, str], str] = {}
    """By gateway, and name or id: the name of an object that the run might not create."""
    unfinished_names: dict[tuple[str, str], str] = {}
    """By gateway, and name or id: the name of a template whose build might not have finished."""
    written_names: dict[tuple[str, str, str], str] = {}
    """By gateway, verb, and file or reference: the name of the snapshot that an earlier task writes there."""
    marked_entries = []
    for entry in entries:
        conditional_names = entry.get("conditional", [])
        gateway = entry["gateway"]
        for name in entry.get("awaited", []):
            unfinished_names = {
                key: each for key, each in unfinished_names.items() if (key[0], each) != (gateway, name)
            }
        keys = [(gateway, text) for text in entry.get("mentions", [])]
        used_names = sorted({uncertain_names[key] for key in keys if key in uncertain_names})
        used_templates = sorted({unfinished_names[key] for key in keys if key in unfinished_names})
        if used_names or used_templates:
            changes = [change for action in entry["actions"] for change in action["changes"]]
            conditional_names = [change["name"] for change in changes if change["before"] is None]
        for names, uncertain in (
            (conditional_names, uncertain_names),
            (entry.get("unfinished", []), unfinished_names),
        ):
            for name in names:
                uncertain[gateway, name] = name
                if name in entry["created"]:
                    uncertain[gateway, entry["created"][name]] = name
        repeated_targets = []
        for action in entry["actions"]:
            name, is_new = action["changes"][0]["name"], action["changes"][0]["before"] is None
            if action["verb"] in TARGET_KEYS:
                target = action["request"][TARGET_KEYS[action["verb"]][0]]
                key = (gateway, action["verb"], target)
                if written_names.get(key) == name:
                    repeated_targets.append((target, name))
                written_names[key] = name
            elif is_new:  # The name now belongs to another snapshot.
                written_names = {key: each for key, each in written_names.items() if each != name}
        marked_entry = {key: value for key, value in entry.items() if key not in _JOURNAL_KEYS}
        marked_entry["unknown"] = [
            *entry["unknown"],
            *(f"depends on {name}, which the run might not create" for name in used_names),
            *(f"depends on template {name}, whose build might not have finished by then" for name in used_templates),
        ]
        marked_entry["unknown"] += [
            f"only if {target} does not contain {name} by then" for target, name in repeated_targets
        ]
        marked_entries.append(marked_entry)
    return marked_entries
