"""Test, for every module and state, that check mode predicts the run, and that a second run changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.collection.conftest import each_execution
from tests.collection.runner import Target, Task, check_prediction


def make_sandbox_task(target: Target, name: str, **options: Any) -> Task:
    return {"grove.sandbox.sandbox": {"name": target.make_name(name), **options}}


def make_fork_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_fork": options}


def make_snapshot_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_snapshot": options}


def make_rollback_task(**options: Any) -> Task:
    return {"grove.sandbox.sandbox_rollback": options}


def write_file(target: Target, name: str, text: str = "something") -> None:
    """Write a file in a sandbox."""
    script = f"echo {text} >/root/written; sync"
    target.client.post(f"/sandboxes/{target.make_name(name)}/exec", {"args": ["/bin/sh", "-c", script]})


@each_execution
def test_check_mode_predicts_the_life_cycle_of_a_sandbox(target: Target, keywords: dict[str, Any]) -> None:
    created, changed, limited, paused, resumed, removed = target.verify(
        make_sandbox_task(
            target, "box", template=target.template, metadata={"team": "blue", "size": 3}, env={"GREETING": "hi"}
        ),
        make_sandbox_task(
            target, "box", metadata={"team": "red"}, network={"allow_internet": False, "allow_out": ["10.0.0.1"]}
        ),
        make_sandbox_task(target, "box", timeout=3600),
        make_sandbox_task(target, "box", state="paused"),
        make_sandbox_task(target, "box", state="running", timeout=-1),
        make_sandbox_task(target, "box", state="absent"),
        keywords=keywords,
    )
    assert created["sandbox"]["metadata"] == {"team": "blue", "size": "3"}
    assert changed["sandbox"]["id"] == created["sandbox"]["id"]
    assert changed["sandbox"]["network"]["allow_internet"] is False
    assert limited["sandbox"]["end_at"]
    assert paused["sandbox"]["state"] == "paused"
    assert resumed["sandbox"]["state"] == "running"
    assert resumed["sandbox"]["end_at"] is None
    assert removed["sandbox"] is None
    assert removed["diff"]["after"] == {}


def test_one_task_manages_many_sandboxes(target: Target) -> None:
    names = [target.make_name(name) for name in ("a", "b", "c", "d", "e")]
    created, paused, removed = target.verify(
        {"grove.sandbox.sandbox": {"name": names, "template": target.template, "state": "paused"}},
        {"grove.sandbox.sandbox": {"name": names[:2], "state": "running"}},
        {"grove.sandbox.sandbox": {"name": names, "state": "absent"}},
    )
    assert [box["name"] for box in created["sandboxes"]] == names
    assert [outcome["actions"] for outcome in paused["outcomes"]] == [["resume"], ["resume"]]
    assert removed["sandboxes"] == []


def test_a_sandbox_is_replaced_only_on_request(target: Target) -> None:
    memory_mb = target.client.get(f"/templates/{target.template}")["memoryMB"]
    created, repeated, refused = target.play(
        make_sandbox_task(target, "box", template=target.template, metadata={"keep": "me"}),
        make_sandbox_task(target, "box", template=target.template, metadata={"keep": "me"}),
        make_sandbox_task(target, "box", template=target.template, memory_mb=memory_mb * 2),
    )
    assert created["changed"] and not repeated["changed"]
    assert refused["failed"] and refused["failure"]["kind"] == "conflict"
    assert f"has memory_mb {memory_mb}, not {memory_mb * 2}" in refused["msg"] and "recreate" in refused["msg"]
    (replaced,) = target.verify(
        make_sandbox_task(
            target, "box", template=target.template, memory_mb=memory_mb * 2, cold_start=True, recreate=True
        )
    )
    assert replaced["sandbox"]["id"] != created["sandbox"]["id"]
    assert replaced["sandbox"]["memory_mb"] == memory_mb * 2
    assert len(list(target.client.list_all("/sandboxes", name=target.make_name("box")))) == 1


@each_execution
def test_forks_and_clones_are_added_and_removed(target: Target, keywords: dict[str, Any]) -> None:
    golden, prefix = target.make_name("golden"), target.make_name("ci")
    target.verify(make_sandbox_task(target, "box", template=target.template), keywords=keywords)
    captured, three_forks, five_forks, two_forks, paused_forks, limited, unlimited, all_removed = target.verify(
        make_snapshot_task(name=golden, sandbox=target.make_name("box"), description="a fork point"),
        make_fork_task(snapshot=golden, count=3, name_prefix=prefix),
        make_fork_task(snapshot=golden, count=5, name_prefix=prefix, exact=True, concurrency=2),
        make_fork_task(snapshot=golden, count=2, name_prefix=prefix, exact=True),
        make_fork_task(snapshot=golden, count=2, name_prefix=prefix, metadata={"run": "7"}, paused=True),
        make_fork_task(snapshot=golden, count=3, name_prefix=prefix, paused=True, timeout=3600),
        make_fork_task(snapshot=golden, count=3, name_prefix=prefix, paused=True, timeout=-1),
        make_fork_task(snapshot=golden, name_prefix=prefix, state="absent"),
        keywords=keywords,
    )
    assert captured["snapshot"]["source_sandbox_id"]
    assert [box["name"] for box in three_forks["sandboxes"]] == [f"{prefix}-{number}" for number in (1, 2, 3)]
    assert {box["forked_from"] for box in three_forks["sandboxes"]} == {captured["snapshot"]["id"]}
    assert [outcome["name"] for outcome in five_forks["outcomes"] if outcome["changed"]] == [
        f"{prefix}-4",
        f"{prefix}-5",
    ]
    assert [outcome["name"] for outcome in two_forks["outcomes"] if outcome["actions"] == ["remove"]] == [
        f"{prefix}-{number}" for number in (3, 4, 5)
    ]
    assert all(box["state"] == "paused" for box in paused_forks["sandboxes"])
    names = [f"{prefix}-{number}" for number in (1, 2, 3)]
    actions_by_name = {outcome["name"]: outcome["actions"] for outcome in limited["outcomes"]}
    assert actions_by_name == dict(zip(names, [["set_timeout"], ["set_timeout"], ["fork"]], strict=True))
    assert {view["timeout"] for view in limited["diff"]["after"].values()} == {3600}
    assert {view["timeout"] for view in unlimited["diff"]["after"].values()} == {-1}
    assert all_removed["sandboxes"] == [] and len(all_removed["outcomes"]) == 3


def test_clones_of_a_sandbox_differ_from_forks_of_its_snapshots(target: Target) -> None:
    golden, prefix, box = target.make_name("golden"), target.make_name("copy"), target.make_name("box")
    *_, cloned, fewer = target.verify(
        make_sandbox_task(target, "box", template=target.template),
        make_snapshot_task(name=golden, sandbox=box),
        make_fork_task(snapshot=golden, names=[f"{prefix}-9"]),
        make_fork_task(sandbox=box, count=2, name_prefix=prefix),
        make_fork_task(sandbox=box, count=1, name_prefix=prefix, exact=True),
    )
    assert len({each["forked_from"] for each in cloned["sandboxes"]}) == 1
    assert [outcome["name"] for outcome in fewer["outcomes"] if outcome["changed"]] == [f"{prefix}-2"]
    (refused,) = target.play(make_fork_task(sandbox=box, names=[f"{prefix}-9"]))
    assert refused["failed"] and f"{prefix}-9" in refused["msg"] and refused["failure"]["kind"] == "conflict"


@each_execution
def test_rollback_skips_clean_sandboxes_and_takes_backups(target: Target, keywords: dict[str, Any]) -> None:
    box, golden, backup = target.make_name("box"), target.make_name("before"), target.make_name("backup")
    target.verify(
        make_sandbox_task(target, "box", template=target.template),
        make_snapshot_task(name=golden, sandbox=box),
        keywords=keywords,
    )
    (clean,) = target.play(make_rollback_task(sandbox=box, snapshot=golden), keywords=keywords)
    assert not clean["changed"], clean
    write_file(target, "box")
    (rolled_back,) = target.verify(
        make_rollback_task(sandbox=box, snapshot=golden, backup_name=backup), keywords=keywords
    )
    assert rolled_back["diff"]["before"][box]["diverged"] is True
    assert rolled_back["diff"]["after"][box]["diverged"] is False
    assert rolled_back["backups"][0]["name"] == backup
    assert rolled_back["backups"][0]["description"] == f"before the rollback to {golden}"
    predicted, actual, repeated = target.play(
        {**make_rollback_task(sandbox=box, snapshot=golden, unless_clean=False), "check_mode": True},
        make_rollback_task(sandbox=box, snapshot=golden, unless_clean=False),
        make_rollback_task(sandbox=box, snapshot=golden, unless_clean=False),
        options=("--diff",),
        keywords=keywords,
    )
    check_prediction(predicted, actual)
    assert actual["changed"] and repeated["changed"]


def test_when_changed_captures_only_changed_sandboxes(target: Target) -> None:
    box, first, second, third = (target.make_name(name) for name in ("box", "first", "second", "third"))
    target.verify(
        make_sandbox_task(target, "box", template=target.template),
        make_snapshot_task(name=first, sandbox=box, when_changed=True),
    )
    (unchanged,) = target.play(make_snapshot_task(name=second, sandbox=box, when_changed=True))
    assert not unchanged["changed"] and unchanged["snapshot"]["name"] == first
    write_file(target, "box")
    (captured,) = target.verify(make_snapshot_task(name=third, sandbox=box, when_changed=True))
    assert captured["snapshot"]["name"] == third


def test_deleting_a_snapshot_in_use_is_refused_or_deferred(target: Target) -> None:
    box, golden, twin = target.make_name("box"), target.make_name("golden"), target.make_name("twin")
    target.verify(
        make_sandbox_task(target, "box", template=target.template),
        make_snapshot_task(name=golden, sandbox=box),
        make_fork_task(snapshot=golden, names=[twin]),
    )
    predicted, refused = target.play(
        {**make_snapshot_task(name=golden, state="absent"), "check_mode": True},
        make_snapshot_task(name=golden, state="absent"),
    )
    assert predicted["failed"] and predicted["msg"] == refused["msg"]
    assert refused["failure"]["kind"] == "in_use" and refused["failure"]["blockers"] == [twin]
    target.verify(
        make_snapshot_task(name=golden, state="absent", when_unused=True),
        make_sandbox_task(target, "twin", state="absent"),
    )


def test_check_mode_changes_nothing(memory_target: Target, faulty_gateway: Any) -> None:
    memory_target.play(
        {"grove.sandbox.sandbox_template": {"name": "other", "packages": ["curl"]}},
        make_sandbox_task(memory_target, "box", template="base"),
        make_fork_task(snapshot="base", count=3, name_prefix="ci"),
        options=("--check",),
    )
    changing_paths = [path for method, path in faulty_gateway.calls if method != "GET"]
    assert changing_paths and all(path.startswith("/plans") for path in changing_paths), changing_paths


def test_check_mode_predicts_the_life_cycle_of_a_template(memory_target: Target, keywords: dict[str, Any]) -> None:
    def make_template_task(**options: Any) -> Task:
        return {"grove.sandbox.sandbox_template": {"name": "web", **options}}

    built, rebuilt, removed = memory_target.verify(
        make_template_task(packages=["curl", "nginx", "curl"], start_command="nginx", memory_mb=512),
        make_template_task(packages=["nginx", "curl"], setup=["echo hello"], memory_mb=512),
        make_template_task(state="absent"),
        keywords=keywords,
    )
    assert built["template"]["recipe"]["packages"] == ["curl", "nginx"]
    assert built["template"]["memory_mb"] == 512
    assert rebuilt["template"]["id"] != built["template"]["id"]
    assert rebuilt["template"]["recipe"]["start_command"] == ""
    assert removed["template"] is None


def test_the_number_of_prewarmed_forks_is_changed(memory_target: Target, keywords: dict[str, Any]) -> None:
    box, mark, web = memory_target.make_name("box"), memory_target.make_name("mark"), memory_target.make_name("web")
    _, captured, lowered, built, raised, removed, _ = memory_target.verify(
        make_sandbox_task(memory_target, "box", template=memory_target.template),
        make_snapshot_task(name=mark, sandbox=box, prewarm=2),
        make_snapshot_task(name=mark, sandbox=box, prewarm=0),
        {"grove.sandbox.sandbox_template": {"name": web, "prewarm": 1}},
        {"grove.sandbox.sandbox_template": {"name": web, "prewarm": 2}},
        {"grove.sandbox.sandbox_template": {"name": web, "state": "absent"}},
        make_snapshot_task(name=mark, state="absent"),
        keywords=keywords,
    )
    assert captured["snapshot"]["prewarm"] == 2 and lowered["snapshot"]["prewarm"] == 0
    assert (lowered["diff"]["before"][mark]["prewarm"], lowered["diff"]["after"][mark]["prewarm"]) == (2, 0)
    assert lowered["outcomes"][0]["actions"] == raised["outcomes"][0]["actions"] == ["prewarm"]
    assert built["template"]["prewarm"] == 1 and raised["template"]["prewarm"] == 2
    assert raised["template"]["id"] == built["template"]["id"] and removed["template"] is None


@pytest.mark.parametrize("target", ["real"], indirect=True)
def test_a_template_is_built_on_a_real_host(target: Target) -> None:
    def make_template_task(**options: Any) -> Task:
        return {"grove.sandbox.sandbox_template": {"name": target.make_name("built"), **options}}

    built, _created, hidden = target.verify(
        make_template_task(setup=["echo one >/etc/marker"]),
        {"grove.sandbox.sandbox": {"name": target.make_name("box"), "template": target.make_name("built")}},
        make_template_task(state="absent", when_unused=True),
    )
    assert built["template"]["status"] == "ready"
    assert hidden["templates"] == []
