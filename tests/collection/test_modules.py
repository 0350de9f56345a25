"""Every module and state: check mode predicts the run, and a second run changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.collection.conftest import each_way
from tests.collection.runner import Target, Task, check_prediction


def sandbox_task(target: Target, name: str, **options: Any) -> Task:
    return {"grove.sandbox.sandbox": {"name": target.name(name), **options}}


def fork_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_fork": options}


def snapshot_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_snapshot": options}


def rollback_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_rollback": options}


def write(target: Target, name: str, what: str = "something") -> None:
    """Change the file system of a sandbox."""
    script = f"echo {what} >/root/written; sync"
    target.client.post(f"/sandboxes/{target.name(name)}/exec", {"args": ["/bin/sh", "-c", script]})


@each_way
def test_the_life_cycle_of_a_sandbox(target: Target, way: dict[str, Any]) -> None:
    made, changed, limited, paused, resumed, gone = target.verify(
        sandbox_task(
            target, "box", template=target.template, metadata={"team": "blue", "size": 3}, env={"GREETING": "hi"}
        ),
        sandbox_task(
            target, "box", metadata={"team": "red"}, network={"allow_internet": False, "allow_out": ["10.0.0.1"]}
        ),
        sandbox_task(target, "box", timeout=3600),
        sandbox_task(target, "box", state="paused"),
        sandbox_task(target, "box", state="running", timeout=-1),
        sandbox_task(target, "box", state="absent"),
        keywords=way,
    )
    assert made["sandbox"]["metadata"] == {"team": "blue", "size": "3"}
    assert changed["sandbox"]["id"] == made["sandbox"]["id"]
    assert changed["sandbox"]["network"]["allow_internet"] is False
    assert limited["sandbox"]["end_at"]
    assert paused["sandbox"]["state"] == "paused"
    assert resumed["sandbox"]["state"] == "running"
    assert resumed["sandbox"]["end_at"] is None
    assert gone["sandbox"] is None
    assert gone["diff"]["after"] == {}


def test_many_sandboxes_in_one_task(target: Target) -> None:
    names = [target.name(name) for name in ("a", "b", "c", "d", "e")]
    made, paused, gone = target.verify(
        {"grove.sandbox.sandbox": {"name": names, "template": target.template, "state": "paused"}},
        {"grove.sandbox.sandbox": {"name": names[:2], "state": "running"}},
        {"grove.sandbox.sandbox": {"name": names, "state": "absent"}},
    )
    assert [box["name"] for box in made["sandboxes"]] == names
    assert [outcome["actions"] for outcome in paused["outcomes"]] == [["resume"], ["resume"]]
    assert gone["sandboxes"] == []


def test_a_sandbox_is_replaced_only_on_request(target: Target) -> None:
    sizes = target.client.get(f"/templates/{target.template}")["memoryMB"]
    first, second, refused = target.play(
        sandbox_task(target, "box", template=target.template, metadata={"keep": "me"}),
        sandbox_task(target, "box", template=target.template, metadata={"keep": "me"}),
        sandbox_task(target, "box", template=target.template, memory_mb=sizes * 2),
    )
    assert first["changed"] and not second["changed"]
    assert refused["failed"] and refused["failure"]["kind"] == "conflict"
    assert f"has memory_mb {sizes}, not {sizes * 2}" in refused["msg"] and "recreate" in refused["msg"]
    (replaced,) = target.verify(
        sandbox_task(target, "box", template=target.template, memory_mb=sizes * 2, cold_start=True, recreate=True)
    )
    assert replaced["sandbox"]["id"] != first["sandbox"]["id"]
    assert replaced["sandbox"]["memory_mb"] == sizes * 2
    assert len(list(target.client.pages("/sandboxes", name=target.name("box")))) == 1


@each_way
def test_forks_and_clones_are_added_and_removed(target: Target, way: dict[str, Any]) -> None:
    golden, prefix = target.name("golden"), target.name("ci")
    target.verify(sandbox_task(target, "box", template=target.template), keywords=way)
    taken, three, more, fewer, marked, limited, endless, rest = target.verify(
        snapshot_task(name=golden, sandbox=target.name("box"), description="a fork point"),
        fork_task(snapshot=golden, count=3, name_prefix=prefix),
        fork_task(snapshot=golden, count=5, name_prefix=prefix, exact=True, concurrency=2),
        fork_task(snapshot=golden, count=2, name_prefix=prefix, exact=True),
        fork_task(snapshot=golden, count=2, name_prefix=prefix, metadata={"run": "7"}, paused=True),
        fork_task(snapshot=golden, count=3, name_prefix=prefix, paused=True, timeout=3600),
        fork_task(snapshot=golden, count=3, name_prefix=prefix, paused=True, timeout=-1),
        fork_task(snapshot=golden, name_prefix=prefix, state="absent"),
        keywords=way,
    )
    assert taken["snapshot"]["source_sandbox_id"]
    assert [box["name"] for box in three["sandboxes"]] == [f"{prefix}-{number}" for number in (1, 2, 3)]
    assert {box["forked_from"] for box in three["sandboxes"]} == {taken["snapshot"]["id"]}
    assert [outcome["name"] for outcome in more["outcomes"] if outcome["changed"]] == [f"{prefix}-4", f"{prefix}-5"]
    assert [outcome["name"] for outcome in fewer["outcomes"] if outcome["actions"] == ["remove"]] == [
        f"{prefix}-{number}" for number in (3, 4, 5)
    ]
    assert all(box["state"] == "paused" for box in marked["sandboxes"])
    names = [f"{prefix}-{number}" for number in (1, 2, 3)]
    verbs = {outcome["name"]: outcome["actions"] for outcome in limited["outcomes"]}
    assert verbs == dict(zip(names, [["set_timeout"], ["set_timeout"], ["fork"]], strict=True))
    assert {view["timeout"] for view in limited["diff"]["after"].values()} == {3600}
    assert {view["timeout"] for view in endless["diff"]["after"].values()} == {-1}
    assert rest["sandboxes"] == [] and len(rest["outcomes"]) == 3


def test_clones_of_a_sandbox_differ_from_forks_of_its_snapshots(target: Target) -> None:
    golden, prefix, box = target.name("golden"), target.name("copy"), target.name("box")
    *_, cloned, fewer = target.verify(
        sandbox_task(target, "box", template=target.template),
        snapshot_task(name=golden, sandbox=box),
        fork_task(snapshot=golden, names=[f"{prefix}-9"]),
        fork_task(sandbox=box, count=2, name_prefix=prefix),
        fork_task(sandbox=box, count=1, name_prefix=prefix, exact=True),
    )
    assert len({each["forked_from"] for each in cloned["sandboxes"]}) == 1
    assert [outcome["name"] for outcome in fewer["outcomes"] if outcome["changed"]] == [f"{prefix}-2"]
    (foreign,) = target.play(fork_task(sandbox=box, names=[f"{prefix}-9"]))
    assert foreign["failed"] and f"{prefix}-9" in foreign["msg"] and foreign["failure"]["kind"] == "conflict"


@each_way
def test_rollback_with_a_backup_and_when_clean(target: Target, way: dict[str, Any]) -> None:
    box, before, backup = target.name("box"), target.name("before"), target.name("backup")
    target.verify(
        sandbox_task(target, "box", template=target.template), snapshot_task(name=before, sandbox=box), keywords=way
    )
    (clean,) = target.play(rollback_task(sandbox=box, snapshot=before), keywords=way)
    assert not clean["changed"], clean
    write(target, "box")
    (back,) = target.verify(rollback_task(sandbox=box, snapshot=before, backup_name=backup), keywords=way)
    assert back["diff"]["before"][box]["diverged"] is True
    assert back["diff"]["after"][box]["diverged"] is False
    assert back["backups"][0]["name"] == backup
    assert back["backups"][0]["description"] == f"before the rollback to {before}"
    said, done, again = target.play(
        {**rollback_task(sandbox=box, snapshot=before, unless_clean=False), "check_mode": True},
        rollback_task(sandbox=box, snapshot=before, unless_clean=False),
        rollback_task(sandbox=box, snapshot=before, unless_clean=False),
        options=("--diff",),
        keywords=way,
    )
    check_prediction(said, done)
    assert done["changed"] and again["changed"]


def test_a_snapshot_is_taken_when_something_changed(target: Target) -> None:
    box, first, second, third = (target.name(name) for name in ("box", "first", "second", "third"))
    target.verify(
        sandbox_task(target, "box", template=target.template), snapshot_task(name=first, sandbox=box, when_changed=True)
    )
    (nothing,) = target.play(snapshot_task(name=second, sandbox=box, when_changed=True))
    assert not nothing["changed"] and nothing["snapshot"]["name"] == first
    write(target, "box")
    (taken,) = target.verify(snapshot_task(name=third, sandbox=box, when_changed=True))
    assert taken["snapshot"]["name"] == third


def test_a_snapshot_in_use_is_refused_or_hidden(target: Target) -> None:
    box, golden, twin = target.name("box"), target.name("golden"), target.name("twin")
    target.verify(
        sandbox_task(target, "box", template=target.template),
        snapshot_task(name=golden, sandbox=box),
        fork_task(snapshot=golden, names=[twin]),
    )
    said, refused = target.play(
        {**snapshot_task(name=golden, state="absent"), "check_mode": True}, snapshot_task(name=golden, state="absent")
    )
    assert said["failed"] and said["msg"] == refused["msg"]
    assert refused["failure"]["kind"] == "in_use" and refused["failure"]["blockers"] == [twin]
    target.verify(
        snapshot_task(name=golden, state="absent", when_unused=True), sandbox_task(target, "twin", state="absent")
    )


def test_check_mode_changes_nothing(in_memory: Target, faulty: Any) -> None:
    in_memory.play(
        {"grove.sandbox.sandbox_template": {"name": "other", "packages": ["curl"]}},
        sandbox_task(in_memory, "box", template="base"),
        fork_task(snapshot="base", count=3, name_prefix="ci"),
        options=("--check",),
    )
    assert {method for method, _ in faulty.calls} == {"GET"}


def test_the_life_cycle_of_a_template(in_memory: Target, way: dict[str, Any]) -> None:
    def template(**options: Any) -> Task:
        return {"grove.sandbox.sandbox_template": {"name": "web", **options}}

    built, rebuilt, gone = in_memory.verify(
        template(packages=["curl", "nginx", "curl"], start_command="nginx", memory_mb=512),
        template(packages=["nginx", "curl"], setup=["echo hello"], memory_mb=512),
        template(state="absent"),
        keywords=way,
    )
    assert built["template"]["recipe"]["packages"] == ["curl", "nginx"]
    assert built["template"]["memory_mb"] == 512
    assert rebuilt["template"]["id"] != built["template"]["id"]
    assert rebuilt["template"]["recipe"]["start_command"] == ""
    assert gone["template"] is None


@pytest.mark.parametrize("target", ["real"], indirect=True)
def test_a_template_is_built_on_a_real_host(target: Target) -> None:
    def template(**options: Any) -> Task:
        return {"grove.sandbox.sandbox_template": {"name": target.name("built"), **options}}

    built, _made, hidden = target.verify(
        template(setup=["echo one >/etc/marker"]),
        {"grove.sandbox.sandbox": {"name": target.name("box"), "template": target.name("built")}},
        template(state="absent", when_unused=True),
    )
    assert built["template"]["status"] == "ready"
    assert hidden["templates"] == []
