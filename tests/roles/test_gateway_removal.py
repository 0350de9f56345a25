"""Test that the gateway role removes every entry in the documented layout of a state root."""

from __future__ import annotations

import re

import yaml

from tests.support import session


def test_the_role_removes_every_entry_of_a_state_root() -> None:
    design = (session.REPOSITORY / "docs/design.md").read_text()
    layout = design.split("STATE_ROOT/\n", 1)[1].split("```", 1)[0]
    lines = re.findall(r"^  (\S.*)$", layout, re.MULTILINE)
    documented = {
        entry.split("/")[0]
        for line in lines
        for entry in line.split()
        if entry == line.split()[0] or entry.endswith("/ID/")
    }
    tasks = yaml.safe_load((session.REPOSITORY / "roles/gateway/tasks/absent.yml").read_text())
    (removed,) = (set(task["loop"]) for task in tasks if task.get("name") == "Remove the state")
    assert removed == documented
