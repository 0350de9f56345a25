"""Test that failures have a message and a kind, and have no side effects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.collection.runner import Target, Task
from tests.support.faulty_gateway import TEMPLATE, FaultyGateway

SECRET_KEY = "a-key-that-must-stay-secret"


def make_fork_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_fork": {"snapshot": TEMPLATE, **options}}


def make_sandbox_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox": options}


def check_failure(result: dict[str, Any], kind: str, *texts: str) -> None:
    assert result["failed"], result
    assert result["failure"]["kind"] == kind, result
    assert result["failure"]["message"] == result["msg"]
    for text in texts:
        assert text in result["msg"]


def test_unusable_gateways_are_reported(tmp_path: Path, faulty_gateway: FaultyGateway, keywords: Any) -> None:
    target = Target(f"unix://{tmp_path}/gateway.sock", tmp_path)
    missing_socket, closed_port, wrong_scheme = target.play(
        make_sandbox_task(name="box", template="base"),
        make_sandbox_task(name="box", template="base", gateway_url="http://127.0.0.1:9"),
        make_sandbox_task(name="box", template="base", gateway_url="ftp://127.0.0.1"),
        keywords=keywords,
    )
    check_failure(missing_socket, "unreachable", "gateway.sock", "check that sandbox-gateway is running")
    check_failure(closed_port, "unreachable", "http://127.0.0.1:9", "nothing listens")
    check_failure(wrong_scheme, "invalid", "gateway_url", "unix:///path/to/gateway.sock")
    faulty_gateway.token = SECRET_KEY
    refused_creation, refused_listing = Target(faulty_gateway.url, tmp_path, token="an-unknown-key").play(
        make_sandbox_task(name="box", template="base"), {"grove.sandbox.sandbox_info": {}}, keywords=keywords
    )
    for result in (refused_creation, refused_listing):
        check_failure(result, "unauthorized", faulty_gateway.url, "gateway_token")
        assert result["failure"]["status"] == 401
    faulty_gateway.token, faulty_gateway.version = "", "0.0.9"
    predicted, actual = Target(faulty_gateway.url, tmp_path).play(
        {**make_sandbox_task(name="box", template="base"), "check_mode": True},
        make_sandbox_task(name="box", template="base"),
        keywords=keywords,
    )
    check_failure(predicted, "too_old", "0.0.9", "0.1.0 or newer")
    check_failure(actual, "too_old", "0.0.9", "0.1.0 or newer", "the grove.sandbox.gateway role")
    assert not actual["changed"] and not faulty_gateway.list_objects("sandboxes")


def test_modules_use_a_unix_socket(tmp_path: Path, faulty_gateway: FaultyGateway, keywords: Any) -> None:
    socket_path = tmp_path / "gateway.sock"
    with faulty_gateway.listening_on_unix_socket(socket_path) as url:
        (created,) = Target(url, tmp_path).verify(make_sandbox_task(name="box", template="base"), keywords=keywords)
    assert created["sandbox"]["name"] == "box"


def test_invalid_options_are_refused(memory_target: Target, faulty_gateway: FaultyGateway, keywords: Any) -> None:
    (
        negative_count,
        long_name,
        repeated_name,
        negative_size,
        zero_timeout,
        two_sources,
        missing_source,
        unknown_option,
        wrong_type,
    ) = memory_target.play(
        make_fork_task(count=-1, name_prefix="ci"),
        make_sandbox_task(name="n" * 10_000, template=TEMPLATE),
        make_sandbox_task(name=["a", "a"], template=TEMPLATE),
        make_sandbox_task(name="box", template=TEMPLATE, memory_mb=-5),
        make_sandbox_task(name="box", template=TEMPLATE, timeout=0),
        make_sandbox_task(name="box", template=TEMPLATE, snapshot=TEMPLATE),
        make_sandbox_task(name="box"),
        make_sandbox_task(name="box", template=TEMPLATE, colour="red"),
        make_sandbox_task(name="box", template=TEMPLATE, cpus="many"),
        keywords=keywords,
    )
    check_failure(negative_count, "invalid", "count must be at least 0, not -1")
    check_failure(long_name, "invalid", "1 to 64 letters")
    assert len(long_name["msg"]) < 300
    check_failure(repeated_name, "invalid", "listed twice")
    check_failure(negative_size, "invalid", "memory_mb")
    check_failure(zero_timeout, "invalid", "timeout")
    check_failure(two_sources, "invalid", "mutually exclusive")
    check_failure(missing_source, "not_found", "'template' or 'snapshot'")
    check_failure(
        unknown_option, "invalid", "Unsupported parameters for (grove.sandbox.sandbox) module: colour", "cold_start"
    )
    check_failure(wrong_type, "invalid", "cpus", "many")
    assert not faulty_gateway.list_objects("sandboxes")


def test_unknown_sources_are_reported(memory_target: Target) -> None:
    template, snapshot, sandbox_result = memory_target.play(
        make_sandbox_task(name="box", template="none-such"),
        make_sandbox_task(name="box", snapshot="none-such"),
        {"grove.sandbox.sandbox_rollback": {"sandbox": "none-such", "snapshot": TEMPLATE}},
    )
    check_failure(template, "not_found", "template 'none-such' not found")
    check_failure(snapshot, "not_found", "snapshot 'none-such' not found")
    check_failure(sandbox_result, "not_found", "sandbox 'none-such' not found")


def test_names_of_other_kinds_of_resources_are_refused(memory_target: Target, faulty_gateway: FaultyGateway) -> None:
    predicted, actual, capture = memory_target.play(
        {**make_sandbox_task(name=TEMPLATE, template=TEMPLATE), "check_mode": True},
        make_sandbox_task(name=TEMPLATE, template=TEMPLATE),
        {"grove.sandbox.sandbox_template": {"name": "other"}},
    )
    check_failure(predicted, "name_taken", "taken by a template")
    assert predicted["msg"] == actual["msg"]
    assert capture["changed"]
    assert not faulty_gateway.list_objects("sandboxes")


def test_a_failed_fork_removes_all_forks_unless_atomic_is_false(
    memory_target: Target, faulty_gateway: FaultyGateway
) -> None:
    faulty_gateway.failing_names = {"ci-3"}
    atomic_result, partial_result = memory_target.play(
        make_fork_task(count=5, name_prefix="ci"),
        make_fork_task(count=5, name_prefix="ci", atomic=False),
    )
    check_failure(atomic_result, "backend_failed", "'ci-3' did not answer")
    assert not atomic_result["changed"] and atomic_result["sandboxes"] == []
    check_failure(partial_result, "backend_failed", "'ci-3' did not answer")
    assert partial_result["changed"] and [box["name"] for box in partial_result["sandboxes"]] == [
        "ci-1",
        "ci-2",
        "ci-4",
        "ci-5",
    ]
    assert [outcome["name"] for outcome in partial_result["outcomes"] if outcome["failed"]] == ["ci-3"]
    faulty_gateway.failing_names = set()
    (completed,) = memory_target.verify(make_fork_task(count=5, name_prefix="ci"))
    assert [outcome["name"] for outcome in completed["outcomes"] if outcome["changed"]] == ["ci-3"]


def test_one_refusal_stops_the_task_unless_continue_on_error_is_set(
    memory_target: Target, faulty_gateway: FaultyGateway
) -> None:
    memory_target.play(make_sandbox_task(name="b", template=TEMPLATE))
    options = {"name": ["a", "b", "c"], "template": TEMPLATE, "cpus": 4, "cold_start": True}
    stopped, continued = memory_target.play(
        make_sandbox_task(**options), make_sandbox_task(**options, continue_on_error=True)
    )
    check_failure(stopped, "conflict", "'b' has cpus 1, not 4")
    assert not stopped["changed"] and stopped["sandboxes"][0]["name"] == "b"
    check_failure(continued, "conflict", "'b' has cpus 1, not 4")
    assert continued["changed"] and [box["name"] for box in continued["sandboxes"]] == ["a", "b", "c"]
    assert [(each["name"], each["changed"], each["failed"]) for each in continued["outcomes"]] == [
        ("a", True, False),
        ("b", False, True),
        ("c", True, False),
    ]


def test_dead_forks_are_replaced_and_foreign_sandboxes_are_refused(
    memory_target: Target, faulty_gateway: FaultyGateway
) -> None:
    memory_target.verify(
        make_fork_task(count=2, name_prefix="ci"), {"grove.sandbox.sandbox_snapshot": {"name": "s", "sandbox": "ci-2"}}
    )
    (dead_id,) = (box["sandboxID"] for box in faulty_gateway.list_objects("sandboxes") if box["name"] == "ci-1")
    faulty_gateway.end_machine("ci-1")
    (replaced_task,) = memory_target.verify(make_fork_task(count=2, name_prefix="ci"))
    assert replaced_task["sandboxes"][0]["id"] != dead_id
    assert dead_id not in [box["sandboxID"] for box in faulty_gateway.list_objects("sandboxes")]
    task = {"grove.sandbox.sandbox_fork": {"snapshot": "s", "names": ["ci-1", "x"]}}
    (refused_result,) = memory_target.play(task)
    check_failure(refused_result, "conflict", "'ci-1' exists but is not a fork of snapshot 's'", "recreate: true")
    assert not refused_result["changed"]
    task["grove.sandbox.sandbox_fork"]["recreate"] = True
    (replaced,) = memory_target.verify(task)
    assert {box["forked_from"] for box in replaced["sandboxes"]} == {
        snapshot["snapshotID"] for snapshot in faulty_gateway.list_objects("snapshots") if "s" in snapshot["names"]
    }


def test_a_failed_replacement_keeps_the_old_sandbox(memory_target: Target, faulty_gateway: FaultyGateway) -> None:
    (old_result,) = memory_target.play(make_sandbox_task(name="box", template=TEMPLATE))
    faulty_gateway.failing_names = {"box"}
    (failed_result,) = memory_target.play(
        make_sandbox_task(name="box", template=TEMPLATE, memory_mb=512, cold_start=True, recreate=True)
    )
    check_failure(failed_result, "backend_failed", "did not answer")
    assert [(box["sandboxID"], box["name"]) for box in faulty_gateway.list_objects("sandboxes")] == [
        (old_result["sandbox"]["id"], "box")
    ]


def create_box(gateway: FaultyGateway, *, snapshot: bool = True) -> None:
    """Create a sandbox `box` and, optionally, a snapshot `s` of it."""
    gateway.request("POST", "/sandboxes", {"templateID": TEMPLATE, "name": "box"})
    if snapshot:
        gateway.request("POST", "/sandboxes/box/snapshots", {"name": "s"})


@pytest.mark.parametrize(
    "task",
    [
        {"grove.sandbox.sandbox_fork": {"snapshot": "s", "names": ["x"]}},
        {"grove.sandbox.sandbox_fork": {"snapshot": "s", "names": ["box"], "recreate": True}},
        {"grove.sandbox.sandbox": {"name": "x", "snapshot": "s"}},
        {"grove.sandbox.sandbox_rollback": {"sandbox": "box", "snapshot": "s", "unless_clean": False}},
        {"grove.sandbox.sandbox_rollback": {"sandbox": "box", "snapshot": "s", "backup_name": "kept"}},
    ],
    ids=["fork", "replace", "create", "roll back", "roll back with a backup"],
)
def test_a_snapshot_removed_after_planning_is_reported(
    memory_target: Target, faulty_gateway: FaultyGateway, task: Task, keywords: Any
) -> None:
    create_box(faulty_gateway)
    faulty_gateway.vanishing_ids = {snapshot["snapshotID"] for snapshot in faulty_gateway.list_objects("snapshots")}
    faulty_gateway.write_file("box")
    sandboxes_before = faulty_gateway.list_objects("sandboxes")
    (result,) = memory_target.play(task, keywords=keywords)
    sandboxes_after = faulty_gateway.list_objects("sandboxes")
    for each in (*sandboxes_before, *sandboxes_after):
        del each["generation"]  # a sandbox that could not be replaced was renamed, and got its name back
    check_failure(
        result, "not_found", "snapshot 's' existed when this task began", "create it again, or use another snapshot"
    )
    # When a snapshot is deleted, its parent becomes the head.
    (template,) = (each["templateID"] for each in faulty_gateway.list_objects("templates"))
    assert not result["changed"] and sandboxes_after == [{**each, "snapshotID": template} for each in sandboxes_before]
    assert faulty_gateway.list_names("snapshots") == [] and faulty_gateway.list_names("templates") == [TEMPLATE]


def test_a_sandbox_removed_after_planning_is_reported(memory_target: Target, faulty_gateway: FaultyGateway) -> None:
    create_box(faulty_gateway, snapshot=False)
    faulty_gateway.vanishing_ids = {box["sandboxID"] for box in faulty_gateway.list_objects("sandboxes")}
    (result,) = memory_target.play({"grove.sandbox.sandbox_snapshot": {"name": "s", "sandbox": "box"}})
    check_failure(result, "not_found", "sandbox 'box' existed when this task began")
    assert not result["changed"]
    assert faulty_gateway.list_names("snapshots") == [] and faulty_gateway.list_names("templates") == [TEMPLATE]


def test_the_backup_is_removed_after_a_failed_rollback(memory_target: Target, faulty_gateway: FaultyGateway) -> None:
    create_box(faulty_gateway)
    task = {"grove.sandbox.sandbox_rollback": {"sandbox": "box", "snapshot": "s", "backup_name": "b"}}
    faulty_gateway.write_file("box")
    faulty_gateway.failing_names = {"box"}
    (broken,) = memory_target.play(task)
    check_failure(broken, "backend_failed", "did not answer")
    assert not broken["changed"] and broken["backups"] == []
    faulty_gateway.failing_names = set()
    (retried_result,) = memory_target.verify(task)
    assert retried_result["backups"][0]["name"] == "b"


def test_a_failed_build_shows_the_end_of_its_log(memory_target: Target, faulty_gateway: FaultyGateway) -> None:
    task = {"grove.sandbox.sandbox_template": {"name": "broken", "setup": ["fail"]}}
    (broken,) = memory_target.play(task)
    check_failure(broken, "backend_failed", "the build of template 'broken' failed", "set-up command", "exit code 1")
    assert "making a file system" in broken["msg"] and "ran fail" in broken["msg"]
    faulty_gateway.holds_builds = True
    (slow,) = memory_target.play({"grove.sandbox.sandbox_template": {"name": "slow", "wait_timeout": 1}})
    check_failure(slow, "timeout", "still being built after 1 s")


def test_requests_to_a_busy_gateway_are_retried(memory_target: Target, faulty_gateway: FaultyGateway) -> None:
    faulty_gateway.requests_to_refuse = 2
    (created,) = memory_target.play(make_sandbox_task(name="box", template=TEMPLATE))
    assert created["changed"], created
    faulty_gateway.requests_to_refuse = 1000
    (busy,) = memory_target.play(make_sandbox_task(name="other", template=TEMPLATE, gateway_timeout=1))
    check_failure(busy, "busy")


def test_secrets_are_not_shown(tmp_path: Path, faulty_gateway: FaultyGateway, keywords: Any) -> None:
    secret = "hunter2-with-more-text"
    faulty_gateway.token = SECRET_KEY
    target = Target(faulty_gateway.url, tmp_path, token=SECRET_KEY)
    login = {"registry_username": "reader", "registry_password": secret}
    built, created, *refused_results = target.play(
        {"grove.sandbox.sandbox_template": {"name": "built", "image": "registry.test/app:1", **login}},
        make_sandbox_task(name="box", template=TEMPLATE, env={"PASSWORD": secret, "DEBUG": "1"}),
        make_sandbox_task(name="other", template="none-such", env={"PASSWORD": secret}),
        {"grove.sandbox.sandbox_template": {"name": "box", "image": "registry.test/app:1", **login}},
        options=("-vvv", "--diff"),
        keywords=keywords,
    )
    assert built["changed"] and created["changed"] and all(each["failed"] for each in refused_results)
    assert created["sandbox"]["cpus"] == 1
    all_output = target.output + str((built, created, *refused_results))
    assert SECRET_KEY not in all_output and secret not in all_output
    sandbox = faulty_gateway.request("GET", "/sandboxes/box")
    assert len(sandbox["envdAccessToken"]) > 8 and sandbox["envdAccessToken"] not in all_output
