"""Test how a plan is formatted as a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.plugin_utils import _plan_table

EAST, WEST = "0000000000000001", "0000000000000002"
Change = tuple[str, str, bool, bool]
"""Kind, name, and whether the resource exists before and after."""


def make_entry(task: str, line: int, verb: str = "", *changes: Change, **fields: Any) -> dict[str, Any]:
    return {
        "host": "localhost",
        "task": task,
        "path": f"play.yml:{line}",
        "gateway": EAST,
        "actions": [
            {
                "verb": verb,
                "changes": [
                    {
                        "kind": kind,
                        "name": name,
                        "before": {} if existed_before else None,
                        "after": {} if exists_after else None,
                    }
                    for kind, name, existed_before, exists_after in changes
                ],
                "request": {},
            }
        ],
        "reads": {},
        "created": {},
        "costs": {},
        "unknown": [],
        "failure": None,
        **fields,
    }


def make_failure(message: str) -> dict[str, Any]:
    return {"kind": "in_use", "message": message, "blockers": [], "status": 409}


def make_document(*entries: dict[str, Any], problems: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "problems": list(problems),
        "gateways": {EAST: "unix:///run/sandbox-gateway/gateway.sock", WEST: "https://west.example:8700"},
        "entries": list(entries),
    }


DOCUMENT = make_document(
    make_entry(
        "Take a snapshot",
        5,
        "capture",
        ("snapshot", "before", False, True),
        costs={"disk_bytes": 11 << 20, "pause_ms": 5.5},
        unknown=["the cost of the first capture"],
    ),
    make_entry(
        "Fork it",
        10,
        "fork",
        *(("sandbox", f"try-{number}", False, True) for number in range(1, 9)),
        costs={"memory_mb": 2048, "disk_bytes": 1 << 20},
    ),
    make_entry("List everything", 17),
    make_entry("Mark the first fork", 20, "update", ("sandbox", "try-1", True, True)),
    make_entry("Grow the data", 25, "grow", ("volume", "data", True, True), gateway=WEST),
    make_entry(
        "Remove it",
        30,
        failure=make_failure(
            "snapshot 'before' is in use by 8 sandboxes (try-1, try-2, try-3, try-4, try-5, try-6, try-7, try-8). "
            "Delete them first, or pass when=unused to delete it with its last user."
        ),
    ),
    make_entry("Remove the old one", 35, "remove", ("sandbox", "old", True, False), costs={"memory_mb": -512.0}),
    make_entry(
        "Roll the source back",
        40,
        "rollback",
        ("snapshot", "backup", False, True),
        ("sandbox", "web", True, True),
        unknown=["whether web has diverged"],
    ),
)
TABLE = """\
Gateway unix:///run/sandbox-gateway/gateway.sock
  sandboxes
    + try-1 … try-8 (8)  Fork it (play.yml:10)     2.0 GiB memory, 1.0 MiB disk
    ~ try-1              Mark the first fork (play.yml:20)
    - old                Remove the old one (play.yml:35)  -512 MiB memory
    ↺ web                Roll the source back (play.yml:40)
  snapshots
    + before             Take a snapshot (play.yml:5)  11 MiB disk, 6 ms pause
    + backup             Roll the source back (play.yml:40)

Gateway https://west.example:8700
  volumes
    ~ data  Grow the data (play.yml:25)

Plan: 10 to create, 2 to change, 1 to remove, 1 to roll back; 1.5 GiB of
  memory, about 12 MiB of disk, 1 pause of about 6 ms.

Unknown until the run:
  the cost of the first capture: Take a snapshot (play.yml:5)
  whether web has diverged: Roll the source back (play.yml:40)

Predicted failures:
  localhost, Remove it (play.yml:30):
    snapshot 'before' is in use by 8 sandboxes (try-1, try-2, try-3, try-4,
    try-5, try-6, try-7, try-8). Delete them first, or pass when=unused to
    delete it with its last user."""


def test_the_table_lists_changes_by_gateway_and_kind() -> None:
    assert _plan_table.render(DOCUMENT, 79, color=False) == TABLE


def test_colours_do_not_change_the_text() -> None:
    colored_table = _plan_table.render(DOCUMENT, 79, color=True)
    assert re.sub(r"\033\[[0-9;]*m", "", colored_table) == TABLE
    for sign, code in (("+", "0;32"), ("~", "0;33"), ("-", "0;31"), ("↺", "0;36")):
        assert f"\033[{code}m{sign} " in colored_table
    assert "\033[0;31mPredicted failures:\033[0m" in colored_table


def test_a_plan_without_changes_is_one_line() -> None:
    text = "The plan contains no changes."
    assert _plan_table.render(make_document(), 79, color=True) == text
    assert _plan_table.render(make_document(make_entry("List", 1)), 79, color=True) == text


def test_failures_are_shown_even_if_nothing_changes() -> None:
    document = make_document(make_entry("Remove it", 3, failure=make_failure("no such snapshot")))
    assert _plan_table.render(document, 79, color=False) == (
        "The plan contains no changes.\n\nPredicted failures:\n"
        "  localhost, Remove it (play.yml:3):\n    no such snapshot"
    )


def test_an_incomplete_plan_says_what_is_missing() -> None:
    problems = ["the changes of task 'Hide it' (play.yml:3) are unknown: it has no_log, so its plan must not be saved"]
    text = _plan_table.render(make_document(problems=problems), 79, color=False)
    section = """
The plan is incomplete:
  the changes of task 'Hide it' (play.yml:3) are unknown: it has no_log, so its
  plan must not be saved"""
    assert text == f"The plan contains no changes.\n{section}"
    assert _plan_table.render({**DOCUMENT, "problems": problems}, 79, color=False) == f"{TABLE}\n{section}"
    assert "\033[0;31mThe plan is incomplete:\033[0m" in _plan_table.render(
        {**DOCUMENT, "problems": problems}, 79, True
    )


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (
            79,
            """
  only if sandbox web has diverged by then, which its disk does not show:
    Roll back (play.yml:1)""",
        ),
        (120, "\n  only if sandbox web has diverged by then, which its disk does not show: Roll back (play.yml:1)"),
    ],
)
def test_conditions_are_shown_completely(width: int, text: str) -> None:
    condition = "only if sandbox web has diverged by then, which its disk does not show"
    entry = make_entry("Roll back", 1, "rollback", ("sandbox", "web", True, True), unknown=[condition])
    assert _plan_table.render(make_document(entry), width, color=False).endswith(f"\n\nUnknown until the run:{text}")


def test_three_siblings_are_listed_one_by_one() -> None:
    def make_names(count: int) -> list[str]:
        changes = [("sandbox", f"s{number}", False, True) for number in range(count)]
        lines = _plan_table.render(make_document(make_entry("Fork", 1, "fork", *changes)), 79, color=False).splitlines()
        return [line.partition("+ ")[2].partition("  ")[0] for line in lines if "+ " in line]

    assert make_names(3) == ["s0", "s1", "s2"]
    assert make_names(4) == ["s0 … s3 (4)"]


def test_siblings_with_different_signs_are_listed_separately() -> None:
    changes = [("sandbox", f"s{number}", number > 3, True) for number in range(8)]
    text = _plan_table.render(make_document(make_entry("Fork", 1, "fork", *changes)), 79, color=False)
    assert "+ s0 … s3 (4)" in text and "~ s4 … s7 (4)" in text


def test_costs_are_in_the_first_line_of_a_task_only() -> None:
    entry = make_entry(
        "Roll back", 1, "rollback", ("snapshot", "b", False, True), ("sandbox", "w", True, True), costs={"memory_mb": 1}
    )
    lines = _plan_table.render(make_document(entry, entry), 79, color=False).splitlines()
    assert [line.split()[1] for line in lines if "1.0 MiB memory" in line and "play.yml" in line] == ["w", "w"]


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        ([{"pause_ms": 600}, {"pause_ms": 900}, {"pause_ms": 0}], "; 2 pauses of about 1.5 s in total."),
        ([{"pause_ms": 0.42}], "; 1 pause of about 0.4 ms."),
        ([{"memory_mb": -256}, {"disk_bytes": -1000}], "; 256 MiB of memory freed, about 1000 B of disk freed."),
        ([{"memory_mb": 9}, {"memory_mb": -9}], " to create."),
        ([{"disk_bytes": 1024 * 1024 - 1}], "; about 1.0 MiB of disk."),
        ([{"disk_bytes": 1 << 52}], "; about 4096 TiB of disk."),
    ],
)
def test_totals_add_up_the_costs(costs: list[dict[str, float]], text: str) -> None:
    entries = [make_entry("Fork", 1, "fork", ("sandbox", "s", False, True), costs=each) for each in costs]
    rendered_table = _plan_table.render(make_document(*entries), 79, color=False)
    assert rendered_table.endswith(f"Plan: {len(costs)}{text if text.startswith(' ') else ' to create' + text}")


@pytest.mark.parametrize("width", [0, 79, 100])
def test_long_text_is_shortened(width: int) -> None:
    siblings = [("sandbox", f"{'long-name-' * 6}{number}", False, True) for number in range(5)]
    entry = make_entry(
        "任务" * 60,
        12,
        "fork",
        *siblings,
        ("snapshot", "s" * 100, False, True),
        path=f"{'roles/deep/' * 20}main.yml:12",
        host="h" * 300,
        unknown=["u" * 200],
        failure=make_failure("f" * 9000),
        costs={"memory_mb": 2048, "disk_bytes": 1 << 20, "pause_ms": 5},
    )
    document = {**make_document(entry, problems=["p" * 9000]), "gateways": {EAST: "https://" + "e" * 200}}
    lines = _plan_table.render(document, width, color=False).splitlines()
    long_lines = [line for line in lines if _plan_table._measure_width(line) > max(width, 79)]
    assert not long_lines
    rows = [line for line in lines if ".yml:12)" in line]
    assert len(rows) == 4, "each place keeps its line number"
    assert sum(line.count("u") for line in lines) > 200 and sum(line.count("p") for line in lines) < 2100
    assert "(5)" in rows[0] and "2.0 GiB memory, 1.0 MiB disk, 5 ms pause" in rows[0]
    assert sum(line.count("f") for line in lines) < 2100


def test_text_from_elsewhere_cannot_affect_the_terminal() -> None:
    evil_text = "a\033[2Jb\nc\u202ed\x9b\re"
    document = make_document(
        make_entry(
            evil_text,
            1,
            "fork",
            ("sandbox", evil_text, False, True),
            path=evil_text,
            host=evil_text,
            unknown=[evil_text],
            failure=make_failure(evil_text),
        ),
        problems=[evil_text],
    )
    text = _plan_table.render({**document, "gateways": {EAST: evil_text}}, 79, color=False)
    assert not re.search("[\033\u202e\x9b\r]", text)
    assert text.splitlines()[0] == "Gateway a[2Jb cde"
    assert "+ a[2Jb cde  a[2Jb cde (a[2Jb cde)" in text
    assert text.endswith("The plan is incomplete:\n  a[2Jb cde")
