"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sandbox_gateway.cli import words
from sandbox_gateway.printable import escaped, printable

_WIDE = 200


def print_json(value: Any) -> None:
    sys.stdout.write(escaped(json.dumps(value, indent=2, ensure_ascii=False)) + "\n")


def note(text: str) -> None:
    """A remark for a person, on standard error."""
    print(printable(text), file=sys.stderr)


def sandboxes(items: Sequence[Mapping[str, Any]]) -> None:
    heads = ("NAME", "ID", "STATE", "TEMPLATE", "FROM", "CPU", "MEMORY", "AGE", "LIFE")
    _table(heads, (_sandbox_row(item) for item in items), empty="no sandboxes: `sandboxctl create TEMPLATE` makes one")


def snapshots(items: Sequence[Mapping[str, Any]]) -> None:
    heads = ("NAME", "ID", "SOURCE", "MEMORY", "WRITTEN", "DISK", "PAUSE", "FORKS", "AGE")
    _table(
        heads,
        (_snapshot_row(item) for item in items),
        empty="no snapshots: `sandboxctl snapshot create SANDBOX` takes one",
    )


def volumes(items: Sequence[Mapping[str, Any]]) -> None:
    heads = ("NAME", "SIZE", "USED", "MOUNTED BY", "MADE FROM", "AGE")
    rows = (_volume_row(item) for item in items)
    _table(heads, rows, empty="no volumes: `sandboxctl volume create NAME` makes one")


def volume_snapshots(items: Sequence[Mapping[str, Any]], volume: str) -> None:
    heads = ("NAME", "ID", "SIZE", "PART OF", "AGE")
    rows = (_volume_snapshot_row(item) for item in items)
    _table(heads, rows, empty=f"no snapshots of it: `sandboxctl volume snapshot {volume}` takes one")


def templates(items: Sequence[Mapping[str, Any]]) -> None:
    heads = ("NAME", "ID", "STATUS", "CPU", "MEMORY", "DISK", "CAPTURED", "FORKS", "AGE")
    rows = (_template_row(item) for item in items)
    _table(heads, rows, empty="no templates: `sandboxctl template build NAME` makes one")


def detail(item: Mapping[str, Any]) -> None:
    """One thing, a line for each of its properties."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in item.items():
        if value in (None, "", [], {}) or key in _SECRET:
            continue
        table.add_row(key, Text(printable(_value(key, value))))
    console().print(table)


def tree(nodes: Sequence[Mapping[str, Any]]) -> None:
    from rich.text import Text
    from rich.tree import Tree

    if not nodes:
        note("nothing yet: `sandboxctl template build NAME` makes a template")
    for node in nodes:
        root = Tree(Text.from_markup(_label(node)))
        _grow(root, node)
        console().print(root)


def console() -> Any:
    """A console on standard output that does not cut lines short where nobody looks at a terminal."""
    from rich.console import Console

    return Console(soft_wrap=False, highlight=False, width=None if sys.stdout.isatty() else _WIDE)


_SECRET = frozenset({"envdAccessToken", "trafficAccessToken", "token", "clientID", "envdVersion"})
_NAMED = 3
"""Sandboxes that a row names at most."""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    if table.row_count:
        console().print(table)
    else:
        note(empty)


def _sandbox_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        item["name"],
        item["sandboxID"],
        item["state"],
        item.get("alias") or item["templateID"] or "-",
        item["forkedFrom"] or "-",
        str(item["cpuCount"]),
        words.mib(item["memoryMB"]),
        words.age(item["createdAt"]),
        words.left(item["endAt"]),
    )


def _snapshot_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        ", ".join(item["names"]) or "-",
        item["snapshotID"],
        item["sourceSandboxID"] or "-",
        item["memory"],
        words.size(item["memoryBytesWritten"]),
        words.size(item["diskBytesUnique"]),
        f"{item['pauseMs']:.1f} ms",
        str(item["forks"]),
        words.age(item["createdAt"]),
    )


def _volume_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    users = [user["sandboxName"] for user in item["mounts"]]
    return (
        item["name"],
        words.mib(item["sizeMB"]),
        "-" if item["usedMB"] is None else words.mib(item["usedMB"]),
        (", ".join(users) if len(users) <= _NAMED else f"{len(users)} sandboxes") or "-",
        item["fromSnapshot"] or "-",
        words.age(item["createdAt"]),
    )


def _volume_snapshot_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        item["name"],
        item["snapshotID"],
        words.mib(item["sizeMB"]),
        item["sandboxSnapshotID"] or "-",
        words.age(item["createdAt"]),
    )


def _template_row(item: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        ", ".join(item["names"]) or "-",
        item["templateID"],
        item["buildStatus"],
        str(item.get("cpuCount", "-")),
        words.mib(item["memoryMB"]) if "memoryMB" in item else "-",
        words.mib(item["diskSizeMB"]) if "diskSizeMB" in item else "-",
        item.get("memory", "-"),
        str(item["forks"]),
        words.age(item["createdAt"]),
    )


def _value(key: str, value: Any) -> str:
    if key in ("memoryMB", "diskSizeMB", "sizeMB", "usedMB"):
        return words.mib(value)
    if key in ("memoryBytesWritten", "diskBytesUnique"):
        return words.size(value)
    if key == "pauseMs":
        return f"{value:.1f} ms"
    if key in _LINES:
        return "\n".join(_LINES[key](entry) for entry in value)
    if key == "endAt":
        return words.left(value)
    if key in ("createdAt", "startedAt", "updatedAt"):
        return f"{value} ({words.age(value)} ago)"
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _user(entry: Mapping[str, Any]) -> str:
    mode = ", read-only" if entry["readonly"] else ""
    return f"{entry['sandboxName']} ({entry['sandboxID']}, {entry['state']}) at {entry['path']}{mode}"


_LINES: dict[str, Callable[[Any], str]] = {
    "mounts": _user,
    "volumeMounts": words.mounted,
    "volumes": lambda entry: f"{entry['name']}@{entry['snapshotID']}",
    "stuck": str,
}
"""A line for each entry of a list."""


def _grow(branch: Any, node: Mapping[str, Any]) -> None:
    from rich.text import Text

    for child in node["children"]:
        _grow(branch.add(Text.from_markup(_label(child))), child)


def _label(node: Mapping[str, Any]) -> str:
    colour = {"sandbox": "green", "snapshot": "cyan", "template": "magenta"}.get(node["kind"], "dim")
    names = ", ".join(name for name in node["names"] if name != node["id"])
    more = " (paused)" if node.get("state") == "paused" else " (hidden)" if node.get("hidden") else ""
    return printable(f"[{colour}]{node['kind']}[/] [bold]{names}[/] [dim]{node['id']}[/]{more}")
