"""Test `sandboxctl plan`, which shows and compares plan files."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gateway.cli import main as sandboxctl
from tests.cli.running import Outcome, Run, check_success

GATEWAY, OTHER_GATEWAY = "0123456789abcdef", "fedcba9876543210"
URL = "unix:///run/sandbox-gateway/gateway.sock"
UNREACHABLE_URL = "unix:///nonexistent"
ESCAPES = "\x1b[31m\x1b]0;title\x07\u202e\r"


def make_time(hours: float) -> str:
    return (datetime.now(UTC) + timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")


def make_change(name: str, before: Any, after: Any, kind: str = "sandbox") -> dict[str, Any]:
    return {"kind": kind, "name": name, "before": before, "after": after}


def make_action(verb: str, *changes: dict[str, Any], **request: Any) -> dict[str, Any]:
    return {"verb": verb, "changes": list(changes), "request": request}


def make_entry(task: str, *actions: dict[str, Any], line: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "host": "localhost",
        "task": task,
        "path": f"play.yml:{line}",
        "gateway": GATEWAY,
        "actions": list(actions),
        "reads": {},
        "created": {},
        "costs": {},
        "unknown": [],
        "failure": None,
        **fields,
    }


def make_failure(message: str) -> dict[str, Any]:
    return {"kind": "in_use", "message": message, "blockers": [], "status": 409}


def make_plan(*entries: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "format": 3,
        "created_at": make_time(-1),
        "expires_at": make_time(23),
        "problems": [],
        "playbooks": ["play.yml"],
        "gateways": {GATEWAY: URL},
        "entries": list(entries),
        **fields,
    }


def make_example() -> dict[str, Any]:
    """Return a plan with changes of all signs, costs, uncertainties and a predicted failure."""
    web = {"state": "running", "cpus": 1, "metadata": {}}
    return make_plan(
        make_entry(
            "Take a snapshot",
            make_action("capture", make_change("before", None, {"sandbox": "web"}, "snapshot")),
            line=5,
            reads={"/snapshots/before": "", "/sandboxes/web": "0123456789ab g7 f0"},
            created={"before": "known-after-apply-0001"},
            costs={"disk_bytes": 12 << 20, "pause_ms": 5.5},
            unknown=["the cost of the first capture"],
        ),
        make_entry(
            "Fork it",
            make_action("fork", make_change("try-1", None, web), make_change("try-2", None, web), count=2),
            line=10,
            reads={"/snapshots/before": "known-after-apply-0001 g1 f0"},
            created={"try-1": "known-after-apply-0002", "try-2": "known-after-apply-0003"},
            costs={"memory_mb": 512},
        ),
        make_entry("Change it", make_action("update", make_change("try-1", web, {**web, "cpus": 2})), line=15),
        make_entry("Roll back", make_action("rollback", make_change("web", web, web)), line=20, costs={"pause_ms": 2}),
        make_entry("Remove it", make_action("remove", make_change("old", web, None)), line=25),
        make_entry("Remove the rest", line=30, failure=make_failure("snapshot 'base' is in use")),
    )


def compute_digest(plan: dict[str, Any]) -> str:
    text = json.dumps(plan, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def serialize_plan(plan: dict[str, Any]) -> bytes:
    document = {**plan, "digest": compute_digest(plan)}
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


PlanFileWriter = Callable[..., str]


@pytest.fixture
def write_plan_file(tmp_path: Path) -> PlanFileWriter:
    """A function that writes a plan, or any content, to a file and returns its path."""

    def write_file(content: dict[str, Any] | bytes, name: str = "plan.json") -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else serialize_plan(content))
        return str(path)

    return write_file


# --- show ------------------------------------------------------------------------------------------------------------


def test_a_plan_is_shown_by_kind_with_totals_and_uncertainties(run: Run, write_plan_file: PlanFileWriter) -> None:
    plan = make_example()
    outcome = check_success(run("plan", "show", write_plan_file(plan), url=UNREACHABLE_URL))
    lines = [line.rstrip() for line in outcome.out.splitlines()]
    assert [re.sub("  +", "|", line) for line in lines] == [
        f"Gateway {URL}:",
        "KIND|CHANGE|NAME|VERB|TASK|HOST",
        "sandbox|+|try-1|fork|Fork it (play.yml:10)|localhost",
        "sandbox|+|try-2|fork|Fork it (play.yml:10)|localhost",
        "sandbox|~|try-1|update|Change it (play.yml:15)|localhost",
        "sandbox|↺|web|rollback|Roll back (play.yml:20)|localhost",
        "sandbox|-|old|remove|Remove it (play.yml:25)|localhost",
        "snapshot|+|before|capture|Take a snapshot (play.yml:5)|localhost",
        "",
        "Plan: 3 to create, 1 to change, 1 to remove, 1 to roll back; 512 MiB of memory, about 12.0 MiB of disk, "
        "2 pauses, in total about 7.5 ms.",
        "",
        "Unknown until the run:",
        "|the cost of the first capture: Take a snapshot (play.yml:5)",
        "",
        "Predicted failures:",
        "|Remove the rest (play.yml:30) on localhost: snapshot 'base' is in use",
        "",
        f"The plan {compute_digest(plan)[:12]} of play.yml, made at {plan['created_at']}, can be applied until "
        f"{plan['expires_at']} (in 22 h).",
    ]


def test_changes_are_grouped_by_gateway(run: Run, write_plan_file: PlanFileWriter) -> None:
    entries = [
        make_entry("A", make_action("create", make_change("a", None, {}))),
        make_entry("B", make_action("create", make_change("b", None, {})), gateway=OTHER_GATEWAY),
        make_entry("C", make_action("grow", make_change("c", {}, {}, "volume"))),
    ]
    gateways = {GATEWAY: URL, OTHER_GATEWAY: "https://other.example"}
    out = check_success(run("plan", "show", write_plan_file(make_plan(*entries, gateways=gateways)))).out
    first_part, second_part = out.split("Gateway https://other.example:")
    assert re.findall(r"^(\w+) +[+~] +(\w)", first_part, re.MULTILINE) == [("sandbox", "a"), ("volume", "c")]
    assert re.findall(r"^(\w+) +[+~] +(\w)", second_part, re.MULTILINE) == [("sandbox", "b")]


def test_freed_resources_are_shown_as_freed(run: Run, write_plan_file: PlanFileWriter) -> None:
    action = make_action("remove", make_change("a", {}, None))
    plan = make_plan(make_entry("A", action, costs={"memory_mb": -256, "disk_bytes": -2048}))
    out = check_success(run("plan", "show", write_plan_file(plan))).out
    assert "Plan: 1 to remove; 256 MiB of memory freed, about 2.0 KiB of disk freed.\n" in out


def test_a_plan_without_changes_is_shown(run: Run, write_plan_file: PlanFileWriter) -> None:
    out = check_success(run("plan", "show", write_plan_file(make_plan(make_entry("Nothing to do"))))).out
    assert out.startswith("The plan contains no changes.\n") and "can be applied until" in out
    plan = make_plan(make_entry("Nothing to do"), problems=["the changes of task 'Hide it' are unknown"])
    out = check_success(run("plan", "show", write_plan_file(plan))).out
    assert out.startswith("The plan contains no changes.\n")


def test_an_expired_plan_is_shown_as_expired(run: Run, write_plan_file: PlanFileWriter) -> None:
    plan = {**make_example(), "created_at": make_time(-5), "expires_at": make_time(-3)}
    out = check_success(run("plan", "show", write_plan_file(plan))).out
    assert f"it expired at {plan['expires_at']} (3 h ago)" in out and "try-1" in out
    assert "cannot be applied:" in out and "can be applied until" not in out


def test_a_plan_with_problems_cannot_be_applied(run: Run, write_plan_file: PlanFileWriter) -> None:
    out = check_success(
        run("plan", "show", write_plan_file({**make_example(), "problems": ["web1 was unreachable"]}))
    ).out
    assert "cannot be applied:\n  web1 was unreachable\n" in out and "expired" not in out


@pytest.mark.parametrize(
    ("changes", "is_expired", "is_applicable"),
    [
        ({}, False, True),
        ({"problems": ["web1 was unreachable"]}, False, False),
        ({"created_at": "2020-01-01T00:00:00Z", "expires_at": "2020-01-02T00:00:00Z"}, True, False),
    ],
)
def test_a_plan_is_printed_as_json(
    run: Run, write_plan_file: PlanFileWriter, changes: dict[str, Any], is_expired: bool, is_applicable: bool
) -> None:
    plan = {**make_example(), **changes}
    for args in (("plan", "show", write_plan_file(plan), "--json"), ("--json", "plan", "show", write_plan_file(plan))):
        result = check_success(run(*args)).json
        totals = {"create": 3, "change": 1, "remove": 1, "roll_back": 1}
        costs = {"disk_bytes": 12 << 20, "memory_mb": 512, "pause_ms": 7.5}
        additions = {"expired": is_expired, "applicable": is_applicable, "totals": {**totals, "costs": costs}}
        assert result == {**plan, "digest": compute_digest(plan), **additions}


def test_text_from_the_file_cannot_affect_the_terminal(run: Run, write_plan_file: PlanFileWriter) -> None:
    plan = make_plan(
        make_entry(
            f"Task{ESCAPES}\nThe plan can be applied",
            make_action("fork", make_change(f"web{ESCAPES}\n", None, {"a": ESCAPES})),
            host=f"host{ESCAPES}\ud800",
            path=f"play.yml{ESCAPES}:1",
            reads={f"/sandboxes/a{ESCAPES}": ESCAPES},
            unknown=[f"the size{ESCAPES}\n"],
            failure=make_failure(f"no{ESCAPES}\nspace"),
        ),
        gateways={GATEWAY: f"{URL}{ESCAPES}"},
        playbooks=[f"play.yml{ESCAPES}"],
        problems=[f"it failed{ESCAPES}\nfor all"],
    )
    other_plan = copy.deepcopy(plan)
    other_plan["entries"][0]["reads"] = {f"/sandboxes/a{ESCAPES}": f"other{ESCAPES}"}
    other_plan["entries"][0]["actions"][0]["changes"][0]["after"] = {f"key{ESCAPES}": 1}
    other_plan["entries"][0]["costs"] = {"pause_ms": 1}
    paths = write_plan_file(plan), write_plan_file(other_plan, "other.json")
    for outcome in (run("plan", "show", paths[0]), run("plan", "compare", *paths)):
        assert outcome.err == "" and "Task" in outcome.out
        assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", outcome.out) == []
        assert not any(
            line.startswith(("The plan can be applied", "space", "for all")) for line in outcome.out.split("\n")
        )
    for args in (("show", paths[0]), ("compare", *paths)):
        outcome = run("plan", *args, "--json")
        assert outcome.json and re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", outcome.out) == []


# --- compare ---------------------------------------------------------------------------------------------------------


def compare_plans(run: Run, write_plan_file: PlanFileWriter, old_plan: dict[str, Any], new_plan: dict[str, Any]) -> Any:
    """Return the comparison as JSON, after checking that the exit code and the text agree with it."""
    paths = write_plan_file(old_plan, "old.json"), write_plan_file(new_plan, "new.json")
    outcome = run("--json", "plan", "compare", *paths, url=UNREACHABLE_URL)
    comparison = outcome.json
    text_outcome = run("plan", "compare", *paths)
    assert outcome.code == text_outcome.code == (0 if comparison["equal"] else 1), outcome.err
    assert text_outcome.out.endswith("The plans are equal.\n" if comparison["equal"] else "The plans differ.\n")
    return comparison


def list_changes(comparison: Any) -> list[tuple[str, str, str]]:
    return [
        (change["plan"], change["change"] + change["name"], " ".join(change["different"]))
        for change in comparison["changes"]
    ]


def list_tasks(comparison: Any) -> list[tuple[str, str, str]]:
    return [(task["plan"], task["task"], " ".join(task["different"])) for task in comparison["tasks"]]


def test_plans_that_differ_only_in_times_are_equal(run: Run, write_plan_file: PlanFileWriter) -> None:
    new_plan = {**make_example(), "created_at": make_time(-3), "expires_at": make_time(-2)}
    empty_comparison = {"equal": True, "changes": [], "versions": [], "tasks": [], "different": []}
    assert compare_plans(run, write_plan_file, make_example(), new_plan) == empty_comparison


def test_changes_in_only_one_plan_are_found(run: Run, write_plan_file: PlanFileWriter) -> None:
    old_plan, new_plan = make_example(), make_example()
    new_plan["entries"][1]["actions"][0]["changes"][1]["name"] = "try-9"
    comparison = compare_plans(run, write_plan_file, old_plan, new_plan)
    assert list_changes(comparison) == [("old", "+try-2", ""), ("new", "+try-9", "")]
    assert comparison["changes"][0] == {
        "plan": "old",
        "different": [],
        "gateway": GATEWAY,
        "kind": "sandbox",
        "change": "+",
        "name": "try-2",
        "verb": "fork",
        "task": "Fork it",
        "path": "play.yml:10",
        "host": "localhost",
    }
    assert list_tasks(comparison) == [("both", "Fork it", "actions")]


def test_the_keys_of_a_different_change_are_named(run: Run, write_plan_file: PlanFileWriter) -> None:
    old_plan, new_plan = make_example(), make_example()
    new_plan["entries"][1]["actions"][0]["changes"][0]["after"] = {"state": "running", "cpus": 2, "network": None}
    comparison = compare_plans(run, write_plan_file, old_plan, new_plan)
    assert list_changes(comparison) == [("both", "+try-1", "after.cpus after.metadata after.network")]
    text = run("plan", "compare", write_plan_file(old_plan, "old.json"), write_plan_file(new_plan, "new.json")).out
    (row,) = (line for line in text.splitlines() if line.startswith("both"))
    cells = ["both", "after.cpus, after.metadata, after.network", "sandbox", "+", "try-1", "fork"]
    assert re.split("  +", row.rstrip()) == [*cells, "Fork it (play.yml:10)", "localhost", URL]


def test_true_and_1_are_different_values(run: Run, write_plan_file: PlanFileWriter) -> None:
    old_plan, new_plan = (
        make_plan(make_entry("A", make_action("create", make_change("a", None, {"x": x})))) for x in (1, True)
    )
    assert list_changes(compare_plans(run, write_plan_file, old_plan, new_plan)) == [("both", "+a", "after.x")]


def test_a_change_that_creates_instead_of_updating_is_different(run: Run, write_plan_file: PlanFileWriter) -> None:
    old_plan = make_plan(make_entry("A", make_action("build", make_change("a", {}, {}))))
    new_plan = make_plan(make_entry("A", make_action("build", make_change("a", None, {}))))
    assert list_changes(compare_plans(run, write_plan_file, old_plan, new_plan)) == [("both", "+a", "before")]


def test_an_additional_change_does_not_make_the_later_ones_different(run: Run, write_plan_file: PlanFileWriter) -> None:
    old_plan, new_plan = make_example(), make_example()
    change = make_change("first", None, {})
    entry = make_entry("First", make_action("create", change), created={"first": "known-after-apply-0001"})
    for number, later_entry in enumerate(new_plan["entries"]):
        text = json.dumps(later_entry)
        new_plan["entries"][number] = json.loads(
            re.sub(r"apply-(\d+)", lambda match: f"apply-{int(match[1]) + 1:04}", text)
        )
    new_plan["entries"].insert(0, entry)
    comparison = compare_plans(run, write_plan_file, old_plan, new_plan)
    assert list_changes(comparison) == [("new", "+first", "")] and list_tasks(comparison) == [("new", "First", "")]
    assert comparison["versions"] == [] and comparison["different"] == []


def test_objects_with_a_different_version_are_found(run: Run, write_plan_file: PlanFileWriter) -> None:
    old_plan, new_plan = make_example(), make_example()
    new_plan["entries"][0]["reads"] = {
        "/snapshots/before": "abcdefabcdef g1 f2",
        "/sandboxes/web": "0123456789ab g8 f0",
    }
    comparison = compare_plans(run, write_plan_file, old_plan, new_plan)
    assert comparison["versions"] == [
        {"gateway": GATEWAY, "object": "/sandboxes/web", "old": "0123456789ab g7 f0", "new": "0123456789ab g8 f0"},
        {"gateway": GATEWAY, "object": "/snapshots/before", "old": "", "new": "abcdefabcdef g1 f2"},
    ]
    assert comparison["changes"] == comparison["tasks"] == comparison["different"] == []
    text = run("plan", "compare", write_plan_file(old_plan, "old.json"), write_plan_file(new_plan, "new.json")).out
    assert re.search(rf"^/snapshots/before +does not exist +abcdefabcdef g1 f2 +{URL}", text, re.MULTILINE)


def test_the_order_of_different_hosts_is_ignored(run: Run, write_plan_file: PlanFileWriter) -> None:
    def make_host_entries(host: str, first_id: int) -> Iterator[dict[str, Any]]:
        planned_id = f"known-after-apply-{first_id:04x}"
        for task in ("Create", "Change"):
            action = make_action(task.lower(), make_change("a", None, {"id": planned_id}), id=planned_id)
            reads = {f"/sandboxes/{planned_id}": f"{planned_id} g1 f0"}
            created = {"a": planned_id} if task == "Create" else {}
            yield make_entry(task, action, host=host, reads=reads, created=created)

    old_plan = make_plan(*make_host_entries("one", 9), *make_host_entries("two", 10))
    new_plan = make_plan(*make_host_entries("two", 9), *make_host_entries("one", 10))
    assert compare_plans(run, write_plan_file, old_plan, new_plan)["equal"]


def test_the_order_of_a_hosts_tasks_is_compared(run: Run, write_plan_file: PlanFileWriter) -> None:
    old_plan, new_plan = make_example(), make_example()
    new_plan["entries"].reverse()
    assert compare_plans(run, write_plan_file, old_plan, new_plan)["different"] == ["order of the tasks"]


@pytest.mark.parametrize(
    ("name", "value", "property_name"),
    [
        ("path", "play.yml:99", "path"),
        ("costs", {"memory_mb": 513}, "costs"),
        ("unknown", ["the size"], "unknown"),
        ("failure", make_failure("no space"), "failure"),
        ("reads", {}, "reads"),
        ("created", {"try-1": "known-after-apply-0002"}, "created"),
        ("host", "web1", ""),
        ("task", "Fork them", ""),
    ],
)
def test_a_different_task_is_found(
    run: Run, write_plan_file: PlanFileWriter, name: str, value: Any, property_name: str
) -> None:
    old_plan, new_plan = make_example(), make_example()
    new_plan["entries"][1][name] = value
    comparison = compare_plans(run, write_plan_file, old_plan, new_plan)
    if property_name:
        assert list_tasks(comparison) == [("both", "Fork it", property_name)]
    else:
        assert [task["plan"] for task in comparison["tasks"]] == ["old", "new"]
    assert comparison["changes"] == comparison["versions"] == comparison["different"] == []


def test_a_different_request_is_found(run: Run, write_plan_file: PlanFileWriter) -> None:
    old_plan, new_plan = make_example(), make_example()
    new_plan["entries"][1]["actions"][0]["request"] = {"count": 3}
    assert list_tasks(compare_plans(run, write_plan_file, old_plan, new_plan)) == [("both", "Fork it", "requests")]


def test_hashes_of_secrets_are_not_compared(run: Run, write_plan_file: PlanFileWriter) -> None:
    """Each plan has its own salts."""
    old_plan, new_plan = make_example(), make_example()
    for plan, salt in ((old_plan, "aa"), (new_plan, "bb")):
        plan["entries"][1]["actions"][0]["request"] = {"env": f"pbkdf2-sha256:{salt}:{salt}"}
    assert list_tasks(compare_plans(run, write_plan_file, old_plan, new_plan)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("problems", ["it failed"]), ("playbooks", []), ("gateways", {GATEWAY: "https://other.example"})],
)
def test_a_different_property_of_the_plan_is_found(
    run: Run, write_plan_file: PlanFileWriter, name: str, value: Any
) -> None:
    comparison = compare_plans(run, write_plan_file, make_example(), {**make_example(), name: value})
    assert comparison["different"] == [name] and comparison["changes"] == comparison["tasks"] == []


# --- invalid files ---------------------------------------------------------------------------------------------------


def check_refusal(outcome: Outcome, words: str, code: int = 2) -> None:
    assert outcome.code == code and outcome.out == "", outcome.out
    message, hint = outcome.err.splitlines()
    assert message.startswith("sandboxctl: ") and words in message and hint.startswith("  ")


@pytest.mark.parametrize(
    ("name", "words"),
    [("two\nlines", "no key two lines"), ("\ud800", "is invalid: "), ("x" * 1000, "no key xxx")],
)
def test_an_unknown_key_is_shown_in_one_short_line(
    run: Run, write_plan_file: PlanFileWriter, name: str, words: str
) -> None:
    outcome = run("plan", "show", write_plan_file({**make_example(), name: 1}))
    check_refusal(outcome, words)
    assert len(outcome.err.splitlines()[0]) < 1000


def test_a_file_that_cannot_be_read_is_refused(run: Run, write_plan_file: PlanFileWriter, tmp_path: Path) -> None:
    check_refusal(run("plan", "show", str(tmp_path / "none.json")), "none.json' does not exist", code=3)
    check_refusal(run("plan", "show", str(tmp_path)), "cannot be read: Is a directory")
    plan = write_plan_file(make_example())
    check_refusal(run("plan", "compare", plan, str(tmp_path / "none.json")), "none.json' does not exist", code=3)
    check_refusal(run("plan", "compare", str(tmp_path), plan), "cannot be read: Is a directory")


EXAMPLE = serialize_plan(make_example())
positions = st.integers(0, len(EXAMPLE) - 1)


@settings(deadline=None)
@given(content=positions.map(lambda length: EXAMPLE[:length]) | st.binary(max_size=50))
def test_a_truncated_or_random_file_is_refused(content: bytes) -> None:
    check_refusal(run_on_content(content), "")


@settings(deadline=None)
@given(position=positions, mask=st.integers(1, 255))
def test_a_file_with_a_flipped_byte_is_refused(position: int, mask: int) -> None:
    content = bytearray(EXAMPLE)
    content[position] ^= mask
    check_refusal(run_on_content(bytes(content)), "")


def run_on_content(content: bytes) -> Outcome:
    """Run `sandboxctl plan show` on a file with this content, without fixtures, which Hypothesis would share."""
    out, err = io.StringIO(), io.StringIO()
    with (
        tempfile.NamedTemporaryFile() as file,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["sandboxctl", "plan", "show", file.name]),
        pytest.raises(SystemExit) as error_info,
    ):
        file.write(content)
        file.flush()
        sandboxctl.main()
    return Outcome(int(error_info.value.code or 0), out.getvalue(), err.getvalue())
