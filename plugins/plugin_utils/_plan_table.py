# Copyright (c) 2026, The grove.sandbox authors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Show a plan as a table of changes, by gateway and kind."""

from __future__ import annotations

import itertools
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ansible import constants as C
from ansible.utils.color import parsecolor
from ansible_collections.grove.sandbox.plugins.module_utils._failure import make_printable
from ansible_collections.grove.sandbox.plugins.plugin_utils._plan_file import KINDS

CREATED, CHANGED, REMOVED, ROLLED_BACK = "+", "~", "-", "↺"
_MIN_WIDTH = 79
"""The smallest width of a terminal that Ansible assumes."""
_MIN_NAME_WIDTH = 12
_MIN_LOCATION_WIDTH = 16
_MAX_SHOWN_SIBLINGS = 3
_MAX_MESSAGE_CHARACTERS = 2000
_INDENT = " " * 4
_TOTAL_PHRASES = {CREATED: "to create", CHANGED: "to change", REMOVED: "to remove", ROLLED_BACK: "to roll back"}
_PLURALS = {"sandbox": "sandboxes"}


@dataclass(frozen=True)
class _Row:
    """One line of the table: one change, or several siblings with the same sign."""

    sign: str
    names: tuple[str, ...]
    task: str
    path: str
    costs: str

    def format_name(self, width: int | None = None) -> str:
        """Return the name, or the first and last name of siblings, in at most ``width`` columns."""
        if len(self.names) == 1:
            return self.names[0] if width is None else _shorten(self.names[0], width)
        first, last, count = self.names[0], self.names[-1], f" ({len(self.names)})"
        if width is not None and _measure_width(f"{first} … {last}{count}") > width:
            name_width = (width - len(f" … {count}")) // 2
            first, last = _shorten(first, name_width), _shorten(last, name_width)
        return f"{first} … {last}{count}"


def get_sign(verb: str, change: Mapping[str, Any]) -> str:
    """Return the sign of a change: created, changed, removed or rolled back."""
    if change["before"] is None:
        return CREATED
    if verb == "rollback":
        return ROLLED_BACK
    return REMOVED if change["after"] is None else CHANGED


def has_changes(document: Mapping[str, Any]) -> bool:
    return any(action["changes"] for entry in document["entries"] for action in entry["actions"])


def render(document: Mapping[str, Any], width: int, color: bool) -> str:
    """Return the table, its totals, the unknown values, the predicted failures, and why the plan is incomplete.

    The lines have at most ``width`` columns, or 79 if ``width`` is smaller.
    """
    width = max(width, _MIN_WIDTH)
    lines = []
    if has_changes(document):
        for ident, url in document["gateways"].items():
            entries = [entry for entry in document["entries"] if entry["gateway"] == ident]
            lines += _render_gateway(url, entries, width, color)
        lines += textwrap.wrap(f"Plan: {_describe_totals(document['entries'])}.", width, subsequent_indent="  ")
    else:
        lines.append("The plan contains no changes.")
    lines += _render_unknown_values(document["entries"], width, color)
    lines += _render_failures(document["entries"], width, color)
    lines += _render_problems(document["problems"], width, color)
    return "\n".join(lines)


def _render_gateway(url: str, entries: list[Mapping[str, Any]], width: int, color: bool) -> list[str]:
    rows_by_kind = _make_rows(entries)
    rows = [row for kind_rows in rows_by_kind.values() for row in kind_rows]
    if not rows:
        return []
    room = width - len(_INDENT) - 2
    costs_width = max(len(row.costs) for row in rows)
    name_room = min(room * 2 // 5, room - costs_width - _MIN_LOCATION_WIDTH - 4)
    name_width = min(max(_measure_width(row.format_name()) for row in rows), max(name_room, _MIN_NAME_WIDTH))
    location_column_width = room - name_width - 2
    natural_location_width = max(_measure_width(_format_location(row.task, row.path)) for row in rows)
    location_width = min(natural_location_width, location_column_width - costs_width - 2)
    lines = [_shorten(f"Gateway {_to_one_line(url)}", width)]
    for kind, kind_rows in rows_by_kind.items():
        lines.append(f"  {_PLURALS.get(kind, kind + 's')}")
        lines += [_render_row(row, name_width, location_width, location_column_width, color) for row in kind_rows]
    return [*lines, ""]


def _make_rows(entries: list[Mapping[str, Any]]) -> dict[str, list[_Row]]:
    """Return the rows of each kind. The costs of a task are in its first row."""
    rows_by_kind: dict[str, list[_Row]] = {}
    entries_with_row = set()
    for kind in KINDS:
        for number, entry in enumerate(entries):
            for sign, names in _group_changes(entry, kind):
                costs = "" if number in entries_with_row else _describe_costs(entry["costs"])
                entries_with_row.add(number)
                row = _Row(sign, names, _to_one_line(entry["task"]), _to_one_line(entry["path"]), costs)
                rows_by_kind.setdefault(kind, []).append(row)
    return rows_by_kind


def _group_changes(entry: Mapping[str, Any], kind: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the sign and the names of each row for the changes to resources of this kind."""
    for action in entry["actions"]:
        changes = [change for change in action["changes"] if change["kind"] == kind]
        signed_names = [(get_sign(action["verb"], change), _to_one_line(change["name"])) for change in changes]
        for sign, group in itertools.groupby(signed_names, key=lambda pair: pair[0]):
            names = tuple(name for _sign, name in group)
            if len(names) > _MAX_SHOWN_SIBLINGS:
                yield sign, names
            else:
                yield from ((sign, (name,)) for name in names)


def _render_row(row: _Row, name_width: int, location_width: int, location_column_width: int, color: bool) -> str:
    """Return a line. The costs begin after ``location_width`` columns, or later if a long location leaves room."""
    name = row.format_name(name_width)
    signed_name = _colorize(f"{row.sign} {name}", _load_colors()[row.sign], color)
    room = max(location_column_width - len(row.costs) - 2, _MIN_LOCATION_WIDTH) if row.costs else location_column_width
    location = _format_location(row.task, row.path, room)
    padding = " " * (location_width - _measure_width(location)) if row.costs else ""
    return (
        f"{_INDENT}{signed_name}{' ' * (name_width - _measure_width(name))}  {location}{padding}  {row.costs}".rstrip()
    )


def _render_unknown_values(entries: Iterable[Mapping[str, Any]], width: int, color: bool) -> list[str]:
    unknown = {
        (_to_one_line(phrase), _to_one_line(entry["task"]), _to_one_line(entry["path"])): None
        for entry in entries
        for phrase in entry["unknown"]
    }
    if not unknown:
        return []
    lines = ["", _colorize("Unknown until the run:", C.COLOR_WARN, color)]
    for phrase, task, path in unknown:
        location, shown_phrase = _format_location(task, path), _shorten(phrase, _MAX_MESSAGE_CHARACTERS)
        if _measure_width(f"  {shown_phrase}: {location}") <= width:
            lines.append(f"  {shown_phrase}: {location}")
        else:
            lines += _wrap(f"{shown_phrase}:", width, "  ")
            lines.append(f"{_INDENT}{_format_location(task, path, width - len(_INDENT))}")
    return lines


def _render_failures(entries: Iterable[Mapping[str, Any]], width: int, color: bool) -> list[str]:
    lines = []
    for entry in entries:
        if entry["failure"] is not None:
            host = _shorten(_to_one_line(entry["host"]), width // 3)
            location = _format_location(
                _to_one_line(entry["task"]), _to_one_line(entry["path"]), width - _measure_width(host) - 5
            )
            lines.append(f"  {host}, {location}:")
            lines += _wrap(_shorten(_to_one_line(entry["failure"]["message"]), _MAX_MESSAGE_CHARACTERS), width, _INDENT)
    return ["", _colorize("Predicted failures:", C.COLOR_ERROR, color), *lines] if lines else []


def _render_problems(problems: Iterable[str], width: int, color: bool) -> list[str]:
    lines: list[str] = []
    for problem in problems:
        lines += _wrap(_shorten(_to_one_line(problem), _MAX_MESSAGE_CHARACTERS), width, "  ")
    return ["", _colorize("The plan is incomplete:", C.COLOR_ERROR, color), *lines] if lines else []


def _describe_totals(entries: list[Mapping[str, Any]]) -> str:
    actions = [action for entry in entries for action in entry["actions"]]
    counts = Counter(get_sign(action["verb"], change) for action in actions for change in action["changes"])
    text = ", ".join(f"{counts[sign]} {phrase}" for sign, phrase in _TOTAL_PHRASES.items() if counts[sign])
    memory_bytes = sum(entry["costs"].get("memory_mb", 0) for entry in entries) * (1 << 20)
    disk_bytes = sum(entry["costs"].get("disk_bytes", 0) for entry in entries)
    pauses = [entry["costs"]["pause_ms"] for entry in entries if entry["costs"].get("pause_ms")]
    costs = []
    if memory_bytes:
        costs.append(f"{_format_size(abs(memory_bytes))} of memory{' freed' if memory_bytes < 0 else ''}")
    if disk_bytes:
        costs.append(f"about {_format_size(abs(disk_bytes))} of disk{' freed' if disk_bytes < 0 else ''}")
    if len(pauses) == 1:
        costs.append(f"1 pause of about {_format_duration(pauses[0])}")
    elif pauses:
        costs.append(f"{len(pauses)} pauses of about {_format_duration(sum(pauses))} in total")
    return "; ".join(filter(None, (text, ", ".join(costs))))


def _describe_costs(costs: Mapping[str, float]) -> str:
    """Return the costs of one task in short form. Freed memory and disk space are negative."""
    parts = []
    for key, unit, noun in (("memory_mb", 1 << 20, "memory"), ("disk_bytes", 1, "disk")):
        size = costs.get(key, 0) * unit
        if size:
            parts.append(f"{'-' if size < 0 else ''}{_format_size(abs(size))} {noun}")
    if costs.get("pause_ms"):
        parts.append(f"{_format_duration(costs['pause_ms'])} pause")
    return ", ".join(parts)


def _format_size(size: float) -> str:
    """Return a number of bytes with two or more significant digits and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1023.5 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.1f} {unit}" if unit != "B" and size < 9.95 else f"{size:.0f} {unit}"


def _format_duration(milliseconds: float) -> str:
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms" if milliseconds >= 0.95 else f"{milliseconds:.1f} ms"
    return f"{milliseconds / 1000:.1f} s"


def _format_location(task: str, path: str, width: int | None = None) -> str:
    """Return the name of a task with its file and line, in at most ``width`` columns."""
    if not path:
        return task if width is None else _shorten(task, width)
    if width is None or _measure_width(f"{task} ({path})") <= width:
        return f"{task} ({path})" if task else f"({path})"
    # The line number is at the end of the path.
    task_width = min(_measure_width(task), max(width // 3, width - _measure_width(path) - 3))
    path = _shorten_left(path, width - task_width - 3)
    return f"{_shorten(task, task_width)} ({path})"


def _to_one_line(text: str) -> str:
    """Return text from a playbook, a gateway or a sandbox without anything that affects a terminal or the table."""
    return " ".join(make_printable(text).split())


def _wrap(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _shorten(text: str, width: int) -> str:
    if _measure_width(text) <= width:
        return text
    end, columns = 0, 0
    while end < len(text) and columns + _measure_width(text[end]) < width:
        columns += _measure_width(text[end])
        end += 1
    return text[:end] + "…"


def _shorten_left(text: str, width: int) -> str:
    return _shorten(text[::-1], width)[::-1]


def _measure_width(text: str) -> int:
    """Return the number of columns of a terminal that the text occupies."""
    if text.isascii():
        return len(text)
    return sum(map(_measure_character, text))


def _measure_character(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def _load_colors() -> dict[str, str]:
    return {
        CREATED: C.COLOR_DIFF_ADD,
        CHANGED: C.COLOR_CHANGED,
        REMOVED: C.COLOR_DIFF_REMOVE,
        ROLLED_BACK: C.COLOR_DIFF_LINES,
    }


def _colorize(text: str, name: str, color: bool) -> str:
    return f"\033[{parsecolor(name)}m{text}\033[0m" if color else text
