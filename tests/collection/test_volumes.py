"""Volumes: check mode predicts the run, a second run changes nothing, and errors name the obstacle."""

from __future__ import annotations

from typing import Any

from tests.collection.conftest import each_way
from tests.collection.runner import Result, Target, Task, foretold
from tests.support.faulty_gateway import FaultyGateway


def volume(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_volume": options}


def sandbox(**options: Any) -> Task:
    return {"grove.sandbox.sandbox": options}


def fork(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_fork": options}


def snapshot(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_snapshot": options}


def at(path: str, name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "path": path, **more}


def actions(result: Result) -> list[list[str]]:
    return [outcome["actions"] for outcome in result["outcomes"]]


def failed(result: Result, kind: str, *words: str) -> None:
    assert result["failed"], result
    assert result["failure"]["kind"] == kind, result
    for word in words:
        assert word in result["msg"]


@each_way
def test_a_volume_is_made_grown_captured_copied_and_removed(target: Target, way: dict[str, Any]) -> None:
    data, copy = target.name("data"), target.name("copy")
    made, grown, captured, copied, fewer, gone = target.prove(
        volume(name=data, size_mb=64),
        volume(name=data, size_mb=128),
        volume(name=data, snapshots=["monday", "tuesday"]),
        volume(name=copy, from_snapshot=f"{data}@monday", size_mb=256),
        volume(name=data, snapshots=["monday"], purge=True),
        volume(name=[copy, data], state="absent", purge=True),
        keywords=way,
    )
    assert made["volume"]["size_mb"] == 64 and made["volume"]["attachments"] == []
    assert grown["volume"]["size_mb"] == 128
    assert captured["volume"]["snapshots"] == ["monday", "tuesday"]
    assert copied["volume"]["from_snapshot"] and copied["volume"]["size_mb"] == 256
    assert fewer["volume"]["snapshots"] == ["monday"]
    assert gone["volumes"] == [] and gone["diff"]["after"] == {}


def test_exactly_the_attachments_that_are_given(target: Target) -> None:
    data, boxes = target.name("data"), [target.name(name) for name in ("writer", "reader", "other")]
    writer, reader, other = boxes
    target.prove(sandbox(name=boxes, template=target.template), volume(name=data, size_mb=64))
    both, moved, one, gone = target.prove(
        volume(
            name=data,
            attachments=[
                {"sandbox": writer, "path": "/srv/data"},
                {"sandbox": reader, "path": "/srv/data/", "read_only": True},
            ],
        ),
        volume(
            name=data,
            attachments=[
                {"sandbox": writer, "path": "/srv/data"},
                {"sandbox": reader, "path": "/srv/elsewhere", "read_only": True},
                {"sandbox": other, "path": "/srv/data", "read_only": True},
            ],
        ),
        volume(name=data, attachments=[{"sandbox": writer, "path": "/srv/data"}]),
        volume(name=data, state="absent", attachments=[]),
    )
    assert [(each["sandbox"], each["path"], each["read_only"]) for each in both["volume"]["attachments"]] == [
        (reader, "/srv/data", True),
        (writer, "/srv/data", False),
    ]
    assert actions(moved) == [["detach", "attach", "attach"]]
    assert [each["sandbox"] for each in one["volume"]["attachments"]] == [writer]
    assert actions(gone) == [["detach", "remove"]]


def test_volumes_of_a_sandbox_change_while_it_runs(target: Target) -> None:
    box, data, cache = (target.name(name) for name in ("box", "data", "cache"))
    made, more, other, paused, woken = target.prove(
        volume(name=[data, cache], size_mb=64),
        sandbox(name=box, template=target.template, volumes=[at("/srv/data", data)]),
        sandbox(name=box, volumes=[at("/srv/data", data, read_only=True), at("/srv/cache", cache)]),
        sandbox(name=box, state="paused", volumes=[at("/srv/cache", cache)]),
        sandbox(name=box, state="running", volumes=[]),
    )
    assert [each["name"] for each in made["volumes"]] == [data, cache]
    assert more["sandbox"]["volumes"] == [at("/srv/data", data, read_only=False)]
    assert actions(other) == [["detach", "attach", "attach"]]
    assert other["sandbox"]["id"] == more["sandbox"]["id"]
    assert other["sandbox"]["volumes"] == [
        at("/srv/cache", cache, read_only=False),
        at("/srv/data", data, read_only=True),
    ]
    assert paused["sandbox"]["state"] == "paused" and actions(paused) == [["detach", "pause"]]
    assert woken["sandbox"]["volumes"] == []


def test_forks_inherit_volumes_share_them_or_have_clones(target: Target) -> None:
    box, data, golden, prefix = (target.name(name) for name in ("box", "data", "golden", "ci"))
    target.prove(
        volume(name=data, size_mb=64),
        sandbox(name=box, template=target.template, volumes=[at("/srv/data", data)]),
    )
    taken, same, reading, nothing, own, rid = target.prove(
        snapshot(
            name=golden, sandbox=box, volumes=[data], expires_in=86400, retention={"keep_last": 3, "max_age": 86400}
        ),
        fork(snapshot=golden, names=[f"{prefix}-same"]),
        fork(snapshot=golden, names=[f"{prefix}-reader"], volumes=[at("/srv/ro", data, read_only=True)]),
        fork(snapshot=golden, names=[f"{prefix}-none"], volumes=[]),
        fork(snapshot=golden, count=2, name_prefix=prefix, volumes=[at("/srv/data", data, clone=True)]),
        fork(snapshot=golden, count=2, name_prefix=prefix, volumes=[]),
    )
    assert taken["snapshot"]["volumes"] == [data] and taken["snapshot"]["expires_at"]
    assert taken["snapshot"]["mounts"] == [at("/srv/data", data, read_only=False)]
    assert same["sandbox"]["volumes"] == [at("/srv/data", data, read_only=False)]
    assert reading["sandbox"]["volumes"] == [at("/srv/ro", data, read_only=True)]
    assert nothing["sandbox"]["volumes"] == []
    clones = [each["volumes"][0]["name"] for each in own["sandboxes"]]
    assert len({data, *clones}) == 3
    assert actions(rid) == [["detach"], ["detach"]]
    (left,) = target.play({"grove.sandbox.sandbox_volume_info": {}})
    assert data in [each["name"] for each in left["volumes"]]
    assert not {each["name"] for each in left["volumes"]}.intersection(clones)
    (refused,) = target.play(fork(snapshot=golden, count=2, name_prefix=prefix, volumes=[at("/x/y", data, clone=True)]))
    failed(refused, "conflict", "no clone of its own", "recreate: true")
    target.prove(
        fork(snapshot=golden, count=2, name_prefix=prefix, volumes=[at("/x/y", data, clone=True)], recreate=True)
    )


def test_clones_of_a_running_sandbox_have_clones_of_its_volumes(target: Target) -> None:
    box, data, twin = (target.name(name) for name in ("box", "data", "twin"))
    *_, cloned = target.prove(
        volume(name=data, size_mb=64),
        sandbox(name=box, template=target.template, volumes=[at("/srv/data", data)]),
        fork(sandbox=box, names=[twin], volumes=[at("/srv/data", data, clone=True)]),
    )
    assert cloned["sandbox"]["volumes"][0]["name"] != data
    (private,) = target.play({"grove.sandbox.sandbox_volume_info": {"name": [cloned["sandbox"]["volumes"][0]["name"]]}})
    assert [each["owner_sandbox_id"] for each in private["volumes"]] == [cloned["sandbox"]["id"]]


def test_a_rollback_is_done_every_time_and_not_under_a_writer(target: Target) -> None:
    box, data = target.name("box"), target.name("data")
    target.prove(
        volume(name=data, size_mb=64, snapshots=["clean"]),
        sandbox(name=box, template=target.template, volumes=[at("/srv/data", data)]),
    )
    back = volume(name=data, rollback_to="clean")
    said, refused = target.play({**back, "check_mode": True}, back)
    failed(refused, "in_use", f"mounted read-write in {box}", "force: true")
    assert said["msg"] == refused["msg"]
    forced = volume(name=data, rollback_to="clean", force=True, snapshots=["before"])
    said, done, again = target.play({**forced, "check_mode": True}, forced, forced, options=("--diff",))
    foretold(said, done)
    assert actions(done) == [["capture", "rollback"]] and actions(again) == [["rollback"]]
    (freed,) = target.play(volume(name=data, attachments=[], rollback_to="before"))
    assert actions(freed) == [["detach", "rollback"]], freed
    (unknown,) = target.play(volume(name=data, rollback_to="never"))
    failed(unknown, "not_found", "snapshot 'never'")


def test_what_holds_a_volume_is_named(target: Target) -> None:
    box, data, golden = (target.name(name) for name in ("box", "data", "golden"))
    *_, taken = target.prove(
        volume(name=data, size_mb=64, snapshots=["monday"]),
        sandbox(name=box, template=target.template, volumes=[at("/srv/data", data)]),
        snapshot(name=golden, sandbox=box, volumes=[data]),
    )
    gone = volume(name=data, state="absent")
    said, refused = target.play({**gone, "check_mode": True}, gone)
    failed(refused, "in_use", box, "monday", taken["snapshot"]["id"], "attachments: []", "purge: true")
    assert said["msg"] == refused["msg"]
    detached = volume(name=data, state="absent", attachments=[], purge=True)
    (held,) = target.play(detached)
    failed(held, "in_use", taken["snapshot"]["id"], "must go first")
    target.prove(snapshot(name=golden, state="absent"), detached)


def test_what_is_asked_of_volumes_badly(target: Target) -> None:
    box, data = target.name("box"), target.name("data")
    target.prove(sandbox(name=box, template=target.template), volume(name=data, size_mb=128, snapshots=["one"]))
    expected = (
        (volume(name=data, size_mb=64), "conflict", "cannot shrink"),
        (volume(name=data, size_mb=8), "invalid", "at least 64"),
        (volume(name=box), "name_taken", "taken by a sandbox"),
        (sandbox(name=data, template=target.template), "name_taken", "taken by a volume"),
        (volume(name=target.name("new"), from_snapshot=data), "invalid", "VOLUME@SNAPSHOT"),
        (volume(name=target.name("new"), from_snapshot=f"{data}@two"), "not_found", "'two'"),
        (volume(name=target.name("new"), from_snapshot=f"{data}@one", size_mb=64), "invalid", "less than the 128"),
        (volume(name=data, from_snapshot=f"{data}@one"), "conflict", "was made empty"),
        (volume(name=data, attachments=[{"sandbox": "no-such", "path": "/srv/data"}]), "not_found", "'no-such'"),
        (volume(name=data, attachments=[{"sandbox": box, "path": "/etc"}]), "invalid", "the system needs"),
        (volume(name=data, attachments=[{"sandbox": box, "path": "srv"}]), "invalid", "absolute path"),
        (volume(name=[data, "x"], attachments=[{"sandbox": box, "path": "/srv/a"}]), "invalid", "one volume for each"),
        (volume(name=data, state="absent", attachments=[{"sandbox": box, "path": "/a"}]), "invalid", "no attachments"),
        (volume(name=data, snapshots=["two"], rollback_to="one", purge=True), "invalid", "purge"),
        (sandbox(name=box, volumes=[at("/srv/data", "no-such")]), "not_found", "sandbox_volume"),
        (sandbox(name=box, volumes=[at("/srv/a", data), at("/srv/a/b", "x")]), "invalid", "choose paths apart"),
        (sandbox(name=box, volumes=[at("/srv/a", data), at("/srv/b", data)]), "invalid", "given twice"),
        (snapshot(name=target.name("s"), sandbox=box, volumes=[data]), "invalid", "not mounted"),
        (fork(sandbox=box, names=["x"], volumes=[at("/srv/a", data, clone=True)]), "invalid", "not mounted"),
    )
    results = target.play(*({**task, "check_mode": way} for task, _, _ in expected for way in (True, False)))
    for (_, kind, words), said, done in zip(expected, results[::2], results[1::2], strict=True):
        failed(done, kind, words)
        assert said["msg"] == done["msg"] and not done["changed"]


def test_a_volume_is_attached_to_what_runs(target: Target) -> None:
    box, data = target.name("box"), target.name("data")
    target.prove(sandbox(name=box, template=target.template, state="paused"), volume(name=data, size_mb=64))
    for task in (
        volume(name=data, attachments=[{"sandbox": box, "path": "/srv/data"}]),
        sandbox(name=box, volumes=[at("/srv/data", data)]),
    ):
        (refused,) = target.play(task)
        failed(refused, "conflict", "is paused", "state: running")
    (woken,) = target.prove(sandbox(name=box, state="running", volumes=[at("/srv/data", data)]))
    assert actions(woken) == [["resume", "attach"]]


def test_one_refusal_leaves_the_others_with_continue_on_error(target: Target) -> None:
    names = [target.name(name) for name in ("a", "b", "c")]
    target.prove(volume(name=names[1], size_mb=128))
    stopped, went_on = target.play(
        volume(name=names, size_mb=64), volume(name=names, size_mb=64, continue_on_error=True)
    )
    failed(stopped, "conflict", "cannot shrink")
    assert not stopped["changed"] and [each["name"] for each in stopped["volumes"]] == [names[1]]
    failed(went_on, "conflict", "cannot shrink")
    assert [each["name"] for each in went_on["volumes"]] == names
    assert [outcome["failed"] for outcome in went_on["outcomes"]] == [False, True, False]


def test_a_fork_whose_inherited_volume_is_gone_says_so(in_memory: Target, faulty: FaultyGateway) -> None:
    in_memory.play(
        volume(name="data"),
        sandbox(name="box", template="base", volumes=[at("/srv/data", "data")]),
        snapshot(name="golden", sandbox="box"),
        volume(name="data", state="absent", attachments=[]),
    )
    assert not faulty.things("volumes")
    (refused,) = in_memory.play(fork(snapshot="golden", names=["x"]))
    failed(refused, "conflict", "there no more", "[] is nothing")
    assert refused["failure"]["status"] is None
    (made,) = in_memory.prove(fork(snapshot="golden", names=["x"], volumes=[]))
    assert made["sandbox"]["volumes"] == []


def test_the_token_of_a_volume_is_not_shown(in_memory: Target, faulty: FaultyGateway) -> None:
    results = in_memory.play(
        volume(name="data", snapshots=["one"]), {"grove.sandbox.sandbox_volume_info": {}}, options=("-vvv", "--diff")
    )
    assert all(not result.get("failed") for result in results)
    token = faulty.request("GET", "/volumes/data")["token"]
    assert len(token) > 8 and token not in in_memory.output + str(results)
