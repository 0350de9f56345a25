"""Test that check mode predicts changes to volumes, second runs change nothing, and errors name blocking resources."""

from __future__ import annotations

from typing import Any

from tests.collection.conftest import each_execution
from tests.collection.runner import Result, Target, Task, check_prediction
from tests.support.faulty_gateway import FaultyGateway


def make_volume_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_volume": options}


def make_sandbox_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox": options}


def make_fork_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_fork": options}


def make_snapshot_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_snapshot": options}


def make_mount(path: str, name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "path": path, **options}


def list_actions(result: Result) -> list[list[str]]:
    return [outcome["actions"] for outcome in result["outcomes"]]


def check_failure(result: Result, kind: str, *texts: str) -> None:
    assert result["failed"], result
    assert result["failure"]["kind"] == kind, result
    for text in texts:
        assert text in result["msg"]


@each_execution
def test_check_mode_predicts_the_life_cycle_of_a_volume(target: Target, keywords: dict[str, Any]) -> None:
    data, copy = target.make_name("data"), target.make_name("copy")
    created, grown, captured, copied, pruned, removed = target.verify(
        make_volume_task(name=data, size_mb=64),
        make_volume_task(name=data, size_mb=128),
        make_volume_task(name=data, snapshots=["monday", "tuesday"]),
        make_volume_task(name=copy, from_snapshot=f"{data}@monday", size_mb=256),
        make_volume_task(name=data, snapshots=["monday"], purge=True),
        make_volume_task(name=[copy, data], state="absent", purge=True),
        keywords=keywords,
    )
    assert created["volume"]["size_mb"] == 64 and created["volume"]["attachments"] == []
    assert grown["volume"]["size_mb"] == 128
    assert captured["volume"]["snapshots"] == ["monday", "tuesday"]
    assert copied["volume"]["from_snapshot"] and copied["volume"]["size_mb"] == 256
    assert pruned["volume"]["snapshots"] == ["monday"]
    assert removed["volumes"] == [] and removed["diff"]["after"] == {}


def test_attachments_match_the_list_exactly(target: Target) -> None:
    data, boxes = target.make_name("data"), [target.make_name(name) for name in ("writer", "reader", "other")]
    writer, reader, other = boxes
    target.verify(make_sandbox_task(name=boxes, template=target.template), make_volume_task(name=data, size_mb=64))
    attached, moved, reduced, removed = target.verify(
        make_volume_task(
            name=data,
            attachments=[
                {"sandbox": writer, "path": "/srv/data"},
                {"sandbox": reader, "path": "/srv/data/", "read_only": True},
            ],
        ),
        make_volume_task(
            name=data,
            attachments=[
                {"sandbox": writer, "path": "/srv/data"},
                {"sandbox": reader, "path": "/srv/elsewhere", "read_only": True},
                {"sandbox": other, "path": "/srv/data", "read_only": True},
            ],
        ),
        make_volume_task(name=data, attachments=[{"sandbox": writer, "path": "/srv/data"}]),
        make_volume_task(name=data, state="absent", attachments=[]),
    )
    assert [(each["sandbox"], each["path"], each["read_only"]) for each in attached["volume"]["attachments"]] == [
        (reader, "/srv/data", True),
        (writer, "/srv/data", False),
    ]
    assert list_actions(moved) == [["detach", "attach", "attach"]]
    assert [each["sandbox"] for each in reduced["volume"]["attachments"]] == [writer]
    assert list_actions(removed) == [["detach", "remove"]]


def test_mounts_of_a_running_sandbox_are_changed(target: Target) -> None:
    box, data, cache = (target.make_name(name) for name in ("box", "data", "cache"))
    created, mounted, remounted, paused, resumed = target.verify(
        make_volume_task(name=[data, cache], size_mb=64),
        make_sandbox_task(name=box, template=target.template, volumes=[make_mount("/srv/data", data)]),
        make_sandbox_task(
            name=box, volumes=[make_mount("/srv/data", data, read_only=True), make_mount("/srv/cache", cache)]
        ),
        make_sandbox_task(name=box, state="paused", volumes=[make_mount("/srv/cache", cache)]),
        make_sandbox_task(name=box, state="running", volumes=[]),
    )
    assert [each["name"] for each in created["volumes"]] == [data, cache]
    assert mounted["sandbox"]["volumes"] == [make_mount("/srv/data", data, read_only=False)]
    assert list_actions(remounted) == [["detach", "attach", "attach"]]
    assert remounted["sandbox"]["id"] == mounted["sandbox"]["id"]
    assert remounted["sandbox"]["volumes"] == [
        make_mount("/srv/cache", cache, read_only=False),
        make_mount("/srv/data", data, read_only=True),
    ]
    assert paused["sandbox"]["state"] == "paused" and list_actions(paused) == [["detach", "pause"]]
    assert resumed["sandbox"]["volumes"] == []


def test_forks_inherit_share_or_clone_volumes(target: Target) -> None:
    box, data, golden, prefix = (target.make_name(name) for name in ("box", "data", "golden", "ci"))
    target.verify(
        make_volume_task(name=data, size_mb=64),
        make_sandbox_task(name=box, template=target.template, volumes=[make_mount("/srv/data", data)]),
    )
    captured, inherited, reader, without_volumes, cloned, detached = target.verify(
        make_snapshot_task(
            name=golden, sandbox=box, volumes=[data], expires_in=86400, retention={"keep_last": 3, "max_age": 86400}
        ),
        make_fork_task(snapshot=golden, names=[f"{prefix}-same"]),
        make_fork_task(
            snapshot=golden, names=[f"{prefix}-reader"], volumes=[make_mount("/srv/ro", data, read_only=True)]
        ),
        make_fork_task(snapshot=golden, names=[f"{prefix}-none"], volumes=[]),
        make_fork_task(
            snapshot=golden, count=2, name_prefix=prefix, volumes=[make_mount("/srv/data", data, clone=True)]
        ),
        make_fork_task(snapshot=golden, count=2, name_prefix=prefix, volumes=[]),
    )
    assert captured["snapshot"]["volumes"] == [data] and captured["snapshot"]["expires_at"]
    assert captured["snapshot"]["mounts"] == [make_mount("/srv/data", data, read_only=False)]
    assert inherited["sandbox"]["volumes"] == [make_mount("/srv/data", data, read_only=False)]
    assert reader["sandbox"]["volumes"] == [make_mount("/srv/ro", data, read_only=True)]
    assert without_volumes["sandbox"]["volumes"] == []
    clone_names = [each["volumes"][0]["name"] for each in cloned["sandboxes"]]
    assert len({data, *clone_names}) == 3
    assert list_actions(detached) == [["detach"], ["detach"]]
    (listed,) = target.play({"grove.sandbox.sandbox_volume_info": {}})
    assert data in [each["name"] for each in listed["volumes"]]
    assert not {each["name"] for each in listed["volumes"]}.intersection(clone_names)
    (refused,) = target.play(
        make_fork_task(snapshot=golden, count=2, name_prefix=prefix, volumes=[make_mount("/x/y", data, clone=True)])
    )
    check_failure(refused, "conflict", "no private clone of volume", "recreate: true")
    target.verify(
        make_fork_task(
            snapshot=golden, count=2, name_prefix=prefix, volumes=[make_mount("/x/y", data, clone=True)], recreate=True
        )
    )


def test_clones_of_a_running_sandbox_clone_its_volumes(target: Target) -> None:
    box, data, twin = (target.make_name(name) for name in ("box", "data", "twin"))
    *_, cloned = target.verify(
        make_volume_task(name=data, size_mb=64),
        make_sandbox_task(name=box, template=target.template, volumes=[make_mount("/srv/data", data)]),
        make_fork_task(sandbox=box, names=[twin], volumes=[make_mount("/srv/data", data, clone=True)]),
    )
    assert cloned["sandbox"]["volumes"][0]["name"] != data
    (private,) = target.play({"grove.sandbox.sandbox_volume_info": {"name": [cloned["sandbox"]["volumes"][0]["name"]]}})
    assert [each["owner_sandbox_id"] for each in private["volumes"]] == [cloned["sandbox"]["id"]]


def test_rollback_always_runs_but_is_refused_while_the_volume_has_writers(target: Target) -> None:
    box, data = target.make_name("box"), target.make_name("data")
    target.verify(
        make_volume_task(name=data, size_mb=64, snapshots=["clean"]),
        make_sandbox_task(name=box, template=target.template, volumes=[make_mount("/srv/data", data)]),
    )
    rollback_task = make_volume_task(name=data, rollback_to="clean")
    predicted, refused = target.play({**rollback_task, "check_mode": True}, rollback_task)
    check_failure(refused, "in_use", f"mounted read-write in {box}", "force: true")
    assert predicted["msg"] == refused["msg"]
    forced_rollback_task = make_volume_task(name=data, rollback_to="clean", force=True, snapshots=["before"])
    predicted, actual, repeated = target.play(
        {**forced_rollback_task, "check_mode": True}, forced_rollback_task, forced_rollback_task, options=("--diff",)
    )
    check_prediction(predicted, actual)
    assert list_actions(actual) == [["capture", "rollback"]] and list_actions(repeated) == [["rollback"]]
    (detached,) = target.play(make_volume_task(name=data, attachments=[], rollback_to="before"))
    assert list_actions(detached) == [["detach", "rollback"]], detached
    (unknown,) = target.play(make_volume_task(name=data, rollback_to="never"))
    check_failure(unknown, "not_found", "snapshot 'never'")


def test_removing_a_volume_in_use_lists_its_users(target: Target) -> None:
    box, data, golden = (target.make_name(name) for name in ("box", "data", "golden"))
    *_, captured = target.verify(
        make_volume_task(name=data, size_mb=64, snapshots=["monday"]),
        make_sandbox_task(name=box, template=target.template, volumes=[make_mount("/srv/data", data)]),
        make_snapshot_task(name=golden, sandbox=box, volumes=[data]),
    )
    removal_task = make_volume_task(name=data, state="absent")
    predicted, refused = target.play({**removal_task, "check_mode": True}, removal_task)
    check_failure(refused, "in_use", box, "monday", captured["snapshot"]["id"], "attachments: []", "purge: true")
    assert predicted["msg"] == refused["msg"]
    forced_removal_task = make_volume_task(name=data, state="absent", attachments=[], purge=True)
    (refused,) = target.play(forced_removal_task)
    check_failure(refused, "in_use", captured["snapshot"]["id"], "must be removed first")
    target.verify(make_snapshot_task(name=golden, state="absent"), forced_removal_task)


def test_invalid_volume_options_are_refused(target: Target) -> None:
    box, data = target.make_name("box"), target.make_name("data")
    target.verify(
        make_sandbox_task(name=box, template=target.template),
        make_volume_task(name=data, size_mb=128, snapshots=["one"]),
    )
    refused_tasks = (
        (make_volume_task(name=data, size_mb=64), "conflict", "cannot shrink"),
        (make_volume_task(name=data, size_mb=8), "invalid", "at least 64"),
        (make_volume_task(name=box), "name_taken", "taken by a sandbox"),
        (make_sandbox_task(name=data, template=target.template), "name_taken", "taken by a volume"),
        (make_volume_task(name=target.make_name("new"), from_snapshot=data), "invalid", "VOLUME@SNAPSHOT"),
        (make_volume_task(name=target.make_name("new"), from_snapshot=f"{data}@two"), "not_found", "'two'"),
        (
            make_volume_task(name=target.make_name("new"), from_snapshot=f"{data}@one", size_mb=64),
            "invalid",
            "less than the 128",
        ),
        (make_volume_task(name=data, from_snapshot=f"{data}@one"), "conflict", "was created empty"),
        (
            make_volume_task(name=data, attachments=[{"sandbox": "no-such", "path": "/srv/data"}]),
            "not_found",
            "'no-such'",
        ),
        (make_volume_task(name=data, attachments=[{"sandbox": box, "path": "/etc"}]), "invalid", "the system needs"),
        (make_volume_task(name=data, attachments=[{"sandbox": box, "path": "srv"}]), "invalid", "absolute path"),
        (
            make_volume_task(name=[data, "x"], attachments=[{"sandbox": box, "path": "/srv/a"}]),
            "invalid",
            "use one task for each volume",
        ),
        (
            make_volume_task(name=data, state="absent", attachments=[{"sandbox": box, "path": "/a"}]),
            "invalid",
            "cannot have attachments",
        ),
        (make_volume_task(name=data, snapshots=["two"], rollback_to="one", purge=True), "invalid", "purge"),
        (make_sandbox_task(name=box, volumes=[make_mount("/srv/data", "no-such")]), "not_found", "sandbox_volume"),
        (
            make_sandbox_task(name=box, volumes=[make_mount("/srv/a", data), make_mount("/srv/a/b", "x")]),
            "invalid",
            "choose separate paths",
        ),
        (
            make_sandbox_task(name=box, volumes=[make_mount("/srv/a", data), make_mount("/srv/b", data)]),
            "invalid",
            "listed twice",
        ),
        (make_snapshot_task(name=target.make_name("s"), sandbox=box, volumes=[data]), "invalid", "not mounted"),
        (
            make_fork_task(sandbox=box, names=["x"], volumes=[make_mount("/srv/a", data, clone=True)]),
            "invalid",
            "not mounted",
        ),
    )
    results = target.play(
        *({**task, "check_mode": check_mode} for task, _, _ in refused_tasks for check_mode in (True, False))
    )
    for (_, kind, texts), predicted, actual in zip(refused_tasks, results[::2], results[1::2], strict=True):
        check_failure(actual, kind, texts)
        assert predicted["msg"] == actual["msg"] and not actual["changed"]


def test_volumes_are_attached_only_to_running_sandboxes(target: Target) -> None:
    box, data = target.make_name("box"), target.make_name("data")
    target.verify(
        make_sandbox_task(name=box, template=target.template, state="paused"), make_volume_task(name=data, size_mb=64)
    )
    for task in (
        make_volume_task(name=data, attachments=[{"sandbox": box, "path": "/srv/data"}]),
        make_sandbox_task(name=box, volumes=[make_mount("/srv/data", data)]),
    ):
        (refused,) = target.play(task)
        check_failure(refused, "conflict", "is paused", "state: running")
    (resumed,) = target.verify(make_sandbox_task(name=box, state="running", volumes=[make_mount("/srv/data", data)]))
    assert list_actions(resumed) == [["resume", "attach"]]


def test_continue_on_error_changes_the_other_volumes(target: Target) -> None:
    names = [target.make_name(name) for name in ("a", "b", "c")]
    target.verify(make_volume_task(name=names[1], size_mb=128))
    stopped, continued = target.play(
        make_volume_task(name=names, size_mb=64), make_volume_task(name=names, size_mb=64, continue_on_error=True)
    )
    check_failure(stopped, "conflict", "cannot shrink")
    assert not stopped["changed"] and [each["name"] for each in stopped["volumes"]] == [names[1]]
    check_failure(continued, "conflict", "cannot shrink")
    assert [each["name"] for each in continued["volumes"]] == names
    assert [outcome["failed"] for outcome in continued["outcomes"]] == [False, True, False]


def test_a_fork_with_a_missing_inherited_volume_fails(memory_target: Target, faulty_gateway: FaultyGateway) -> None:
    memory_target.play(
        make_volume_task(name="data"),
        make_sandbox_task(name="box", template="base", volumes=[make_mount("/srv/data", "data")]),
        make_snapshot_task(name="golden", sandbox="box"),
        make_volume_task(name="data", state="absent", attachments=[]),
    )
    assert not faulty_gateway.list_objects("volumes")
    (refused,) = memory_target.play(make_fork_task(snapshot="golden", names=["x"]))
    check_failure(refused, "conflict", "no longer exist", "[] for none")
    assert refused["failure"]["status"] is None
    (created,) = memory_target.verify(make_fork_task(snapshot="golden", names=["x"], volumes=[]))
    assert created["sandbox"]["volumes"] == []


def test_volume_tokens_are_not_shown(memory_target: Target, faulty_gateway: FaultyGateway) -> None:
    results = memory_target.play(
        make_volume_task(name="data", snapshots=["one"]),
        {"grove.sandbox.sandbox_volume_info": {}},
        options=("-vvv", "--diff"),
    )
    assert all(not result.get("failed") for result in results)
    token = faulty_gateway.request("GET", "/volumes/data")["token"]
    assert len(token) > 8 and token not in memory_target.output + str(results)
