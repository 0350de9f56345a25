"""Output of the commands: tables for people, and JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from sandbox_gateway.cli import formats
from sandbox_gateway.control_characters import escape_control_characters, remove_control_characters

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PLAIN_WIDTH = 200
_GAP = "  "
_BOLD, _RESET = "\x1b[1m", "\x1b[0m"


def print_json(value: Any) -> None:
    sys.stdout.write(escape_control_characters(json.dumps(value, indent=2, ensure_ascii=False)) + "\n")


def print_note(text: str) -> None:
    """Print a human-readable note to standard error."""
    print(remove_control_characters(text), file=sys.stderr)


def print_sandboxes(items: Sequence[Mapping[str, Any]]) -> None:
    headings = ("NAME", "ID", "STATE", "TEMPLATE", "FROM", "CPU", "MEMORY", "AGE", "TIMEOUT")
    _print_objects(
        headings,
        items,
        _build_sandbox_row,
        empty_note="no sandboxes: `sandboxctl create TEMPLATE` creates one",
    )


def print_snapshots(items: Sequence[Mapping[str, Any]]) -> None:
    headings = ("NAME", "ID", "SOURCE", "MEMORY", "WRITTEN", "DISK", "PAUSE", "FORKS", "AGE")
    _print_objects(
        headings,
        items,
        _build_snapshot_row,
        empty_note="no snapshots: `sandboxctl snapshot create SANDBOX` takes one",
    )


def print_volumes(items: Sequence[Mapping[str, Any]]) -> None:
    headings = ("NAME", "SIZE", "USED", "MOUNTED BY", "FROM", "AGE")
    _print_objects(
        headings, items, _build_volume_row, empty_note="no volumes: `sandboxctl volume create NAME` creates one"
    )


def print_volume_snapshots(items: Sequence[Mapping[str, Any]], volume: str) -> None:
    headings = ("NAME", "ID", "SIZE", "PART OF", "AGE")
    rows = (_build_volume_snapshot_row(item) for item in items)
    print_table(headings, rows, empty_note=f"no snapshots of {volume}: `sandboxctl volume snapshot {volume}` takes one")


def print_interrupted_imports(items: Sequence[Mapping[str, Any]]) -> None:
    headings = ("ID", "SNAPSHOT", "EXPIRES", "RECEIVED OR RESUME TOKEN")
    rows = (
        (
            item["id"],
            item["snapshotID"],
            item["expiresAt"],
            item["resumeToken"] or f"{item.get('receivedBytes', 0)} bytes of the file",
        )
        for item in items
    )
    print_table(headings, rows, empty_note="no interrupted imports can be continued")


def print_hosts(items: Sequence[Mapping[str, Any]]) -> None:
    headings = ("NAME", "STATE", "CORDONED", "KIND", "SANDBOXES", "FREE MEMORY", "FREE DISK", "VERSION")
    rows = (
        (
            item["name"],
            item["state"],
            "yes" if item["cordoned"] else "no",
            item["kind"] or "-",
            str(item["sandboxes"]),
            formats.format_size(item["memoryFreeBytes"]),
            formats.format_size(item["diskFreeBytes"]),
            item["version"] or "-",
        )
        for item in items
    )
    print_table(headings, rows)


def print_templates(items: Sequence[Mapping[str, Any]]) -> None:
    headings = ("NAME", "ID", "STATUS", "CPU", "MEMORY", "DISK", "CAPTURED", "FORKS", "AGE")
    _print_objects(
        headings, items, _build_template_row, empty_note="no templates: `sandboxctl template build NAME` builds one"
    )


def _print_objects(
    headings: tuple[str, ...],
    items: Sequence[Mapping[str, Any]],
    build_row: Callable[[Mapping[str, Any]], tuple[str, ...]],
    empty_note: str,
) -> None:
    """Print a table of objects. In a fleet, its second column names the host of each object."""
    rows = [build_row(item) for item in items]
    if any(item.get("sandboxHost") for item in items):
        headings = (headings[0], "HOST", *headings[1:])
        rows = [(row[0], item.get("sandboxHost") or "-", *row[1:]) for row, item in zip(rows, items, strict=True)]
    print_table(headings, rows, empty_note)


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], empty_note: str = "") -> None:
    """Print a table with a row of headings. If there are no rows, print only ``empty_note``, if any."""
    clean_rows = [tuple(remove_control_characters(cell) for cell in row) for row in rows]
    if not clean_rows:
        if empty_note:
            print_note(empty_note)
        return
    if _print_plain_table([tuple(headings), *clean_rows]):
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in clean_rows:
        table.add_row(*map(Text, row))
    create_console().print(table)


def print_details(item: Mapping[str, Any]) -> None:
    """Print the details of one item, one line per property."""
    rows = [
        (key, remove_control_characters(_format_value(key, value)))
        for key, value in item.items()
        if value not in (None, "", [], {}) and key not in _HIDDEN_PROPERTIES
    ]
    if _print_plain_table(rows, bold_column=True):
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(key, Text(value))
    create_console().print(table)


def print_tree(nodes: Sequence[Mapping[str, Any]]) -> None:
    """Print trees. ``nodes`` contains each object before its descendants, with its ``depth``.

    Objects deeper than ``_MAX_TREE_LEVELS`` are not indented further, and their level is shown as a number.
    """
    from rich.text import Text
    from rich.tree import Tree

    if not nodes:
        print_note("no templates yet: `sandboxctl template build NAME` builds one")
    trees: list[Any] = []
    path: list[Any] = []
    for node in nodes:
        depth = min(node["depth"], _MAX_TREE_LEVELS)
        suffix = "" if depth == node["depth"] else f" [dim](level {node['depth']})[/]"
        label = Text.from_markup(_format_node(node) + suffix)
        del path[depth:]
        if path:
            path.append(path[-1].add(label))
        else:
            trees.append(Tree(label))
            path.append(trees[-1])
    for tree in trees:
        create_console().print(tree)


def create_console() -> Any:
    """Create a console on standard output, as wide as the terminal, or _PLAIN_WIDTH columns wide without one."""
    from rich.console import Console

    return Console(soft_wrap=False, highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


_HIDDEN_PROPERTIES = frozenset({"envdAccessToken", "trafficAccessToken", "token", "clientID", "envdVersion"})
_MAX_TREE_LEVELS = 16
"""Maximum depth to which a tree is indented, because a chain of snapshots can have thousands of levels."""
_MAX_NAMES = 3
"""Maximum number of sandboxes that a row names."""


def _print_plain_table(rows: Sequence[tuple[str, ...]], *, bold_column: bool = False) -> bool:
    """Print a table as rich would, but without importing rich, which takes longer than a request.

    The first row or the first column is bold. Returns False, and prints nothing, if only rich can print the table,
    because it is too wide, or because a cell has several lines or characters other than ASCII.
    """
    if not all(cell.isascii() and cell.isprintable() for row in rows for cell in row):
        return False
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_terminal = sys.stdout.isatty()
    if sum(widths) + len(_GAP) * (len(widths) - 1) > (_get_terminal_width() if is_terminal else _PLAIN_WIDTH):
        return False
    has_styles = is_terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    for number, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        if has_styles and bold_column:
            cells[0] = f"{_BOLD}{cells[0]}{_RESET}"
        line = _GAP.join(cells).rstrip()
        print(f"{_BOLD}{line}{_RESET}" if has_styles and number == 0 and not bold_column else line)
    return True


def _get_terminal_width() -> int:
    """Return the width of the terminal in columns, or 0 if it is unknown."""
    if (columns := os.environ.get("COLUMNS", "")).isdigit():
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 0


def _build_sandbox_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        item["name"],
        item["sandboxID"],
        item["state"],
        item.get("alias") or item["templateID"] or "-",
        item["forkedFrom"] or "-",
        str(item["cpuCount"]),
        formats.format_mib(item["memoryMB"]),
        formats.format_age(item["createdAt"]),
        formats.format_time_left(item["endAt"]),
    )


def _build_snapshot_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        ", ".join(item["names"]) or "-",
        item["snapshotID"],
        item["sourceSandboxID"] or "-",
        item["memory"],
        formats.format_size(item["memoryBytesWritten"]),
        formats.format_size(item["diskBytesUnique"]),
        f"{item['pauseMs']:.1f} ms",
        str(item["forks"]),
        formats.format_age(item["createdAt"]),
    )


def _build_volume_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    user_names = [user["sandboxName"] for user in item["mounts"]]
    return (
        item["name"],
        formats.format_mib(item["sizeMB"]),
        "-" if item["usedMB"] is None else formats.format_mib(item["usedMB"]),
        (", ".join(user_names) if len(user_names) <= _MAX_NAMES else f"{len(user_names)} sandboxes") or "-",
        item["fromSnapshot"] or "-",
        formats.format_age(item["createdAt"]),
    )


def _build_volume_snapshot_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        item["name"],
        item["snapshotID"],
        formats.format_mib(item["sizeMB"]),
        item["sandboxSnapshotID"] or "-",
        formats.format_age(item["createdAt"]),
    )


def _build_template_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        ", ".join(item["names"]) or "-",
        item["templateID"],
        item["buildStatus"],
        str(item.get("cpuCount", "-")),
        formats.format_mib(item["memoryMB"]) if "memoryMB" in item else "-",
        formats.format_mib(item["diskSizeMB"]) if "diskSizeMB" in item else "-",
        item.get("memory", "-"),
        str(item["forks"]),
        formats.format_age(item["createdAt"]),
    )


def _format_value(key: str, value: Any) -> str:
    if key in ("memoryMB", "diskSizeMB", "sizeMB", "usedMB"):
        return formats.format_mib(value)
    if key in ("memoryBytesWritten", "diskBytesUnique"):
        return formats.format_size(value)
    if key == "prewarm":
        return formats.format_prewarm(value)
    if key == "pauseMs":
        return f"{value:.1f} ms"
    if key in _LINE_FORMATS:
        return "\n".join(_LINE_FORMATS[key](entry) for entry in value)
    if key == "endAt":
        return formats.format_time_left(value)
    if key in ("createdAt", "startedAt", "updatedAt"):
        return f"{value} ({formats.format_age(value)} ago)"
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _format_user(entry: Mapping[str, Any]) -> str:
    suffix = ", read-only" if entry["readonly"] else ""
    return f"{entry['sandboxName']} ({entry['sandboxID']}, {entry['state']}) at {entry['path']}{suffix}"


_LINE_FORMATS: dict[str, Callable[[Any], str]] = {
    "mounts": _format_user,
    "volumeMounts": formats.format_mount,
    "volumes": lambda entry: f"{entry['name']}@{entry['snapshotID']}",
    "stuck": str,
}
"""How to format the entries of list properties, one per line."""


def _format_node(node: Mapping[str, Any]) -> str:
    colour = {"sandbox": "green", "snapshot": "cyan", "template": "magenta"}.get(node["kind"], "dim")
    names_text = ", ".join(name for name in node["names"] if name != node["id"])
    suffix = " (paused)" if node.get("state") == "paused" else " (hidden)" if node.get("hidden") else ""
    return remove_control_characters(f"[{colour}]{node['kind']}[/] [bold]{names_text}[/] [dim]{node['id']}[/]{suffix}")
