"""Test that a task of an applied plan does only what the plan contains, and nothing if an object has changed since."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._approval import (
    make_approved_option,
    make_initial_state,
    update_state,
)
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client
from ansible_collections.grove.sandbox.plugins.module_utils._failure import Failure
from ansible_collections.grove.sandbox.plugins.module_utils._plan import Action
from ansible_collections.grove.sandbox.plugins.module_utils._run import PLAN_KEY
from ansible_collections.grove.sandbox.plugins.plugin_utils._plan_conditions import mark_dependent_entries

from sandbox_gateway.hosts.base import Log
from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Snapshot
from tests.support.memory_gateway import ADMIN_KEY, READ_KEY, MemoryGateway
from tests.support.memory_host import DependentSnapshotsHost, MemoryHost
from tests.unit.plugins.test_plans import RESOURCE_KINDS, run_task

_runs = itertools.count()
Task = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryGateway]:
    gateway = MemoryGateway(tmp_path_factory.mktemp("approved"), log={"level": "error"})
    gateway.build_template("base")
    yield gateway
    gateway.end()


@pytest.fixture
def client(gateway: MemoryGateway) -> Iterator[Client]:
    """A client of a gateway with the sandboxes `web` and `other`, two snapshots, and the volume `data`."""
    gateway.clear()
    client = Client(gateway.unix_url)
    for kind, params in (
        ("volume", {"name": ["data"], "size_mb": 64, "snapshots": ["monday"]}),
        ("sandbox", {"name": ["web", "other"], "template": "base", "timeout": 3600}),
        ("snapshot", {"name": ["golden"], "sandbox": ["web"]}),
        ("fork", {"snapshot": "golden", "names": ["fork-1"]}),
        ("snapshot", {"name": ["idle"], "sandbox": ["other"]}),
    ):
        assert not run_task(client, kind, params).get("failed")
    yield client
    client.close()


def copy_monday_snapshot(client: Client) -> None:
    assert run_task(client, "volume", {"name": ["copy"], "from_snapshot": "data@monday"})["changed"]


def make_plan(gateway: MemoryGateway, *tasks: Task, key: str = "") -> list[dict[str, Any]]:
    """Return the entries of a plan file, as read back from JSON. Without a ``key``, connects as the administrator."""
    planner = Client(gateway.url, key) if key else Client(gateway.unix_url)
    try:
        assert planner.enter_plan(f"approved-plan-{next(_runs):06}")
        entries = [run_task(planner, kind, params, check=True)[PLAN_KEY] for kind, params in tasks]
    finally:
        planner.close()
        with gateway.client(key or None) as client:
            client.delete(f"/plans/{planner.plan_id}").raise_for_status()
    return json.loads(json.dumps(entries))


def apply_task(
    client: Client, task: Task, *entries: dict[str, Any], state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a task that may do only what ``entries`` contain. ``state``: the state of the run, which is updated."""
    kind, params = task
    state = make_initial_state() if state is None else state
    run_client = Client(client.address.url)  # ``client`` represents other users
    try:
        result = run_task(run_client, kind, {**params, "approved_plan": make_approved_option(entries, {}, state)})
    finally:
        run_client.close()
    if PLAN_KEY in result:
        update_state(state, result[PLAN_KEY])
    return result


def read_state(client: Client) -> str:
    """Return all objects, with the snapshots of the volumes, but without the numbers of ready forks."""
    paths = ["/sandboxes", "/snapshots", "/volumes", "/templates"]
    paths += [f"/volumes/{each['name']}/snapshots" for each in client.list_all("/volumes")]
    state = json.dumps([[*client.list_all(path)] for path in paths])
    return re.sub(r'"ready": \d+', "", state)  # The gateway starts prewarmed forks in the background.


CAPTURE_TASK = ("snapshot", {"name": ["new"], "sandbox": ["web"]})
FORK_TASK = ("fork", {"snapshot": "golden", "count": 2, "name_prefix": "try"})
UPDATE_TASK = ("sandbox", {"name": ["web"], "metadata": {"team": "red"}})
REMOVE_TASK = ("sandbox", {"name": ["web"], "state": "absent"})
ROLLBACK_TASK = ("rollback", {"sandbox": ["web"], "snapshot": "golden", "unless_clean": False})
REMOVE_SNAPSHOT_TASK = ("snapshot", {"name": ["idle"], "state": "absent"})
CAPTURE_WITH_DATA_TASK = ("snapshot", {"name": ["new"], "sandbox": ["writer"], "volumes": ["data"]})
ROLL_BACK_WITH_DATA_TASK = ("rollback", {"sandbox": ["writer"], "snapshot": "with-data", "unless_clean": False})
ATTACH_TASK = (
    "volume",
    {"name": ["data"], "attachments": [{"sandbox": "other", "path": "/srv/data", "read_only": True}]},
)
REMOVE_TEMPLATE_TASK = ("template", {"name": ["base"], "state": "absent", "when_unused": True})
GROW_TASK = ("volume", {"name": ["data"], "size_mb": 256})
PURGE_TASK = ("volume", {"name": ["data"], "snapshots": [], "purge": True})
DATA_MOUNT = {"name": "data", "path": "/srv/data"}
COPY_TASK = ("volume", {"name": ["mine"], "from_snapshot": "data@monday"})


def make_action(kind: str, **params: Any) -> Callable[[Client], Any]:
    return lambda client: run_task(client, kind, params)


def rename_web_sandbox(client: Client) -> None:
    client.patch("/sandboxes/web", {"name": "webber"})


def remove_golden_snapshot(client: Client) -> None:
    for kind, name in (("sandbox", "fork-1"), ("snapshot", "golden")):
        assert run_task(client, kind, {"name": [name], "state": "absent"})["changed"]


@pytest.mark.parametrize(
    ("task", "make_drift", "message"),
    [
        (CAPTURE_TASK, make_action("sandbox", name=["web"], state="absent"), "sandbox 'web' has been removed"),
        (UPDATE_TASK, make_action("sandbox", name=["web"], state="absent"), "sandbox 'web' has been removed"),
        (
            FORK_TASK,
            make_action("sandbox", name=["fork-1"], state="absent"),
            "the users of snapshot 'golden' have changed",
        ),
        (
            FORK_TASK,
            make_action("fork", snapshot="golden", names=["fork-2"]),
            "the users of snapshot 'golden' have changed",
        ),
        (FORK_TASK, make_action("fork", snapshot="golden", names=["try-1"]), "sandbox 'try-1' did not exist"),
        (FORK_TASK, make_action("snapshot", name=["golden"], sandbox=["web"], prewarm=1), "generation"),
        (UPDATE_TASK, rename_web_sandbox, "sandbox 'web' has been renamed (its id is "),
        (REMOVE_TASK, rename_web_sandbox, "sandbox 'web' has been renamed (its id is "),
        (CAPTURE_TASK, rename_web_sandbox, "sandbox 'web' has been renamed (its id is "),
        (ROLLBACK_TASK, rename_web_sandbox, "sandbox 'web' has been renamed (its id is "),
        (
            UPDATE_TASK,
            make_action("rollback", sandbox=["web"], snapshot="golden", unless_clean=False),
            "sandbox 'web' has changed",
        ),
        (UPDATE_TASK, make_action("snapshot", name=["newer"], sandbox=["web"]), "sandbox 'web' has changed"),
        (UPDATE_TASK, make_action("sandbox", name=["web"], metadata={"team": "blue"}), "sandbox 'web' has changed"),
        (UPDATE_TASK, make_action("sandbox", name=["web"], timeout=7200), "sandbox 'web' has changed"),
        (
            UPDATE_TASK,
            make_action("sandbox", name=["web"], network={"allow_internet": False}),
            "sandbox 'web' has changed",
        ),
        (REMOVE_TASK, make_action("sandbox", name=["web"], state="paused"), "sandbox 'web' has changed"),
        (
            REMOVE_TASK,
            make_action("sandbox", name=["web"], volumes=[{"name": "data", "path": "/srv"}]),
            "'web' has changed",
        ),
        (
            ROLLBACK_TASK,
            make_action("fork", snapshot="golden", names=["fork-2"]),
            "the users of snapshot 'golden' have changed",
        ),
        (FORK_TASK, remove_golden_snapshot, "snapshot 'golden' has been removed"),
        (ROLLBACK_TASK, remove_golden_snapshot, "snapshot 'golden' has been removed"),
        (
            REMOVE_SNAPSHOT_TASK,
            make_action("snapshot", name=["idle"], state="absent"),
            "snapshot 'idle' has been removed",
        ),
        (
            REMOVE_SNAPSHOT_TASK,
            make_action("fork", snapshot="idle", names=["f"]),
            "the users of snapshot 'idle' have changed",
        ),
        (
            REMOVE_SNAPSHOT_TASK,
            make_action("snapshot", name=["idle"], sandbox=["other"], prewarm=1),
            "snapshot 'idle' has changed",
        ),
        (GROW_TASK, make_action("volume", name=["data"], state="absent", purge=True), "volume 'data' has been removed"),
        (GROW_TASK, make_action("volume", name=["data"], size_mb=128), "volume 'data' has changed"),
        (GROW_TASK, make_action("volume", name=["data"], rollback_to="monday"), "volume 'data' has changed"),
        (PURGE_TASK, copy_monday_snapshot, "the clones of volume 'data' have changed"),
        (COPY_TASK, copy_monday_snapshot, "the clones of volume 'data' have changed"),
        (CAPTURE_TASK, make_action("snapshot", name=["new"], sandbox=["other"]), "snapshot 'new' did not exist"),
    ],
)
def test_nothing_is_done_after_a_change_by_another_client(
    gateway: MemoryGateway, client: Client, task: Task, make_drift: Callable[[Client], Any], message: str
) -> None:
    (entry,) = make_plan(gateway, task)
    assert entry["actions"], entry
    make_drift(client)
    before = read_state(client)
    result = apply_task(client, task, entry)
    assert result["failed"] and message in result["msg"], result
    assert result["failure"]["kind"] == "not_planned", result
    assert read_state(client) == before


@pytest.mark.parametrize(
    ("task", "make_drift", "message"),
    [
        (CAPTURE_WITH_DATA_TASK, make_action("volume", name=["data"], size_mb=128), "volume 'data' has changed"),
        (
            CAPTURE_WITH_DATA_TASK,
            make_action("volume", name=["data"], rollback_to="monday", force=True),
            "volume 'data' has changed",
        ),
        (ROLL_BACK_WITH_DATA_TASK, make_action("volume", name=["data"], size_mb=128), "volume 'data' has changed"),
        (ATTACH_TASK, make_action("sandbox", name=["other"], state="absent"), "sandbox 'other' has been removed"),
        (ATTACH_TASK, make_action("sandbox", name=["other"], metadata={"a": "b"}), "sandbox 'other' has changed"),
        (REMOVE_TEMPLATE_TASK, make_action("sandbox", name=["stranger"], template="base"), "the users of snapshot"),
    ],
)
def test_all_objects_that_a_task_names_are_compared(
    gateway: MemoryGateway, client: Client, task: Task, make_drift: Callable[[Client], Any], message: str
) -> None:
    mounts = [{"name": "data", "path": "/srv/data"}]
    run_task(client, "sandbox", {"name": ["writer"], "template": "base", "volumes": mounts})
    run_task(client, "snapshot", {"name": ["with-data"], "sandbox": ["writer"], "volumes": ["data"]})
    test_nothing_is_done_after_a_change_by_another_client(gateway, client, task, make_drift, message)


@pytest.mark.parametrize("params", [{"snapshots": []}, {"state": "absent"}])
def test_nothing_is_done_before_a_removal_that_a_clone_prevents(tmp_path: Path, params: dict[str, Any]) -> None:
    gateway = MemoryGateway(tmp_path, DependentSnapshotsHost(), log={"level": "error"})
    client = Client(gateway.unix_url)
    try:
        gateway.build_template("base")
        run_task(client, "volume", {"name": ["data"], "size_mb": 64, "snapshots": ["monday"]})
        mounts = [{"name": "data", "path": "/srv/data"}]
        run_task(client, "sandbox", {"name": ["web"], "template": "base", "volumes": mounts})
        task = ("volume", {"name": ["data"], "attachments": [], "purge": True, **params})
        (entry,) = make_plan(gateway, task)
        assert len(entry["actions"]) == 2 and entry["actions"][0]["verb"] == "detach", entry
        copy_monday_snapshot(client)
        before = read_state(client)
        result = apply_task(client, task, entry)
        assert "the clones of volume 'data' have changed since the plan was made (copy)" in result["msg"], result
        assert read_state(client) == before
        (entry,) = make_plan(gateway, task)
        assert "is in use by 1 clone (copy)" in entry["failure"]["message"], entry
    finally:
        client.close()
        gateway.end()


def test_clones_that_the_run_makes_and_removes_itself_are_known(gateway: MemoryGateway, client: Client) -> None:
    copy_monday_snapshot(client)
    tasks = [
        ("volume", {"name": ["data"], "snapshots": ["v1"]}),
        ("volume", {"name": ["copy"], "state": "absent"}),
        *(("volume", {"name": [f"of-{host}"], "from_snapshot": "data@v1"}) for host in "abc"),
        ("volume", {"name": ["of-c"], "size_mb": 128}),
        ("volume", {"name": ["data"], "snapshots": ["v2"]}),
    ]
    entries = make_plan(gateway, *tasks)
    state = make_initial_state()
    for task in [*tasks[:2], *reversed(tasks[2:5]), *tasks[5:]]:
        result = apply_task(client, task, *entries, state=state)
        assert result["changed"], result


CREATE_FROM_EXTRA_TASK = ("sandbox", {"name": ["new"], "template": "extra"})
REMOVE_EXTRA_TASK = ("template", {"name": ["extra"], "state": "absent"})
PREWARM_EXTRA_TASK = ("template", {"name": ["extra"], "prewarm": 2})


@pytest.mark.parametrize("task", [CREATE_FROM_EXTRA_TASK, REMOVE_EXTRA_TASK, PREWARM_EXTRA_TASK])
@pytest.mark.parametrize(
    ("make_drift", "message"),
    [
        (make_action("template", name=["extra"], state="absent"), "template 'extra' has been removed"),
        (
            make_action("template", name=["extra"], packages=["curl"]),
            "template 'extra' has been replaced",
        ),
        (make_action("template", name=["extra"], prewarm=1), "template 'extra' has changed"),
    ],
)
def test_nothing_is_done_with_a_template_changed_by_another_client(
    gateway: MemoryGateway, client: Client, task: Task, make_drift: Callable[[Client], Any], message: str
) -> None:
    gateway.build_template("extra")
    test_nothing_is_done_after_a_change_by_another_client(gateway, client, task, make_drift, message)


@pytest.mark.parametrize(
    ("tasks", "make_drift"),
    [
        ([CAPTURE_TASK, REMOVE_TASK], make_action("snapshot", name=["new"], sandbox=["web"])),
        (
            [ROLLBACK_TASK, REMOVE_TASK],
            make_action("rollback", sandbox=["web"], snapshot="golden", unless_clean=False),
        ),
        (
            [
                ("volume", {"name": ["data"], "snapshots": ["keep"]}),
                ("volume", {"name": ["data"], "state": "absent", "purge": True}),
            ],
            make_action("volume", name=["data"], snapshots=["keep"]),
        ),
        (
            [("sandbox", {"name": ["web"], "state": "running"}), ("sandbox", {"name": ["other"], "state": "paused"})],
            make_action("sandbox", name=["web"], metadata={"a": "b"}),
        ),
    ],
)
def test_a_run_stops_if_another_client_has_made_its_change(
    gateway: MemoryGateway, client: Client, tasks: list[Task], make_drift: Callable[[Client], Any]
) -> None:
    entries = make_plan(gateway, *tasks)
    make_drift(client)
    before = read_state(client)
    result = apply_task(client, tasks[0], *entries)
    assert result["failed"] and result["failure"]["kind"] == "not_planned", result
    assert read_state(client) == before


def test_a_loop_item_without_changes_does_not_hide_other_items(gateway: MemoryGateway, client: Client) -> None:
    run_task(client, "sandbox", {"name": ["other"], "metadata": {"team": "red"}})
    items = [("sandbox", {"name": [name], "metadata": {"team": "red"}}) for name in ("other", "web")]
    entries = make_plan(gateway, *items)
    assert [bool(entry["actions"]) for entry in entries] == [False, True]
    run_task(client, *items[1])
    state = make_initial_state()
    assert not apply_task(client, items[0], *entries, state=state).get("failed")
    assert state["used"] == [0]
    assert "sandbox 'web' has changed" in apply_task(client, items[1], *entries, state=state)["msg"]
    assert not apply_task(client, items[0], *entries, state=state).get("failed"), "a repeated item has no entry left"


def test_hosts_change_one_sandbox_in_any_order(gateway: MemoryGateway, client: Client) -> None:
    tasks = [("snapshot", {"name": [f"by-{host}"], "sandbox": ["web"]}) for host in "abcdef"]
    tasks += [("fork", {"sandbox": "web", "names": [f"clone-{host}"]}) for host in "abc"]
    tasks += [("volume", {"name": ["data"], "snapshots": [f"of-{host}"]}) for host in "abc"]
    entries = make_plan(gateway, *tasks)
    state = make_initial_state()
    for task in [*reversed(tasks[:9]), *tasks[9:]]:
        result = apply_task(client, task, *entries, state=state)
        assert result["changed"], result


def test_a_run_that_the_gateway_has_forgotten_needs_a_new_plan(gateway: MemoryGateway, client: Client) -> None:
    entries = make_plan(gateway, UPDATE_TASK, GROW_TASK)
    state = make_initial_state()
    assert apply_task(client, UPDATE_TASK, *entries, state=state)["changed"]
    (run,) = client.get("/applied-runs")
    # After a restart, a gateway reports a later time.
    other_state = {**state, "opened_at": {f"{run['gatewayID']}/{run['runID']}": "2020-01-01T00:00:00Z"}}
    result = apply_task(client, GROW_TASK, *entries, state=other_state)
    assert "the gateway was restarted during this run" in result["msg"] and "new plan" in result["msg"]
    client.delete(f"/applied-runs/{run['runID']}")
    result = apply_task(client, GROW_TASK, *entries, state=state)
    assert "the gateway has discarded this run" in result["msg"] and "make a new plan" in result["msg"], result


def test_a_gateway_that_is_too_old_applies_no_plan(
    gateway: MemoryGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = make_plan(gateway, UPDATE_TASK)
    original_call = client.call

    def call(self: Client, method: str, path: str, **options: Any) -> Any:
        return original_call(method, path.replace("/applied-runs", "/unknown-route"), **options)

    before = read_state(client)
    monkeypatch.setattr(Client, "call", call)
    result = apply_task(client, UPDATE_TASK, entry)
    monkeypatch.undo()
    assert "is too old to apply plans: upgrade it" in result["msg"] and "0.1.0" not in result["msg"], result
    assert result["failure"]["kind"] == "too_old", result
    assert read_state(client) == before


@pytest.mark.parametrize("task", [CAPTURE_TASK, FORK_TASK, UPDATE_TASK, REMOVE_TASK, ROLLBACK_TASK, GROW_TASK])
def test_an_object_that_was_replaced_is_not_changed(gateway: MemoryGateway, client: Client, task: Task) -> None:
    """Another object with the same name and the same number of changes is not the planned one."""
    (entry,) = make_plan(gateway, task)
    gateway.clear()
    for kind, params in (
        ("volume", {"name": ["data"], "size_mb": 64, "snapshots": ["monday"]}),
        ("sandbox", {"name": ["web", "other"], "template": "base", "timeout": 3600}),
        ("snapshot", {"name": ["golden"], "sandbox": ["web"]}),
        ("fork", {"snapshot": "golden", "names": ["fork-1"]}),
    ):
        run_task(client, kind, params)
    before = read_state(client)
    result = apply_task(client, task, entry)
    assert "has been replaced" in result["msg"], result
    assert read_state(client) == before


@pytest.mark.parametrize(
    "other_task",
    [
        ("fork", {"snapshot": "golden", "count": 3, "name_prefix": "try"}),
        ("fork", {"snapshot": "golden", "count": 2, "name_prefix": "try", "metadata": {"a": "b"}}),
        ("fork", {"snapshot": "golden", "count": 2, "name_prefix": "try", "paused": True}),
        ("fork", {"sandbox": "web", "count": 2, "name_prefix": "try"}),
        ("fork", {"snapshot": "golden", "names": ["fork-1"], "state": "absent"}),
        UPDATE_TASK,
    ],
)
def test_unplanned_actions_are_refused(gateway: MemoryGateway, client: Client, other_task: Task) -> None:
    (entry,) = make_plan(gateway, FORK_TASK)
    before = read_state(client)
    result = apply_task(client, other_task, entry)
    assert result["failure"]["kind"] == "not_planned" and "Make a new plan" in result["msg"], result
    assert read_state(client) == before


def test_an_action_outside_the_plan_is_refused(gateway: MemoryGateway, client: Client) -> None:
    before = read_state(client)
    result = apply_task(client, UPDATE_TASK)
    assert "does not contain this task's changes (update)" in result["msg"]
    (entry,) = make_plan(gateway, UPDATE_TASK)
    result = apply_task(client, UPDATE_TASK, {**entry, "gateway": "0" * 16})
    assert "a different gateway" in result["msg"]
    assert read_state(client) == before
    unnecessary_task = ("sandbox", {"name": ["web"], "state": "running"})
    assert apply_task(client, unnecessary_task)["changed"] is False, "a task without changes needs no plan"


def test_secrets_are_compared_but_not_stored(gateway: MemoryGateway, client: Client) -> None:
    def make_task(secret: str) -> Task:
        return ("sandbox", {"name": ["safe"], "template": "base", "env": {"TOKEN": secret}})

    (entry,) = make_plan(gateway, make_task("correct-horse"))
    assert "correct-horse" not in json.dumps(entry)
    assert "secrets" in apply_task(client, make_task("battery-staple"), entry)["msg"]
    assert apply_task(client, make_task("correct-horse"), entry)["changed"]


def test_a_plan_does_not_contain_the_login_to_a_registry(
    gateway: MemoryGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    logins: list[RegistryLogin | None] = []

    async def build_base(base: Snapshot, recipe: Recipe, digest: str, log: Log, login: RegistryLogin | None) -> str:
        logins.append(login)
        return await MemoryHost.build_base(gateway.host, base, recipe, digest, log)

    def make_task(password: str) -> Task:
        login = {"registry_username": "reader", "registry_password": password}
        return ("template", {"name": ["built"], "image": "registry.test/app:1", **login})

    monkeypatch.setattr(gateway.host, "build_base", build_base)
    (entry,) = make_plan(gateway, make_task("correct-horse"))
    assert not any(text in json.dumps(entry) for text in ("correct-horse", "reader", "login"))
    # The password may have been changed since.
    result = apply_task(client, make_task("battery-staple"), entry)
    assert result["changed"] and "battery-staple" not in json.dumps(result)
    assert logins == [RegistryLogin("reader", "battery-staple")]
    assert not run_task(client, *make_task("another-password"))["changed"], "a login is no part of the recipe"
    assert run_task(client, "template", {"name": ["built"], "state": "absent"})["changed"]


def test_equal_secrets_are_hashed_once(gateway: MemoryGateway, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed_texts: list[bytes] = []
    original_hash = hashlib.pbkdf2_hmac

    def count_hash(name: str, text: bytes, salt: bytes, rounds: int) -> bytes:
        hashed_texts.append(text)
        return original_hash(name, text, salt, rounds)

    monkeypatch.setattr(hashlib, "pbkdf2_hmac", count_hash)
    secret = f"unique-{uuid.uuid4()}"
    first_task = ("sandbox", {"name": ["one", "two", "three"], "template": "base", "env": {"TOKEN": secret}})
    second_task = ("sandbox", {"name": ["four"], "template": "base", "env": {"TOKEN": secret}})
    entries = make_plan(gateway, first_task, second_task)
    assert len(hashed_texts) == 1 and secret.encode() in hashed_texts[0]
    assert apply_task(client, first_task, *entries)["changed"]
    assert len(hashed_texts) == 1


def test_only_the_environment_is_a_secret(
    gateway: MemoryGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(hashlib, "pbkdf2_hmac")
    metadata = {"env": "prod", "envVars": "none"}
    create_task = ("sandbox", {"name": ["box"], "template": "base", "metadata": metadata})
    (entry,) = make_plan(gateway, create_task)
    assert entry["actions"][0]["request"]["body"]["metadata"] == metadata
    assert apply_task(client, create_task, entry)["changed"]
    update = ("sandbox", {"name": ["box"], "metadata": {"env": "test"}})
    (entry,) = make_plan(gateway, update)
    assert entry["actions"][0]["request"]["body"] == {"metadata": {"env": "test"}}
    assert apply_task(client, update, entry)["changed"]


def test_planned_ids_stand_for_the_ids_of_the_run(gateway: MemoryGateway, client: Client) -> None:
    create_task = ("sandbox", {"name": ["box"], "template": "base"})
    remove_task = ("sandbox", {"name": ["box"], "state": "absent"})
    entries = make_plan(gateway, create_task, remove_task)
    state = make_initial_state()
    result = apply_task(client, create_task, *entries, state=state)
    gateway_id, planned_id = entries[0]["gateway"], entries[0]["created"]["box"]
    assert state["bindings"][gateway_id][planned_id] == result["sandbox"]["id"]
    state_of_other_object = {
        **make_initial_state(),
        "used": [0],
        "bindings": {gateway_id: {planned_id: "0123456789ab"}},
    }
    assert "replaced" in apply_task(client, remove_task, *entries, state=state_of_other_object)["msg"]
    assert apply_task(client, remove_task, *entries, state=state)["changed"]


@pytest.mark.parametrize(
    ("key", "condition"), [(READ_KEY, ["only if the run uses a key with the scope admin"]), (ADMIN_KEY, [])]
)
def test_a_plan_says_that_its_key_may_not_make_the_changes(
    gateway: MemoryGateway, client: Client, key: str, condition: list[str]
) -> None:
    task = ("sandbox", {"name": ["box"], "template": "base"})
    entries = make_plan(gateway, task, task, key=key)
    assert [entry["unknown"] for entry in entries] == [condition, []], "the second task changes nothing"


@pytest.mark.parametrize("option", ["env", "metadata"])
def test_values_may_contain_the_ids_of_objects_that_the_run_creates(
    gateway: MemoryGateway, client: Client, option: str
) -> None:
    create_task = ("sandbox", {"name": ["db"], "template": "base"})
    capture_task = ("snapshot", {"name": ["db-1"], "sandbox": ["db"]})

    def make_task(*ids: str) -> Task:
        values = {"PEERS": f"sandbox {ids[0]},snapshot {ids[1]}", "SELF": "web"}
        return ("sandbox", {"name": ["user"], "template": "base", option: values})

    planned_ids = [f"known-after-apply-{number:04x}" for number in (1, 3)]
    entries = make_plan(gateway, create_task, capture_task, make_task(*planned_ids))
    assert [*entries[0]["created"].values(), *entries[1]["created"].values()] == planned_ids
    state = make_initial_state()
    database = apply_task(client, create_task, *entries, state=state)["sandbox"]
    snapshot = apply_task(client, capture_task, *entries, state=state)["snapshot"]
    for ids in ((snapshot["id"], database["id"]), ("0123456789ab", snapshot["id"])):
        refused = apply_task(client, make_task(*ids), *entries, state=state)
        assert refused["failure"]["kind"] == "not_planned" and not refused["changed"], refused
    result = apply_task(client, make_task(database["id"], snapshot["id"]), *entries, state=state)
    assert result["changed"], result


@pytest.mark.parametrize(
    ("create_task", "remove_task"),
    [
        (("sandbox", {"name": ["box"], "template": "base"}), ("sandbox", {"name": ["box"], "state": "absent"})),
        (("volume", {"name": ["box"], "size_mb": 64}), ("volume", {"name": ["box"], "state": "absent"})),
    ],
)
def test_an_object_created_by_another_client_is_kept(
    gateway: MemoryGateway, client: Client, create_task: Task, remove_task: Task
) -> None:
    entries = make_plan(gateway, create_task, remove_task)
    run_task(client, *create_task)
    before = read_state(client)
    state = make_initial_state()
    assert "did not exist when the plan was made" in apply_task(client, create_task, entries[0], state=state)["msg"]
    remaining_state = {**state, "used": [0]}
    assert "replaced" in apply_task(client, remove_task, *entries, state=remaining_state)["msg"]
    assert read_state(client) == before


@pytest.mark.parametrize(
    "task",
    [
        ("sandbox", {"name": ["box"], "template": "late"}),
        ("fork", {"snapshot": "s", "names": ["of-s"]}),
        ("snapshot", {"name": ["s"], "sandbox": ["box"]}),
        ("rollback", {"sandbox": ["box"], "snapshot": "s"}),
    ],
    ids=lambda task: task[0],
)
def test_a_task_whose_objects_were_missing_does_not_succeed(gateway: MemoryGateway, client: Client, task: Task) -> None:
    """Otherwise, the run would not enter the rescue section that the plan expects."""
    (entry,) = make_plan(gateway, task)
    assert entry["failure"]["kind"] == "not_found" and not entry["actions"]
    assert apply_task(client, task, entry)["failure"]["kind"] == "not_found"
    gateway.build_template("late")
    for each in (
        ("sandbox", {"name": ["box"], "template": "late"}),
        ("snapshot", {"name": ["s"], "sandbox": ["box"]}),
        ("fork", {"snapshot": "s", "names": ["of-s"]}),
    ):
        assert run_task(client, *each)["changed"]
    assert not run_task(client, *task).get("failed"), "without a plan, there is nothing to do"
    result = apply_task(client, task, entry)
    assert result["failure"]["kind"] == "not_planned", result
    assert "did not exist when the plan was made" in result["msg"]


BUILD_TASK = ("template", {"name": ["slow"], "packages": ["curl"]})
START_BUILD_TASK = ("template", {**BUILD_TASK[1], "wait_timeout": 0})
USE_BUILD_TASK = ("sandbox", {"name": ["box"], "template": "slow"})


@pytest.fixture
def slow_builds(gateway: MemoryGateway, client: Client) -> Iterator[None]:
    gateway.host.build_seconds = 0.5
    yield
    assert run_task(client, *BUILD_TASK)["templates"][0]["status"] == "ready"  # the build has ended


@pytest.mark.parametrize("is_replacement", [False, True])
@pytest.mark.usefixtures("slow_builds")
def test_a_task_can_wait_for_a_build_that_an_earlier_task_started(
    gateway: MemoryGateway, client: Client, is_replacement: bool
) -> None:
    if is_replacement:
        gateway.build_template("slow")
    tasks = [START_BUILD_TASK, BUILD_TASK, USE_BUILD_TASK]
    entries = make_plan(gateway, *tasks)
    state = make_initial_state()
    results = [apply_task(client, task, *entries, state=state) for task in tasks]
    assert [result["changed"] for result in results] == [True, False, True], results
    assert results[0]["templates"][0]["id"] == results[2]["sandboxes"][0]["forked_from"]


@pytest.mark.parametrize("is_replacement", [False, True])
@pytest.mark.usefixtures("slow_builds")
def test_a_template_is_not_used_before_its_build_has_finished(
    gateway: MemoryGateway, client: Client, is_replacement: bool
) -> None:
    if is_replacement:
        gateway.build_template("slow")
    entries = make_plan(gateway, START_BUILD_TASK, USE_BUILD_TASK)
    state = make_initial_state()
    started = apply_task(client, START_BUILD_TASK, *entries, state=state)
    assert started["changed"] and started["templates"][0]["status"] == "building"
    assert started["templates"][0]["name"] == "slow"
    failed = apply_task(client, USE_BUILD_TASK, *entries, state=state)
    reason = "the build has not finished" if is_replacement else "template 'slow' is being built"
    assert failed["failed"] and reason in failed["msg"], failed
    run_task(client, *BUILD_TASK)
    assert apply_task(client, USE_BUILD_TASK, *entries, state=state)["changed"]


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_template_whose_build_failed_cannot_be_used(gateway: MemoryGateway, client: Client, is_checked: bool) -> None:
    build_task = ("template", {"name": ["broken"], "setup": ["fail"]})
    assert run_task(client, *build_task)["failure"]["kind"] == "backend_failed"
    task = ("sandbox", {"name": ["box"], "template": "broken"})
    failure = make_plan(gateway, task)[0]["failure"] if is_checked else run_task(client, *task)["failure"]
    assert failure["kind"] == "not_found" and "its last build failed" in failure["message"]


def test_the_failure_of_a_running_build_is_reported_by_the_task_that_waits(
    gateway: MemoryGateway, client: Client
) -> None:
    gateway.host.build_seconds = 0.3
    recipe = {"setup": ["fail"]}
    assert run_task(client, "template", {"name": ["broken"], "wait_timeout": 0, **recipe})["changed"]
    result = run_task(client, "template", {"name": ["broken", "fine"], "continue_on_error": True, **recipe})
    assert result["failed"] and "the build of template 'broken' failed" in result["outcomes"][0]["failure"]["message"]


def test_a_task_waits_for_a_running_build_only_once(gateway: MemoryGateway, client: Client) -> None:
    gateway.host.build_seconds = 6
    run_task(client, *START_BUILD_TASK)
    began_at = time.monotonic()
    result = run_task(client, "template", {**BUILD_TASK[1], "wait_timeout": 2, "continue_on_error": True})
    assert result["failure"]["kind"] == "timeout" and time.monotonic() - began_at < 4
    assert result["templates"][0]["status"] == "building"
    run_task(client, *BUILD_TASK)


def test_user_values_are_compared_regardless_of_their_keys(gateway: MemoryGateway, client: Client) -> None:
    def make_task(value: str, timeout: int) -> Task:
        metadata = {"address": value, "end": value, "serial": "000000001234"}
        return ("sandbox", {"name": ["box"], "template": "base", "metadata": metadata, "timeout": timeout})

    (entry,) = make_plan(gateway, make_task("one", 5))
    assert "in the plan" in apply_task(client, make_task("two", 5), entry)["msg"]
    assert "in the plan" in apply_task(client, make_task("one", -1), entry)["msg"]
    result = apply_task(client, make_task("one", 5), entry)
    assert result["changed"], result


def test_objects_are_compared_regardless_of_how_they_are_named(gateway: MemoryGateway, client: Client) -> None:
    ids = [client.get(f"/sandboxes/{name}")["sandboxID"] for name in ("web", "other")]
    remove_task = ("sandbox", {"name": ids, "state": "absent"})
    (entry,) = make_plan(gateway, remove_task)
    client.patch("/sandboxes/web", {"metadata": {"keep": "me"}})
    before = read_state(client)
    assert "has changed" in apply_task(client, remove_task, entry)["msg"]
    assert read_state(client) == before


@pytest.mark.parametrize(
    "task",
    [
        ("sandbox", {"name": ["mounts"], "template": "base", "volumes": [{"name": "data", "path": "/srv/data"}]}),
        ("fork", {"snapshot": "golden", "names": ["f"], "volumes": [{"name": "data", "path": "/srv/data"}]}),
    ],
)
def test_mounted_volumes_are_compared(gateway: MemoryGateway, client: Client, task: Task) -> None:
    (entry,) = make_plan(gateway, task)
    client.delete("/volumes/data", withSnapshots=True)
    client.post("/volumes", {"name": "data", "sizeMB": 128})
    before = read_state(client)
    assert "volume 'data' has been replaced" in apply_task(client, task, entry)["msg"]
    assert read_state(client) == before


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (("sandbox", {"name": ["mounts"], "template": "base", "volumes": [DATA_MOUNT]}), "mounted since the plan was"),
        (("fork", {"snapshot": "golden", "names": ["f"], "volumes": [DATA_MOUNT]}), "mounted since the plan was made"),
        (("fork", {"snapshot": "golden", "names": ["f"]}), ""),
        (COPY_TASK, ""),
    ],
)
def test_a_volume_mounted_by_another_client_is_not_mounted(
    gateway: MemoryGateway, client: Client, task: Task, message: str
) -> None:
    (entry,) = make_plan(gateway, task)
    assert run_task(client, "sandbox", {"name": ["other"], "volumes": [DATA_MOUNT]})["changed"]
    before = read_state(client)
    result = apply_task(client, task, entry)
    if not message:
        assert result["changed"], result
        return
    assert f"volume 'data' has been {message}" in result["msg"] and "(other)" in result["msg"], result
    assert read_state(client) == before


def test_hosts_mount_a_volume_in_any_order(gateway: MemoryGateway, client: Client) -> None:
    mount = {**DATA_MOUNT, "read_only": True}
    assert run_task(client, "sandbox", {"name": ["old"], "template": "base", "volumes": [mount]})["changed"]
    tasks = [
        ("sandbox", {"name": ["new"], "template": "base", "volumes": [mount]}),
        ("fork", {"snapshot": "golden", "count": 2, "name_prefix": "try", "volumes": [mount]}),
        ("sandbox", {"name": ["web"], "volumes": [mount]}),
        ("volume", {"name": ["data"], "attachments": [{"sandbox": "other", "path": "/srv", "read_only": True}]}),
        ("sandbox", {"name": ["last"], "template": "base", "volumes": [mount]}),
    ]
    entries = make_plan(gateway, *tasks)
    assert run_task(client, "sandbox", {"name": ["old"], "state": "absent"})["changed"]
    state = make_initial_state()
    for task in [*reversed(tasks[:3]), tasks[4]]:
        result = apply_task(client, task, *entries, state=state)
        assert result["changed"], result


TWO_SANDBOXES_TASK = ("sandbox", {"name": ["web", "other"], "metadata": {"team": "red"}})


@pytest.mark.parametrize(
    ("task", "make_drift", "message"),
    [
        (
            ("fork", {"snapshot": "golden", "names": ["try-1"], "exact": True}),
            make_action("sandbox", name=["fork-1"], metadata={"keep": "me"}),
            "sandbox 'fork-1' has changed",
        ),
        (TWO_SANDBOXES_TASK, make_action("sandbox", name=["other"], timeout=7200), "sandbox 'other' has changed"),
        (
            TWO_SANDBOXES_TASK,
            lambda client: client.patch("/sandboxes/other", {"name": "renamed"}),
            "sandbox 'other' has been renamed",
        ),
        (
            ("snapshot", {"name": ["new-1", "new-2"], "sandbox": ["web", "other"]}),
            make_action("sandbox", name=["other"], metadata={"a": "b"}),
            "sandbox 'other' has changed",
        ),
        (
            ("rollback", {"sandbox": ["other", "web"], "snapshot": "golden", "unless_clean": False}),
            make_action("fork", snapshot="golden", names=["stranger"]),
            "the users of snapshot 'golden' have changed since the plan was made (stranger)",
        ),
        (
            ("sandbox", {"name": ["new-1", "new-2"], "template": "base", "volumes": [{**DATA_MOUNT}]}),
            make_action("sandbox", name=["other"], volumes=[DATA_MOUNT]),
            "volume 'data' has been mounted since the plan was made (other)",
        ),
        (
            ("volume", {"name": ["spare", "data"], "state": "absent", "purge": True}),
            lambda client: client.post("/volumes/data/snapshots", {"name": "precious"}),
            "the snapshots of volume 'data' have changed since the plan was made (data@precious)",
        ),
        (
            ("template", {"name": ["extra", "extra-2"], "state": "absent", "when_unused": True}),
            make_action("sandbox", name=["stranger"], template="extra-2"),
            "have changed since the plan was made (stranger)",
        ),
    ],
)
def test_objects_are_compared_again_before_each_action(
    gateway: MemoryGateway,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    task: Task,
    make_drift: Callable[[Client], Any],
    message: str,
) -> None:
    """Another client changes an object of the second action while the task carries out the first one."""
    kind = task[0]
    if kind == "template":
        gateway.build_template("extra")
        gateway.build_template("extra-2")
    run_task(client, "volume", {"name": ["spare"], "size_mb": 64, "snapshots": ["one"]})
    (entry,) = make_plan(gateway, task)
    assert len(entry["actions"]) == 2, entry
    original_apply = RESOURCE_KINDS[kind].apply
    changed_names: list[str] = []
    drifted_states: list[str] = []

    def apply(action: Action, task_client: Client) -> dict[str, Failure]:
        failures = original_apply(action, task_client)
        changed_names.extend(change.name for change in action.changes)
        monkeypatch.undo()
        make_drift(client)
        drifted_states.append(read_state(client))
        return failures

    monkeypatch.setattr(RESOURCE_KINDS[kind], "apply", apply)
    result = apply_task(client, task, entry)
    assert result["failed"] and result["failure"]["kind"] == "not_planned", result
    assert message in result["msg"] and "did not carry out the action that uses it" in result["msg"], result
    assert [each["name"] for each in result["outcomes"] if each["changed"]] == changed_names
    assert read_state(client) == drifted_states[0]


def test_a_task_replaces_several_sandboxes_from_one_snapshot(gateway: MemoryGateway, client: Client) -> None:
    """Its first action changes the users of the snapshot, which are compared again before the second one."""
    task = ("sandbox", {"name": ["web", "other"], "snapshot": "golden", "recreate": True})
    (entry,) = make_plan(gateway, task)
    assert [action["verb"] for action in entry["actions"]] == ["replace", "replace"], entry
    result = apply_task(client, task, entry)
    assert not result.get("failed") and [each["changed"] for each in result["outcomes"]] == [True, True], result


def test_an_object_is_read_again_only_before_a_later_action(
    gateway: MemoryGateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = make_plan(gateway, TWO_SANDBOXES_TASK, TWO_SANDBOXES_TASK)
    requests: list[tuple[str, str]] = []
    original_call = Client.call

    def call(self: Client, method: str, path: str, **options: Any) -> Any:
        requests.append((method, path.partition("/")[2].partition("/")[0]))
        return original_call(self, method, path, **options)

    monkeypatch.setattr(Client, "call", call)
    state = make_initial_state()
    assert apply_task(client, TWO_SANDBOXES_TASK, *entries, state=state)["changed"]
    first, second = (number for number, (method, _kind) in enumerate(requests) if method == "PATCH")
    assert requests[first + 1 : second] == [("GET", "sandboxes")]
    requests.clear()
    assert not apply_task(client, TWO_SANDBOXES_TASK, *entries, state=state)["changed"]
    assert requests == [("POST", "applied-runs"), ("GET", "sandboxes")]


@pytest.mark.parametrize("option", ["env", "metadata"])
def test_a_value_that_only_the_run_knows_is_reported_as_such(
    gateway: MemoryGateway, client: Client, option: str
) -> None:
    (entry,) = make_plan(gateway, ("sandbox", {"name": ["new"], "template": "base", option: {"DB": None}}))
    assert f"{option}.DB is null, but must be a string" in entry["failure"]["message"]
    assert "the address of a new sandbox is null" in entry["failure"]["message"]
    assert entry["unknown"] == [f"only if {option}.DB is null in the run, too"]


@pytest.mark.parametrize("option", ["allow_out", "deny_out"])
@pytest.mark.parametrize("address", ["", "/32"])
def test_a_missing_address_is_reported_as_one_that_only_the_run_knows(
    gateway: MemoryGateway, client: Client, option: str, address: str
) -> None:
    """Ansible inserts an unknown address as an empty text."""
    (entry,) = make_plan(gateway, ("sandbox", {"name": ["web"], "network": {option: ["10.0.0.1", address]}}))
    assert entry["unknown"] == [f"only if network.{option} contains {address!r} in the run, too"], entry
    assert f"network.{option} contains {address!r}" in entry["failure"]["message"]


def test_snapshots_of_a_volume_are_compared(gateway: MemoryGateway, client: Client) -> None:
    remove_task = ("volume", {"name": ["data"], "state": "absent", "purge": True})
    (entry,) = make_plan(gateway, remove_task)
    client.post("/volumes/data/snapshots", {"name": "precious"})
    before = read_state(client)
    assert "the snapshots of volume 'data' have changed" in apply_task(client, remove_task, entry)["msg"]
    assert read_state(client) == before


def test_volume_snapshots_created_by_the_run_itself_are_known(gateway: MemoryGateway, client: Client) -> None:
    mount = ("sandbox", {"name": ["web"], "volumes": [{"name": "data", "path": "/srv/data"}]})
    assert run_task(client, *mount)["changed"]
    tasks = [
        ("volume", {"name": ["data"], "snapshots": ["tuesday"]}),
        ("snapshot", {"name": ["with-data"], "sandbox": ["web"], "volumes": ["data"]}),
        ("volume", {"name": ["data"], "size_mb": 128}),
    ]
    entries = make_plan(gateway, *tasks)
    state = make_initial_state()
    for task in tasks:
        result = apply_task(client, task, *entries, state=state)
        assert result["changed"], result


def test_a_rollback_to_a_snapshot_whose_volume_is_gone_is_refused(gateway: MemoryGateway, client: Client) -> None:
    run_task(client, "sandbox", {"name": ["web"], "volumes": [{"name": "data", "path": "/srv/data"}]})
    run_task(client, "snapshot", {"name": ["mounted"], "sandbox": ["web"]})
    run_task(client, "sandbox", {"name": ["web"], "volumes": []})
    roll_back_task = ("rollback", {"sandbox": ["web"], "snapshot": "mounted", "unless_clean": False})
    (entry,) = make_plan(gateway, roll_back_task)
    client.delete("/volumes/data", withSnapshots=True)
    before = read_state(client)
    assert "volume 'data' has been removed" in apply_task(client, roll_back_task, entry)["msg"]
    assert read_state(client) == before


def test_hosts_of_one_run_share_a_template_and_a_snapshot(gateway: MemoryGateway, client: Client) -> None:
    """Neither the order of the hosts nor sandboxes that other clients created from the template make a difference."""
    tasks = [("sandbox", {"name": [f"box-{host}"], "template": "base"}) for host in ("a", "b", "c")] + [
        ("fork", {"snapshot": "golden", "names": [f"fork-{host}"]}) for host in ("a", "b", "c")
    ]
    entries = make_plan(gateway, *tasks)
    run_task(client, "sandbox", {"name": ["stranger"], "template": "base"})
    state = make_initial_state()
    for task in reversed(tasks):
        result = apply_task(client, task, *entries, state=state)
        assert result["changed"], result


def test_a_rollback_that_proves_unnecessary_is_skipped(gateway: MemoryGateway, client: Client) -> None:
    tasks = [
        ("sandbox", {"name": ["web"], "metadata": {"a": "b"}}),
        ("snapshot", {"name": ["now"], "sandbox": ["web"]}),
        ("rollback", {"sandbox": ["web"], "snapshot": "now"}),
        ("sandbox", {"name": ["web"], "metadata": {"a": "c"}}),
    ]
    entries = make_plan(gateway, *tasks)
    entries[2]["actions"] = (
        make_plan(gateway, ROLLBACK_TASK)[0]["actions"] if not entries[2]["actions"] else entries[2]["actions"]
    )
    state = make_initial_state()
    results = [apply_task(client, task, *entries, state=state) for task in tasks]
    assert [result.get("failed") for result in results] == [None] * 4, results
    assert results[3]["changed"]


def test_names_that_contain_a_secret_are_not_masked_in_the_plan(gateway: MemoryGateway, client: Client) -> None:
    create_task = ("sandbox", {"name": ["production-db"], "template": "base", "env": {"STAGE": "production"}})
    (entry,) = make_plan(gateway, create_task)
    assert entry["created"].keys() == {"production-db"}
    assert apply_task(client, create_task, entry)["changed"]


def test_a_changed_entry_does_not_match(gateway: MemoryGateway, client: Client) -> None:
    (entry,) = make_plan(gateway, FORK_TASK)
    for path, value in (
        (("actions", 0, "verb"), "clone"),
        (("actions", 0, "request", "body", "names", 0), "try-9"),
        (("actions", 0, "changes", 0, "after", "memory_mb"), 1),
        (("reads", "/snapshots/golden"), "0123456789ab generation 0 forks 1"),
    ):
        changed_entry = copy.deepcopy(entry)
        *steps, last = path
        item = changed_entry
        for step in steps:
            item = item[step]
        assert item[last] != value
        item[last] = value
        assert apply_task(client, FORK_TASK, changed_entry)["failure"]["kind"] == "not_planned", path
    assert apply_task(client, FORK_TASK, entry)["changed"]


def test_a_volume_replaced_by_another_client_is_not_changed(gateway: MemoryGateway, client: Client) -> None:
    tasks = [("volume", {"name": ["cache"], "size_mb": size_mb}) for size_mb in (64, 128)]
    entries = make_plan(gateway, *tasks)
    state = make_initial_state()
    assert apply_task(client, tasks[0], *entries, state=state)["changed"]
    replaced_state = copy.deepcopy(state)
    assert apply_task(client, tasks[1], *entries, state=state)["changed"]
    client.delete("/volumes/cache")
    client.post("/volumes", {"name": "cache", "sizeMB": 64})
    before = read_state(client)
    result = apply_task(client, tasks[1], *entries, state=replaced_state)
    assert "volume 'cache' has been replaced" in result["msg"], result
    assert read_state(client) == before


VOLUME_SNAPSHOT = ("volume", {"name": ["data"], "snapshots": ["v1"]})
USES_OF_VOLUME_SNAPSHOT = [
    ("volume", {"name": ["data"], "rollback_to": "v1"}),
    ("volume", {"name": ["data"], "snapshots": ["monday"], "purge": True}),
    ("volume", {"name": ["data"], "absent_snapshots": ["v1"]}),
    ("volume", {"name": ["data"], "state": "absent", "purge": True}),
    ("volume", {"name": ["copy"], "from_snapshot": "data@v1"}),
]


@pytest.mark.parametrize("drift", ["none", "removed", "recreated", "made before the run"])
@pytest.mark.parametrize("task", USES_OF_VOLUME_SNAPSHOT)
def test_a_volume_snapshot_replaced_by_another_client_is_not_used(
    gateway: MemoryGateway, client: Client, task: Task, drift: str
) -> None:
    entries = make_plan(gateway, VOLUME_SNAPSHOT, task)
    state = make_initial_state()
    if drift == "made before the run":
        client.post("/volumes/data/snapshots", {"name": "v1"})
    assert apply_task(client, VOLUME_SNAPSHOT, *entries, state=state)["changed"] is (drift != "made before the run")
    if drift in ("removed", "recreated"):
        client.delete("/volumes/data/snapshots/v1")
    if drift == "recreated":
        client.post("/volumes/data/snapshots", {"name": "v1"})
    before = read_state(client)
    result = apply_task(client, task, *entries, state=state)
    if drift == "none":
        assert result["changed"], result
    else:
        assert result["failed"] and result["failure"]["kind"] == "not_planned", result
        assert read_state(client) == before


def test_a_task_runs_while_another_host_takes_a_volume_snapshot(gateway: MemoryGateway, client: Client) -> None:
    """The other host's task has taken the snapshot but not finished yet, so the run does not know its id."""
    tasks = [("volume", {"name": ["data"], "snapshots": [f"of-{host}"]}) for host in "ab"]
    entries = make_plan(gateway, *tasks)
    state = make_initial_state()
    assert apply_task(client, tasks[0], *entries, state=copy.deepcopy(state))["changed"]
    result = apply_task(client, tasks[1], *entries, state=state)
    assert result["changed"], result


@pytest.mark.parametrize("diverged_names", [["web"], ["other"], ["web", "other"], []])
@pytest.mark.parametrize("kind", ["rollback", "snapshot"])
def test_only_the_sandboxes_that_have_diverged_are_rolled_back_or_captured(
    gateway: MemoryGateway, client: Client, kind: str, diverged_names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["web", "other"]
    run_task(client, "rollback", {"sandbox": ["other"], "snapshot": "golden", "unless_clean": False})
    task: Task = ("rollback", {"sandbox": names, "snapshot": "golden"})
    if kind == "snapshot":
        run_task(client, "snapshot", {"name": ["now-web", "now-other"], "sandbox": names})
        task = ("snapshot", {"name": ["new-web", "new-other"], "sandbox": names, "when_changed": True})
    original_get = Client.get

    def get(self: Client, path: str, **query: Any) -> Any:
        data = original_get(self, path, **query)
        if path in ("/sandboxes/web", "/sandboxes/other"):
            data["diverged"] = None if self.is_planning else data["name"] in diverged_names
        return data

    monkeypatch.setattr(Client, "get", get)
    (entry,) = make_plan(gateway, task)
    assert len(entry["actions"]) == 2, entry
    result = apply_task(client, task, entry)
    monkeypatch.undo()
    assert not result.get("failed"), result
    changed_names = [outcome["name"] for outcome in result["outcomes"] if outcome["changed"]]
    results = {name: name if kind == "rollback" else f"new-{name}" for name in names}
    assert changed_names == [results[name] for name in names if name in diverged_names]
    assert result[PLAN_KEY]["unneeded"] == [results[name] for name in names if name not in diverged_names]


ROLL_BACK_UNLESS_CLEAN_TASK = ("rollback", {"sandbox": ["web"], "snapshot": "golden", "backup_name": ["backup"]})
CAPTURE_WHEN_CHANGED_TASK = ("snapshot", {"name": ["new"], "sandbox": ["web"], "when_changed": True})


@pytest.mark.parametrize("guest_writes", [False, True])
@pytest.mark.parametrize("task", [ROLL_BACK_UNLESS_CLEAN_TASK, CAPTURE_WHEN_CHANGED_TASK])
def test_a_plan_allows_the_actions_that_a_sandbox_needs_if_it_has_diverged_by_then(
    gateway: MemoryGateway, client: Client, task: Task, guest_writes: bool
) -> None:
    """The disk does not show what the guest has in its cache, or writes before the run."""
    assert client.get("/sandboxes/web")["diverged"] is False
    planner = Client(gateway.unix_url)
    try:
        assert planner.enter_plan(f"approved-plan-{next(_runs):06}")
        result = run_task(planner, *task, check=True)
    finally:
        client.delete(f"/plans/{planner.plan_id}")
        planner.close()
    entry = json.loads(json.dumps(result[PLAN_KEY]))
    assert result["changed"] is False and result["diff"] == {"before": {}, "after": {}}, result
    assert result.get("sandbox", {}).get("diverged") is None, result
    assert len(entry["actions"]) == 1
    assert "only if sandbox web has diverged by then, which its disk does not show" in entry["unknown"], entry
    if guest_writes:
        gateway.machine("web").state["k"] = "v"
    result = apply_task(client, task, entry)
    assert not result.get("failed") and result["changed"] is guest_writes, result


def test_a_refusal_that_depends_on_an_unexpected_change_is_not_predicted(
    gateway: MemoryGateway, client: Client
) -> None:
    (entry,) = make_plan(gateway, ("rollback", {**ROLL_BACK_UNLESS_CLEAN_TASK[1], "backup_name": ["idle"]}))
    assert entry["failure"] is None and entry["actions"] == [], entry
    assert entry["unknown"] == ["only if sandbox web has diverged by then, which its disk does not show"]


@pytest.mark.parametrize("guest_writes", [False, True])
def test_a_rollback_that_depends_on_the_guest_does_not_stop_later_tasks(tmp_path: Path, guest_writes: bool) -> None:
    """On a host whose snapshots depend on one another, a rollback changes the users of the snapshot."""
    gateway = MemoryGateway(tmp_path, DependentSnapshotsHost(), log={"level": "error"})
    client = Client(gateway.unix_url)
    try:
        gateway.build_template("base")
        run_task(client, "sandbox", {"name": ["web", "other"], "template": "base"})
        run_task(client, "snapshot", {"name": ["golden"], "sandbox": ["web"]})
        tasks = [("rollback", {"sandbox": ["web"], "snapshot": "golden"}), FORK_TASK]
        entries = make_plan(gateway, *tasks)
        if guest_writes:
            gateway.machine("web").state["k"] = "v"
        state = make_initial_state()
        results = [apply_task(client, task, *entries, state=state) for task in tasks]
        assert [result["changed"] for result in results] == [guest_writes, True], results
    finally:
        client.close()
        gateway.end()


def make_export(snapshot: str, file: Path) -> Task:
    return "snapshot", {"name": [snapshot], "export_to": str(file)}


@pytest.mark.parametrize("before", ["", "idle"], ids=["no file", "a file"])
def test_an_export_does_not_replace_another_clients_later_export(
    gateway: MemoryGateway, client: Client, tmp_path: Path, before: str
) -> None:
    file = tmp_path / "file"
    if before:
        assert run_task(client, *make_export(before, file))["changed"]
    (entry,) = make_plan(gateway, make_export("golden", file))
    assert run_task(client, "snapshot", {"name": ["late"], "sandbox": ["other"], "export_to": str(file)})["changed"]
    contents, late_id = file.read_bytes(), client.get("/snapshots/late")["snapshotID"]
    result = apply_task(client, make_export("golden", file), entry)
    assert result["failure"]["kind"] == "not_planned" and not result["changed"]
    assert f"{file} now contains snapshot {late_id}, but contained " in result["msg"]
    assert file.read_bytes() == contents


def test_an_export_replaces_the_planned_snapshot_and_the_runs_own_exports(
    gateway: MemoryGateway, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    new_snapshot = ("snapshot", {"name": ["new"], "sandbox": ["web"], "export_to": str(file)})
    tasks = [new_snapshot, make_export("golden", file), make_export("idle", file)]
    for is_removed in (True, False):
        assert run_task(client, "snapshot", {"name": ["late"], "sandbox": ["web"], "export_to": str(file)})["changed"]
        entries = make_plan(gateway, *tasks)
        if is_removed:
            file.unlink()
        state = make_initial_state()
        for task in tasks:
            result = apply_task(client, task, *entries, state=state)
            assert result["changed"], result.get("msg")
        assert not run_task(client, *make_export("idle", file))["changed"]
        for name in ("new", "late"):
            assert run_task(client, "snapshot", {"name": [name], "state": "absent"})["changed"]


def test_a_repeated_export_is_not_needed(gateway: MemoryGateway, client: Client, tmp_path: Path) -> None:
    """Several hosts can export one snapshot to a file on the control node. Only one of them finds no such file."""
    for index, export in enumerate((make_export, make_volume_export)):
        name = ("golden", "monday")[index]
        file, other_file = tmp_path / f"file-{index}", tmp_path / f"other-{index}"
        tasks = [export(name, file), export(name, file), export(name, other_file)]
        entries = mark_dependent_entries(make_plan(gateway, *tasks))
        changed_name = ("golden", "data")[index]
        assert [entry["unknown"] for entry in entries] == [
            [],
            [f"only if {file} does not contain {changed_name} by then"],
            [],
        ]
        state = make_initial_state()
        results = [apply_task(client, task, *entries, state=state) for task in tasks[:2]]
        assert [result["changed"] for result in results] == [True, False], results
        assert not results[1].get("failed"), results[1]
        assert run_task(client, *tasks[2])["changed"]
        assert "someone else" in apply_task(client, tasks[2], *entries, state=state)["msg"]


def make_volume_export(snapshot: str, file: Path) -> Task:
    return "volume", {"name": ["data"], "snapshots": [snapshot], "export_to": str(file)}


def test_an_export_of_a_volume_replaces_only_the_planned_snapshot_and_those_of_the_run(
    gateway: MemoryGateway, client: Client, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    assert run_task(client, *make_volume_export("one", file))["changed"]
    tasks = [make_volume_export("two", file), make_volume_export("three", file)]
    entries = make_plan(gateway, *tasks)
    contents = file.read_bytes()
    other_export = ("volume", {"name": ["cache"], "size_mb": 64, "snapshots": ["late"], "export_to": str(file)})
    assert run_task(client, *other_export)["changed"]
    late_id = client.get("/volumes/cache/snapshots")[0]["snapshotID"]
    result = apply_task(client, tasks[0], *entries)
    assert result["failure"]["kind"] == "not_planned" and f"{file} now contains snapshot {late_id}" in result["msg"]
    file.write_bytes(contents)
    state = make_initial_state()
    for task in tasks:
        result = apply_task(client, task, *entries, state=state)
        assert result["changed"], result.get("msg")
    assert not run_task(client, *tasks[1])["changed"]
