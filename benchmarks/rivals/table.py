"""``python -m benchmarks.rivals.table FILE``: print the results of the bench ``rivals`` as tables of Markdown.

``FILE`` is the JSON of a run. The number in brackets is the number of samples.
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
    "virsh_internal": "`virsh snapshot-create-as`, internal",
    "virsh_external": "the same, external memory",
}
PLAYBOOKS = {
    "our_play": "modules of this collection",
    "hand_play": "`community.general.zfs` and commands",
}
OPERATIONS = {
    "snapshot": "snapshot, until its source answers",
    "pause": "pause of the source, seen from outside",
    "written": "written for a snapshot",
    "fork_1": "fork x 1",
    "fork_10": "fork x 10",
    "rollback": "rollback",
}


def main() -> None:
    bench = json.loads(Path(sys.argv[1]).read_text())["benches"]["rivals"]
    print(render(bench, "virtual machine, median", MACHINES))
    print()
    print(render(bench, "jail, median of a playbook run", PLAYBOOKS))


def render(bench: dict[str, Any], corner: str, columns: dict[str, str]) -> str:
    """Return a table with a row for each operation that any of ``columns`` has measured."""
    lines = [_row(corner, *columns.values()), _row(*["---"] * (len(columns) + 1))]
    for operation, title in OPERATIONS.items():
        keys = [f"{column}_{operation}" for column in columns]
        if any(key in bench["measures"] for key in keys):
            lines.append(_row(title, *(_cell(bench, key) for key in keys)))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(bench: dict[str, Any], key: str) -> str:
    if key in bench["settings"]["not_offered"]:
        return "not offered"
    measure = bench["measures"][key]
    if not measure["n"]:
        return "-"
    return f"{format_amount(measure['p50'], measure['unit'])} ({measure['n']})"


if __name__ == "__main__":
    main()
