"""Print the results of the ``rivals`` bench as Markdown tables: ``python -m benchmarks.rivals.table FILE``.

``FILE`` is the JSON file of a run. Each cell contains a median, with the number of samples in parentheses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import format_amount

MACHINES = {
    "ours": "this software",
    "virsh_save": "`virsh save`, `restore`",
    "savevm": "QEMU `savevm`, `loadvm`",
    "virsh_internal": "`virsh` snapshot, internal",
    "virsh_external": "`virsh` snapshot, external memory",
}
PLAYBOOKS = {
    "our_play": "modules of this collection",
    "hand_play": "`community.general.zfs` and commands",
}
OPERATION_TITLES = {
    "snapshot": "snapshot, until its source answers",
    "pause": "pause of the source, seen from outside",
    "written": "bytes written for a snapshot",
    "fork_1": "one fork, until it answers",
    "fork_10": "ten forks, until all answer",
    "rollback": "rollback, until it answers",
}


def main() -> int:
    """Print the tables and return the exit code, which is 2 if the file has no results of the ``rivals`` bench."""
    if len(sys.argv) != 2:
        print("usage: python -m benchmarks.rivals.table FILE", file=sys.stderr)
        return 2
    bench = json.loads(Path(sys.argv[1]).read_text())["benches"].get("rivals")
    if bench is None:
        print(f"{sys.argv[1]} has no results of the bench rivals: run ./dev bench --json FILE rivals", file=sys.stderr)
        return 2
    print(render_table(bench, "virtual machine, median", MACHINES))
    print()
    print(render_table(bench, "jail, median of a playbook run", PLAYBOOKS))
    return 0


def render_table(bench: dict[str, Any], corner: str, columns: dict[str, str]) -> str:
    """Return a table with a row for each operation that was measured for any of ``columns``."""
    lines = [_format_row(corner, *columns.values()), _format_row(*["---"] * (len(columns) + 1))]
    for operation, title in OPERATION_TITLES.items():
        keys = [f"{column}_{operation}" for column in columns]
        if any(key in bench["measures"] for key in keys):
            lines.append(_format_row(title, *(_format_cell(bench, key) for key in keys)))
    return "\n".join(lines)


def _format_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _format_cell(bench: dict[str, Any], key: str) -> str:
    if key in bench["settings"]["not_offered"]:
        return "not offered"
    measure = bench["measures"].get(key)
    if not measure or not measure["n"]:
        return "not measured"
    return f"{format_amount(measure['p50'], measure['unit'])} ({measure['n']})"


if __name__ == "__main__":
    sys.exit(main())
