"""The modules with a registry: what check mode predicts, what the run does, and that a second run changes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _fork, _snapshot, _template
from ansible_collections.grove.sandbox.plugins.module_utils._approval import (
    make_approved_option,
    make_initial_state,
    update_state,
)
from ansible_collections.grove.sandbox.plugins.module_utils._artifacts import replace_tag
from ansible_collections.grove.sandbox.plugins.module_utils._run import PLAN_KEY, run

from tests.support.artifact_registry import Registry, get_signer, read, registry_started, running_gateway, take, write
from tests.support.memory_gateway import READ_KEY, MemoryGateway

_run_numbers = itertools.count()


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registry_started(tmp_path_factory.mktemp("registry")) as registry:
        yield registry


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory, registry: Registry) -> Iterator[MemoryGateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), registry) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def shared_other_gateway(tmp_path_factory: pytest.TempPathFactory, registry: Registry) -> Iterator[MemoryGateway]:
    with running_gateway(tmp_path_factory.mktemp("other"), registry) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared_gateway: MemoryGateway) -> Iterator[MemoryGateway]:
    yield shared_gateway
    shared_gateway.clear()


@pytest.fixture
def other_gateway(shared_other_gateway: MemoryGateway) -> Iterator[MemoryGateway]:
    yield shared_other_gateway
    shared_other_gateway.clear()


@pytest.fixture
def client(gateway: MemoryGateway) -> Iterator[httpx.Client]:
    """A client of the gateway, which has the sandbox `source`."""
    with gateway.client() as client:
        client.post("/sandboxes", json={"templateID": "base", "name": "source"}).raise_for_status()
        yield client


@pytest.fixture
def reference(registry: Registry) -> str:
    """A reference that no other test uses."""
    return f"{registry.address}/team/env-{next(_run_numbers)}:before"


def run_task(kind: Any, gateway: MemoryGateway, *, check: bool = False, check_run: str = "", **options: Any) -> Any:
    defaults = {name: option.get("default") for name, option in kind.ARGUMENTS.items()}
    params = {"gateway_url": gateway.unix_url, **options}
    if check:
        params["check_run"] = check_run or f"a check-mode run with artifacts {next(_run_numbers)}"
    return run(kind, {**defaults, **params}, check_mode=check)


def run_thrice(kind: Any, gateway: MemoryGateway, **options: Any) -> list[tuple[bool, list[str]]]:
    """Return, for check mode, the run and another run, whether something changed, and the actions."""
    results = [run_task(kind, gateway, check=check, **options) for check in (True, False, False)]
    assert not any(result.get("failed") for result in results), results
    actions = [[verb for outcome in result["outcomes"] for verb in outcome["actions"]] for result in results]
    return [(result["changed"], each) for result, each in zip(results, actions, strict=True)]


def changed(*actions: str) -> list[tuple[bool, list[str]]]:
    return [(True, [*actions]), (True, [*actions]), (False, [])]


def test_a_snapshot_is_pushed_once(gateway: MemoryGateway, client: httpx.Client, reference: str) -> None:
    options = {"name": ["taken"], "sandbox": ["source"], "push_to": reference}
    assert run_thrice(_snapshot, gateway, **options) == changed("capture", "push")
    # The tag names another snapshot, which is replaced.
    two = take(client, "two")
    assert run_thrice(_snapshot, gateway, name=["two"], push_to=reference) == changed("push")
    assert client.get("/artifacts", params={"reference": reference}).json()["snapshotID"] == two["snapshotID"]
    # The artifact lacks the memory.
    body = {"reference": f"{reference}-disk", "memory": "none"}
    transfer = client.post("/snapshots/two/push", json=body).json()
    while client.get(f"/transfers/{transfer['transferID']}").json()["status"] == "running":
        pass
    assert run_thrice(_snapshot, gateway, name=["two"], push_to=f"{reference}-disk") == changed("push")


def test_a_snapshot_is_pulled_once(
    gateway: MemoryGateway, other_gateway: MemoryGateway, client: httpx.Client, reference: str
) -> None:
    write(client, "color", "blue")
    assert run_task(_snapshot, gateway, name=["taken"], sandbox=["source"], push_to=reference)["changed"]
    options: dict[str, Any] = {"name": ["pulled"], "pull_from": reference}
    refusal = run_task(_snapshot, other_gateway, **options)
    assert refusal["failure"]["kind"] == "untrusted"
    assert run_task(_snapshot, other_gateway, check=True, **options)["failure"]["kind"] == "untrusted"
    options["trust"] = [get_signer(client)]
    assert run_thrice(_snapshot, other_gateway, **options) == changed("pull")
    with other_gateway.client() as other_client:
        other_client.post("/snapshots/pulled/fork", json={"name": "copy"}).raise_for_status()
        assert read(other_client, "color", "copy") == "blue"
    # The tag is moved: the existing snapshot is not replaced silently.
    assert run_task(_snapshot, gateway, name=["two"], sandbox=["source"], push_to=reference)["changed"]
    refusal = run_task(_snapshot, other_gateway, **options)
    assert refusal["failure"]["kind"] == "conflict" and "contains snapshot" in refusal["msg"]
    # A snapshot can outlive its artifact.
    gone = {**options, "pull_from": f"{reference}-gone"}
    assert not run_task(_snapshot, other_gateway, **gone)["changed"]
    with other_gateway.client() as other_client:
        other_client.post("/sandboxes/copy/snapshots", json={"name": "captured"}).raise_for_status()
    assert run_task(_snapshot, other_gateway, **{**options, "name": ["captured"]})["failure"]["kind"] == "conflict"


def test_a_template_is_pulled_once_and_replaced_when_the_tag_moves(
    gateway: MemoryGateway, other_gateway: MemoryGateway, client: httpx.Client, reference: str
) -> None:
    def push_template(name: str) -> None:
        transfer = client.post(f"/templates/{name}/push", json={"reference": reference}).json()
        while client.get(f"/transfers/{transfer['transferID']}").json()["status"] == "running":
            pass

    push_template("base")
    options = {"name": ["tool"], "artifact": reference, "trust": [get_signer(client)]}
    assert run_thrice(_template, other_gateway, **options) == changed("pull")
    assert run_thrice(_template, other_gateway, **options, prewarm=1) == changed("prewarm")
    gateway.build_template("newer", packages=["curl"])
    push_template("newer")
    assert run_thrice(_template, other_gateway, **options, prewarm=2) == changed("pull", "prewarm")
    # The template of a recipe is replaced, too, and the other way round.
    recipe_options = {"name": ["tool"], "packages": ["git"]}
    assert run_thrice(_template, other_gateway, **recipe_options) == changed("build")
    assert run_thrice(_template, other_gateway, **options, **{"from": "artifact"}) == changed("pull")
    refusal = run_task(_snapshot, other_gateway, name=["new"], pull_from=reference, trust=options["trust"])
    assert refusal["failure"]["kind"] == "invalid" and "sandbox_template" in refusal["msg"]


def test_check_mode_continues_with_what_it_would_pull(
    gateway: MemoryGateway, client: httpx.Client, reference: str
) -> None:
    assert run_task(_snapshot, gateway, name=["taken"], sandbox=["source"], push_to=reference)["changed"]
    sources = len(gateway.host.sources)
    session: dict[str, Any] = {"check": True, "check_run": f"a check-mode run {reference}"}
    result = run_task(_snapshot, gateway, **session, name=["copy"], pull_from=reference)
    assert result["changed"] and result["snapshot"]["id"].startswith("known-after-apply-")
    assert run_task(_fork, gateway, **session, snapshot="copy", names=["fork"])["changed"]
    assert not run_task(_snapshot, gateway, **session, name=["copy"], pull_from=reference)["changed"]
    missing = run_task(_snapshot, gateway, **session, name=["other"], pull_from=f"{reference}-missing")
    assert missing["failure"]["kind"] == "not_found"
    assert missing[PLAN_KEY]["unknown"] == [f"only if no earlier task of the run pushes {reference}-missing"]
    assert client.get("/snapshots/copy").status_code == 404 and len(gateway.host.sources) == sources


def test_a_plan_with_several_pushes_to_one_tag_is_applied(
    gateway: MemoryGateway, client: httpx.Client, reference: str
) -> None:
    for name in ("one", "two", "three"):
        take(client, name)
    assert run_task(_snapshot, gateway, name=["three"], push_to=reference)["changed"]
    tasks = [{"name": [name], "push_to": reference} for name in ("one", "one", "two")]
    session: dict[str, Any] = {"check": True, "check_run": f"a check-mode run {reference}"}
    entries = [run_task(_snapshot, gateway, **session, **task)[PLAN_KEY] for task in tasks]
    assert [[action["verb"] for action in entry["actions"]] for entry in entries] == [["push"]] * 3

    def apply(state: dict[str, Any], task: dict[str, Any]) -> Any:
        result = run_task(_snapshot, gateway, **task, approved_plan=make_approved_option(entries, {}, state))
        if PLAN_KEY in result:
            update_state(state, result[PLAN_KEY])
        return result

    assert run_task(_snapshot, gateway, name=["two"], push_to=reference)["changed"]
    refusal = apply(make_initial_state(), tasks[0])
    assert refusal["failure"]["kind"] == "not_planned" and f"{reference} now contains artifact" in refusal["msg"]
    assert run_task(_snapshot, gateway, name=["three"], push_to=reference)["changed"]
    state = make_initial_state()
    results = [apply(state, task) for task in tasks]
    assert [result["changed"] for result in results] == [True, False, True], results


def test_check_mode_needs_a_key_with_the_scope_admin(
    gateway: MemoryGateway, client: httpx.Client, reference: str
) -> None:
    take(client)
    options = {"gateway_url": gateway.url, "gateway_token": READ_KEY, "name": ["taken"], "push_to": reference}
    assert run_task(_snapshot, gateway, check=True, **options)["failure"]["kind"] == "forbidden"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (_snapshot, {"name": ["a", "b"], "push_to": "r/a:b"}, "an artifact contains one snapshot"),
        (_snapshot, {"name": ["a"], "push_to": "r/a:b", "state": "absent"}, "state: absent"),
        (_snapshot, {"name": ["a"], "pull_from": "r/a:b", "memory": "none"}, "not valid with pull_from"),
        (_snapshot, {"name": ["a"], "sandbox": ["b"], "trust": ["0" * 64]}, "trust is valid only"),
        (_snapshot, {"name": ["a"], "sandbox": ["b"], "push_to": "r/a:b", "when_changed": True}, "when_changed"),
        (_template, {"name": ["a", "b"], "artifact": "r/a:b"}, "an artifact contains one template"),
        (_template, {"name": ["a"], "artifact": "r/a:b", "from": "image"}, "from: image"),
        (_template, {"name": ["a"], "artifact": "r/a:b", "state": "absent"}, "state: absent"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    gateway: MemoryGateway, kind: Any, options: dict[str, Any], message: str
) -> None:
    refusal = run_task(kind, gateway, **options)
    assert refusal["failed"] and message in refusal["msg"]


@pytest.mark.parametrize(
    ("reference", "by_digest"),
    [
        ("r.example/a/b:c", "r.example/a/b@sha256:x"),
        ("r.example:5000/b:c", "r.example:5000/b@sha256:x"),
        ("r.example:5000/b", "r.example:5000/b@sha256:x"),
        ("r.example/b@sha256:y", "r.example/b@sha256:x"),
        ("r.example/b:c@sha256:y", "r.example/b@sha256:x"),
    ],
)
def test_a_tag_is_replaced_by_a_digest(reference: str, by_digest: str) -> None:
    assert replace_tag(reference, "sha256:x") == by_digest
