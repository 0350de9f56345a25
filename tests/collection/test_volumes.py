"""Volumes: check mode predicts the run, a second run changes nothing, and errors name the obstacle."""

from __future__ import annotations

from typing import Any

from tests.collection.conftest import each_way
from tests.collection.runner import Result, Target, Task, check_prediction
from tests.support.faulty_gateway import FaultyGateway


def volume_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_volume": options}


def sandbox_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox": options}


def fork_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_fork": options}


def snapshot_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_snapshot": options}


def mount_at(path: str, name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "path": path, **more}


def planned_actions(result: Result) -> list[list[str]]:
    return [outcome["actions"] for outcome in result["outcomes"]]


def check_failed(result: Result, kind: str, *words: str) -> None:
    assert result["failed"], result
    assert result["failure"]["kind"] == kind, result
    for word in words:
        assert word in result["msg"]


@each_way
def test_the_life_cycle_of_a_volume(target: Target, way: dict[str, Any]) -> None:
    data, copy = target.name("data"), target.name("copy")
    made, grown, captured, copied, fewer, gone = target.verify(
        volume_task(name=data, size_mb=64),
        volume_task(name=data, size_mb=128),
        volume_task(name=data, snapshots=["monday", "tuesday"]),
        volume_task(name=copy, from_snapshot=f"{data}@monday", size_mb=256),
        volume_task(name=data, snapshots=["monday"], purge=True),
        volume_task(name=[copy, data], state="absent", purge=True),
        keywords=way,
    )
    assert made["volume"]["size_mb"] == 64 and made["volume"]["attachments"] == []
    assert grown["volume"]["size_mb"] == 128
    assert captured["volume"]["snapshots"] == ["monday", "tuesday"]
    assert copied["volume"]["from_snapshot"] and copied["volume"]["size_mb"] == 256
    assert fewer["volume"]["snapshots"] == ["monday"]
    assert gone["volumes"] == [] and gone["diff"]["after"] == {}


def test_attachments_match_the_list_exactly(target: Target) -> None:
    data, boxes = target.name("data"), [target.name(name) for name in ("writer", "reader", "other")]
    writer, reader, other = boxes
    target.verify(sandbox_task(name=boxes, template=target.template), volume_task(name=data, size_mb=64))
    both, moved, one, gone = target.verify(
        volume_task(
            name=data,
            attachments=[
                {"sandbox": writer, "path": "/srv/data"},
                {"sandbox": reader, "path": "/srv/data/", "read_only": True},
            ],
        ),
        volume_task(
            name=data,
            attachments=[
                {"sandbox": writer, "path": "/srv/data"},
                {"sandbox": reader, "path": "/srv/elsewhere", "read_only": True},
                {"sandbox": other, "path": "/srv/data", "read_only": True},
            ],
        ),
        volume_task(name=data, attachments=[{"sandbox": writer, "path": "/srv/data"}]),
        volume_task(name=data, state="absent", attachments=[]),
    )
    assert [(each["sandbox"], each["path"], each["read_only"]) for each in both["volume"]["attachments"]] == [
        (reader, "/srv/data", True),
        (writer, "/srv/data", False),
    ]
    assert planned_actions(moved) == [["detach", "attach", "attach"]]
    assert [each["sandbox"] for each in one["volume"]["attachments"]] == [writer]
    assert planned_actions(gone) == [["detach", "remove"]]


def test_volumes_of_a_running_sandbox_change(target: Target) -> None:
    box, data, cache = (target.name(name) for name in ("box", "data", "cache"))
    made, more, other, paused, woken = target.verify(
        volume_task(name=[data, cache], size_mb=64),
        sandbox_task(name=box, template=target.template, volumes=[mount_at("/srv/data", data)]),
        sandbox_task(name=box, volumes=[mount_at("/srv/data", data, read_only=True), mount_at("/srv/cache", cache)]),
        sandbox_task(name=box, state="paused", volumes=[mount_at("/srv/cache", cache)]),
        sandbox_task(name=box, state="running", volumes=[]),
    )
    assert [each["name"] for each in made["volumes"]] == [data, cache]
    assert more["sandbox"]["volumes"] == [mount_at("/srv/data", data, read_only=False)]
    assert planned_actions(other) == [["detach", "attach", "attach"]]
    assert other["sandbox"]["id"] == more["sandbox"]["id"]
    assert other["sandbox"]["volumes"] == [
        mount_at("/srv/cache", cache, read_only=False),
        mount_at("/srv/data", data, read_only=True),
    ]
    assert paused["sandbox"]["state"] == "paused" and planned_actions(paused) == [["detach", "pause"]]
    assert woken["sandbox"]["volumes"] == []


def test_forks_inherit_share_or_clone_volumes(target: Target) -> None:
    box, data, golden, prefix = (target.name(name) for name in ("box", "data", "golden", "ci"))
    target.verify(
        volume_task(name=data, size_mb=64),
        sandbox_task(name=box, template=target.template, volumes=[mount_at("/srv/data", data)]),
    )
    taken, same, reading, nothing, own, rid = target.verify(
        snapshot_task(
            name=golden, sandbox=box, volumes=[data], expires_in=86400, retention={"keep_last": 3, "max_age": 86400}
        ),
        fork_task(snapshot=golden, names=[f"{prefix}-same"]),
        fork_task(snapshot=golden, names=[f"{prefix}-reader"], volumes=[mount_at("/srv/ro", data, read_only=True)]),
        fork_task(snapshot=golden, names=[f"{prefix}-none"], volumes=[]),
        fork_task(snapshot=golden, count=2, name_prefix=prefix, volumes=[mount_at("/srv/data", data, clone=True)]),
        fork_task(snapshot=golden, count=2, name_prefix=prefix, volumes=[]),
    )
    assert taken["snapshot"]["volumes"] == [data] and taken["snapshot"]["expires_at"]
    assert taken["snapshot"]["mounts"] == [mount_at("/srv/data", data, read_only=False)]
    assert same["sandbox"]["volumes"] == [mount_at("/srv/data", data, read_only=False)]
    assert reading["sandbox"]["volumes"] == [mount_at("/srv/ro", data, read_only=True)]
    assert nothing["sandbox"]["volumes"] == []
    clones = [each["volumes"][0]["name"] for each in own["sandboxes"]]
    assert len({data, *clones}) == 3
    assert planned_actions(rid) == [["detach"], ["detach"]]
    (left,) = target.play({"grove.sandbox.sandbox_volume_info": {}})
    assert data in [each["name"] for each in left["volumes"]]
    assert not {each["name"] for each in left["volumes"]}.intersection(clones)
    (refused,) = target.play(
        fork_task(snapshot=golden, count=2, name_prefix=prefix, volumes=[mount_at("/x/y", data, clone=True)])
    )
    check_failed(refused, "conflict", "no clone of its own", "recreate: true")
    target.verify(
        fork_task(
            snapshot=golden, count=2, name_prefix=prefix, volumes=[mount_at("/x/y", data, clone=True)], recreate=True
        )
    )


def test_clones_of_a_running_sandbox_clone_its_volumes(target: Target) -> None:
    box, data, twin = (target.name(name) for name in ("box", "data", "twin"))
    *_, cloned = target.verify(
        volume_task(name=data, size_mb=64),
        sandbox_task(name=box, template=target.template, volumes=[mount_at("/srv/data", data)]),
        fork_task(sandbox=box, names=[twin], volumes=[mount_at("/srv/data", data, clone=True)]),
    )
    assert cloned["sandbox"]["volumes"][0]["name"] != data
    (private,) = target.play({"grove.sandbox.sandbox_volume_info": {"name": [cloned["sandbox"]["volumes"][0]["name"]]}})
    assert [each["owner_sandbox_id"] for each in private["volumes"]] == [cloned["sandbox"]["id"]]


def test_a_rollback_runs_every_time_but_never_under_a_writer(target: Target) -> None:
    box, data = target.name("box"), target.name("data")
    target.verify(
        volume_task(name=data, size_mb=64, snapshots=["clean"]),
        sandbox_task(name=box, template=target.template, volumes=[mount_at("/srv/data", data)]),
    )
    back = volume_task(name=data, rollback_to="clean")
    said, refused = target.play({**back, "check_mode": True}, back)
    check_failed(refused, "in_use", f"mounted read-write in {box}", "force: true")
    assert said["msg"] == refused["msg"]
    forced = volume_task(name=data, rollback_to="clean", force=True, snapshots=["before"])
    said, done, again = target.play({**forced, "check_mode": True}, forced, forced, options=("--diff",))
    check_prediction(said, done)
    assert planned_actions(done) == [["capture", "rollback"]] and planned_actions(again) == [["rollback"]]
    (freed,) = target.play(volume_task(name=data, attachments=[], rollback_to="before"))
    assert planned_actions(freed) == [["detach", "rollback"]], freed
    (unknown,) = target.play(volume_task(name=data, rollback_to="never"))
    check_failed(unknown, "not_found", "snapshot 'never'")


def test_users_of_a_volume_are_named(target: Target) -> None:
    box, data, golden = (target.name(name) for name in ("box", "data", "golden"))
    *_, taken = target.verify(
        volume_task(name=data, size_mb=64, snapshots=["monday"]),
        sandbox_task(name=box, template=target.template, volumes=[mount_at("/srv/data", data)]),
        snapshot_task(name=golden, sandbox=box, volumes=[data]),
    )
    gone = volume_task(name=data, state="absent")
    said, refused = target.play({**gone, "check_mode": True}, gone)
    check_failed(refused, "in_use", box, "monday", taken["snapshot"]["id"], "attachments: []", "purge: true")
    assert said["msg"] == refused["msg"]
    detached = volume_task(name=data, state="absent", attachments=[], purge=True)
    (held,) = target.play(detached)
    check_failed(held, "in_use", taken["snapshot"]["id"], "must go first")
    target.verify(snapshot_task(name=golden, state="absent"), detached)


def test_invalid_volume_options(target: Target) -> None:
    box, data = target.name("box"), target.name("data")
    target.verify(
        sandbox_task(name=box, template=target.template), volume_task(name=data, size_mb=128, snapshots=["one"])
    )
    expected = (
        (volume_task(name=data, size_mb=64), "conflict", "cannot shrink"),
        (volume_task(name=data, size_mb=8), "invalid", "at least 64"),
        (volume_task(name=box), "name_taken", "taken by a sandbox"),
        (sandbox_task(name=data, template=target.template), "name_taken", "taken by a volume"),
        (volume_task(name=target.name("new"), from_snapshot=data), "invalid", "VOLUME@SNAPSHOT"),
        (volume_task(name=target.name("new"), from_snapshot=f"{data}@two"), "not_found", "'two'"),
        (volume_task(name=target.name("new"), from_snapshot=f"{data}@one", size_mb=64), "invalid", "less than the 128"),
        (volume_task(name=data, from_snapshot=f"{data}@one"), "conflict", "was made empty"),
        (volume_task(name=data, attachments=[{"sandbox": "no-such", "path": "/srv/data"}]), "not_found", "'no-such'"),
        (volume_task(name=data, attachments=[{"sandbox": box, "path": "/etc"}]), "invalid", "the system needs"),
        (volume_task(name=data, attachments=[{"sandbox": box, "path": "srv"}]), "invalid", "absolute path"),
        (
            volume_task(name=[data, "x"], attachments=[{"sandbox": box, "path": "/srv/a"}]),
            "invalid",
            "one volume for each",
        ),
        (
            volume_task(name=data, state="absent", attachments=[{"sandbox": box, "path": "/a"}]),
            "invalid",
            "no attachments",
        ),
        (volume_task(name=data, snapshots=["two"], rollback_to="one", purge=True), "invalid", "purge"),
        (sandbox_task(name=box, volumes=[mount_at("/srv/data", "no-such")]), "not_found", "sandbox_volume"),
        (
            sandbox_task(name=box, volumes=[mount_at("/srv/a", data), mount_at("/srv/a/b", "x")]),
            "invalid",
            "choose paths apart",
        ),
        (
            sandbox_task(name=box, volumes=[mount_at("/srv/a", data), mount_at("/srv/b", data)]),
            "invalid",
            "listed twice",
        ),
        (snapshot_task(name=target.name("s"), sandbox=box, volumes=[data]), "invalid", "not mounted"),
        (fork_task(sandbox=box, names=["x"], volumes=[mount_at("/srv/a", data, clone=True)]), "invalid", "not mounted"),
    )
    results = target.play(*({**task, "check_mode": way} for task, _, _ in expected for way in (True, False)))
    for (_, kind, words), said, done in zip(expected, results[::2], results[1::2], strict=True):
        check_failed(done, kind, words)
        assert said["msg"] == done["msg"] and not done["changed"]


def test_volumes_are_attached_to_running_sandboxes_only(target: Target) -> None:
    box, data = target.name("box"), target.name("data")
    target.verify(sandbox_task(name=box, template=target.template, state="paused"), volume_task(name=data, size_mb=64))
    for task in (
        volume_task(name=data, attachments=[{"sandbox": box, "path": "/srv/data"}]),
        sandbox_task(name=box, volumes=[mount_at("/srv/data", data)]),
    ):
        (refused,) = target.play(task)
        check_failed(refused, "conflict", "is paused", "state: running")
    (woken,) = target.verify(sandbox_task(name=box, state="running", volumes=[mount_at("/srv/data", data)]))
    assert planned_actions(woken) == [["resume", "attach"]]


def test_continue_on_error_handles_the_other_volumes(target: Target) -> None:
    names = [target.name(name) for name in ("a", "b", "c")]
    target.verify(volume_task(name=names[1], size_mb=128))
    stopped, went_on = target.play(
        volume_task(name=names, size_mb=64), volume_task(name=names, size_mb=64, continue_on_error=True)
    )
    check_failed(stopped, "conflict", "cannot shrink")
    assert not stopped["changed"] and [each["name"] for each in stopped["volumes"]] == [names[1]]
    check_failed(went_on, "conflict", "cannot shrink")
    assert [each["name"] for each in went_on["volumes"]] == names
    assert [outcome["failed"] for outcome in went_on["outcomes"]] == [False, True, False]


def test_a_fork_whose_inherited_volume_is_gone_fails(in_memory: Target, faulty: FaultyGateway) -> None:
    in_memory.play(
        volume_task(name="data"),
        sandbox_task(name="box", template="base", volumes=[mount_at("/srv/data", "data")]),
        snapshot_task(name="golden", sandbox="box"),
        volume_task(name="data", state="absent", attachments=[]),
    )
    assert not faulty.list_objects("volumes")
    (refused,) = in_memory.play(fork_task(snapshot="golden", names=["x"]))
    check_failed(refused, "conflict", "no longer exist", "[] for none")
    assert refused["failure"]["status"] is None
    (made,) = in_memory.verify(fork_task(snapshot="golden", names=["x"], volumes=[]))
    assert made["sandbox"]["volumes"] == []


def test_volume_tokens_are_not_shown(in_memory: Target, faulty: FaultyGateway) -> None:
    results = in_memory.play(
        volume_task(name="data", snapshots=["one"]),
        {"grove.sandbox.sandbox_volume_info": {}},
        options=("-vvv", "--diff"),
    )
    assert all(not result.get("failed") for result in results)
    token = faulty.request("GET", "/volumes/data")["token"]
    assert len(token) > 8 and token not in in_memory.output + str(results)
