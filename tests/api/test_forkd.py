"""Test forkd's API on a running gateway, partly with the published client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forkd
import httpx
import pytest

from sandbox_gateway.api.forkd import shapes
from sandbox_gateway.engine.agent_client import AgentClient
from sandbox_gateway.errors import BackendFailed, Invalid, NoSpace
from sandbox_gateway.records import MemoryMode, Sandbox, Snapshot
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway

Json = dict[str, Any]


@pytest.fixture
def client(memory_gateway: MemoryGateway) -> forkd.Controller:
    return forkd.Controller(base_url=memory_gateway.url, token=ADMIN_KEY)


@pytest.fixture
def sandbox_id(api: httpx.Client) -> str:
    """The id of a sandbox created from the template `base`."""
    return spawn_sandboxes(api)[0]["id"]


def spawn_sandboxes(api: httpx.Client, tag: str = "base", **body: Any) -> list[Json]:
    response = api.post("/v1/sandboxes", json={"snapshot_tag": tag, **body})
    assert response.status_code == 201, response.text
    sandboxes: list[Json] = response.json()
    return sandboxes


def create_branch(api: httpx.Client, sandbox: str, **body: Any) -> Json:
    response = api.post(f"/v1/sandboxes/{sandbox}/branch", json=body)
    assert response.status_code == 201, response.text
    snapshot: Json = response.json()
    return snapshot


def check_refusal(response: httpx.Response, status: int) -> str:
    """Check that the request was refused with this status, and return the error message."""
    assert response.status_code == status, response.text
    message: str = response.json()["error"]
    return message


def list_tags(api: httpx.Client) -> set[str]:
    return {snapshot["tag"] for snapshot in api.get("/v1/snapshots").json()}


def test_health_needs_no_key_but_version_does(memory_gateway: MemoryGateway) -> None:
    with memory_gateway.client("") as keyless_client, memory_gateway.client(READ_KEY) as reader:
        assert keyless_client.get("/healthz").json() == {"ok": True}
        assert "API key" in check_refusal(keyless_client.get("/version"), 401)
        assert reader.get("/version").json() == {"version": reader.get("/health").json()["version"], "api": "v1"}


def test_forkd_routes_need_a_key_of_sufficient_scope(memory_gateway: MemoryGateway, sandbox_id: str) -> None:
    with memory_gateway.client(READ_KEY) as reader, memory_gateway.client(EXEC_KEY) as runner:
        for verb, body in (("exec", {"args": ["exit", "0"]}), ("eval", {"code": "1"}), ("ping", {})):
            assert runner.post(f"/v1/sandboxes/{sandbox_id}/{verb}", json=body).status_code == 200
            assert reader.post(f"/v1/sandboxes/{sandbox_id}/{verb}", json=body).status_code == 403
        for caller in (reader, runner):
            assert caller.get(f"/v1/sandboxes/{sandbox_id}").status_code == 200
            assert caller.post(f"/v1/sandboxes/{sandbox_id}/branch").status_code == 403
            assert caller.delete(f"/v1/sandboxes/{sandbox_id}").status_code == 403
            assert caller.post("/v1/sandboxes", json={"snapshot_tag": "base"}).status_code == 403


def test_all_calls_of_the_published_client_succeed(client: forkd.Controller) -> None:
    (first_sandbox,) = client.spawn_sandboxes("base", per_child_netns=True, prewarm=True, hugepages=True)
    assert first_sandbox["snapshot_tag"] == "base" and first_sandbox["guest_addr"].endswith(":8888")
    assert client.get_sandbox(first_sandbox["id"]) == first_sandbox and client.list_sandboxes() == [first_sandbox]
    assert client.eval_code(first_sandbox["id"], "counter = 41") == {"result": "None", "error": None, "exit_code": 0}
    checkpoint = client.branch_sandbox(first_sandbox["id"], tag="checkpoint-1", mode="full")
    assert (
        checkpoint["branched_from"] == first_sandbox["id"]
        and checkpoint["status"] == "ready"
        and checkpoint["bootable"]
    )
    second_branch = client.branch_sandbox(first_sandbox["id"], diff=True, wait=False)
    assert (
        second_branch["status"] == "ready"
        and second_branch["diff_physical_bytes"] < second_branch["diff_logical_bytes"]
    )
    children = client.spawn_sandboxes(checkpoint["tag"], n=3)
    assert [client.eval_code(child["id"], "counter + 1")["result"] for child in children] == ["42"] * 3
    assert client.exec_command(children[0]["id"], ["exit", "3"]) == {
        "stdout": "",
        "stderr": "leaving\n",
        "exit_code": 3,
    }
    assert client.ping_sandbox(children[1]["id"])["pong"] is True
    for sandbox in (first_sandbox, *children):
        client.kill_sandbox(sandbox["id"])
    assert client.list_sandboxes() == []
    for tag in (checkpoint["tag"], second_branch["tag"]):
        client.delete_snapshot(tag)
    assert [snapshot["tag"] for snapshot in client.list_snapshots()] == ["base"]
    with pytest.raises(forkd.ControllerError) as error_info:
        client.get_sandbox(first_sandbox["id"])
    assert error_info.value.status == 404 and "not found" in error_info.value.body["error"]


@pytest.mark.parametrize("mode", [each for each in MemoryMode if each is not MemoryMode.NONE])
def test_incremental_captures_report_their_size(mode: MemoryMode) -> None:
    info = shapes.describe_snapshot(Snapshot(memory=mode, memory_bytes_written=4096), "cp", {"dir": "/memory"})
    assert info.diff_physical_bytes == (None if mode is MemoryMode.FULL else 4096)


def test_a_branch_returns_its_snapshot(memory_gateway: MemoryGateway, api: httpx.Client, sandbox_id: str) -> None:
    branch = create_branch(api, sandbox_id, tag="cp_1")
    snapshot_id = memory_gateway.engine.snapshots.get("cp_1").id
    assert branch.pop("created_at_unix") > 1_700_000_000
    assert branch == {
        "tag": "cp_1",
        "id": snapshot_id,
        "dir": f"/memory/{snapshot_id}",
        "branched_from": sandbox_id,
        "pause_ms": 7,
        "diff_physical_bytes": 4096,
        "diff_logical_bytes": 256 << 20,
        "status": "ready",
        "bootable": True,
    }
    spawn_sandboxes(api, "cp_1")
    details = api.get("/v1/snapshots/cp_1/info").json()
    assert details["memory_logical_bytes"] == 256 << 20 and details["memory_physical_bytes"] == 4096
    assert details["sandboxes"] == [each["id"] for each in api.get("/v1/sandboxes").json() if each["id"] != sandbox_id]


def test_a_template_is_a_snapshot_without_a_sandbox(api: httpx.Client) -> None:
    (template,) = api.get("/v1/snapshots").json()
    assert template["tag"] == "base" and template["bootable"] is True
    assert "branched_from" not in template and "pause_ms" not in template


def test_a_snapshot_with_an_invalid_tag_is_listed_by_id(api: httpx.Client, sandbox_id: str) -> None:
    named_id = api.post(f"/sandboxes/{sandbox_id}/snapshots", json={"name": "v1.0"}).json()["snapshotID"]
    unnamed_id = api.post(f"/sandboxes/{sandbox_id}/snapshots", json={}).json()["snapshotID"]
    assert list_tags(api) == {"base", named_id, unnamed_id}
    assert (
        spawn_sandboxes(api, "v1.0")[0]["snapshot_tag"] == spawn_sandboxes(api, named_id)[0]["snapshot_tag"] == named_id
    )


def test_branch_numbers_are_not_reused(memory_gateway: MemoryGateway, api: httpx.Client, sandbox_id: str) -> None:
    first_branch, second_branch = create_branch(api, sandbox_id), create_branch(api, sandbox_id)
    assert [first_branch["tag"], second_branch["tag"]] == [f"branch-{sandbox_id}-1", f"branch-{sandbox_id}-2"]
    create_branch(api, sandbox_id, tag=f"branch-{sandbox_id}-3")
    assert api.delete(f"/v1/snapshots/{second_branch['tag']}").status_code == 204
    assert create_branch(api, sandbox_id)["tag"] == f"branch-{sandbox_id}-4", "numbers 2 and 3 were used"
    api.delete(f"/v1/snapshots/branch-{sandbox_id}-4")
    stored_sandbox = Sandbox.model_validate_json(memory_gateway.host.saved_sandboxes[sandbox_id].model_dump_json())
    assert stored_sandbox.branches == 4, "the record, which a restarted gateway reads, contains the number"
    api.post(f"/sandboxes/{sandbox_id}/pause").raise_for_status()
    assert "paused" in check_refusal(api.post(f"/v1/sandboxes/{sandbox_id}/branch"), 409)
    api.post(f"/sandboxes/{sandbox_id}/resume").raise_for_status()
    assert create_branch(api, sandbox_id)["tag"] == f"branch-{sandbox_id}-5"


def test_invalid_tags_are_refused(api: httpx.Client, sandbox_id: str) -> None:
    for tag in ("", "a" * 65, "a b", "../etc", "v1.0", "ä", "-x", "_x", "x\n"):
        message = check_refusal(api.post(f"/v1/sandboxes/{sandbox_id}/branch", json={"tag": tag}), 400)
        assert "1 to 64 letters, digits" in message, tag
    assert list_tags(api) == {"base"}


def test_a_tag_in_use_is_refused_without_changes(api: httpx.Client, sandbox_id: str) -> None:
    create_branch(api, sandbox_id, tag="cp")
    sandbox_before = api.get(f"/sandboxes/{sandbox_id}").json()
    for used_tag in ("cp", "base", sandbox_id):
        assert used_tag in check_refusal(api.post(f"/v1/sandboxes/{sandbox_id}/branch", json={"tag": used_tag}), 409)
    assert api.get(f"/sandboxes/{sandbox_id}").json() == sandbox_before
    assert list_tags(api) == {"base", "cp"}


def test_only_one_of_several_concurrent_branches_gets_a_tag(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    sandbox_ids = [each["id"] for each in spawn_sandboxes(api, n=4)]

    def try_branch(sandbox_id: str) -> int:
        with memory_gateway.client(ADMIN_KEY) as client:
            return client.post(f"/v1/sandboxes/{sandbox_id}/branch", json={"tag": "cp"}).status_code

    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(try_branch, sandbox_ids)) == [201, 409, 409, 409]
    assert len(memory_gateway.engine.snapshots.list()) == 1


def test_concurrent_branches_get_distinct_numbers(memory_gateway: MemoryGateway, sandbox_id: str) -> None:
    def try_branch(_: int) -> str:
        with memory_gateway.client(ADMIN_KEY) as client:
            tag: str = client.post(f"/v1/sandboxes/{sandbox_id}/branch", json={}).json()["tag"]
            return tag

    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(try_branch, range(5))) == [f"branch-{sandbox_id}-{number}" for number in range(1, 6)]


def test_unsupported_branch_options_are_refused(api: httpx.Client, sandbox_id: str) -> None:
    create_branch(api, spawn_sandboxes(api)[0]["id"], tag="other")
    for body, words in (
        ({"mode": "live"}, "is paused"),
        ({"live": True}, "is paused"),
        ({"mode": "diff", "diff": True}, "mutually exclusive"),
        ({"mode": "full", "diff": True}, "mutually exclusive"),
        ({"diff": True, "live": True}, "mutually exclusive"),
        ({"diff": True, "measure_diff": True}, "measure_diff"),
        ({"mode": "fast"}, "mode"),
        ({"parent_tag": "base"}, "valid only with mode diff"),
        ({"mode": "diff", "parent_tag": "other"}, "was made from base"),
    ):
        assert words in check_refusal(api.post(f"/v1/sandboxes/{sandbox_id}/branch", json=body), 400)
    assert list_tags(api) == {"base", "other"}


def test_supported_branch_options_are_accepted(api: httpx.Client, sandbox_id: str) -> None:
    api.post(f"/v1/sandboxes/{sandbox_id}/branch").raise_for_status()
    create_branch(api, sandbox_id, mode="full", measure_diff=True, wait=False)
    create_branch(api, sandbox_id, mode="diff", parent_tag="base", tag="cp")
    create_branch(api, sandbox_id, diff=True, parent_tag="cp")
    assert "not found" in check_refusal(
        api.post(f"/v1/sandboxes/{sandbox_id}/branch", json={"diff": True, "parent_tag": "x"}), 404
    )


def test_branching_a_missing_sandbox_fails(api: httpx.Client) -> None:
    for body in ({}, {"tag": "base"}, {"tag": "new"}):
        assert "'nothing' not found" in check_refusal(api.post("/v1/sandboxes/nothing/branch", json=body), 404)


@pytest.mark.parametrize(("failure", "status"), [(BackendFailed("no pause"), 500), (NoSpace("the disk is full"), 507)])
def test_a_failed_capture_leaves_no_snapshot(
    memory_gateway: MemoryGateway,
    api: httpx.Client,
    sandbox_id: str,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
    status: int,
) -> None:
    async def fail(*_: object, **__: object) -> Snapshot:
        raise failure

    with monkeypatch.context() as patches:
        patches.setattr(memory_gateway.host, "capture", fail)
        assert str(failure) in check_refusal(api.post(f"/v1/sandboxes/{sandbox_id}/branch", json={"tag": "cp"}), status)
        check_refusal(api.post(f"/v1/sandboxes/{sandbox_id}/branch"), status)
    assert list_tags(api) == {"base"} and api.post(f"/v1/sandboxes/{sandbox_id}/ping").status_code == 200
    create_branch(api, sandbox_id, tag="cp")
    assert create_branch(api, sandbox_id)["tag"] == f"branch-{sandbox_id}-2", (
        "the number of a failed branch is not used again"
    )


def test_a_source_that_dies_during_a_capture_leaves_a_valid_snapshot(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patches:
        patches.setattr(
            memory_gateway.host,
            "find_end_reason",
            lambda _: "it stopped" if list_engine_tags(memory_gateway) else "",
        )
        message = check_refusal(api.post(f"/v1/sandboxes/{sandbox_id}/branch", json={"tag": "cp"}), 500)
    assert "valid" in message and "source sandbox stopped" in message
    spawn_sandboxes(api, "cp")


def list_engine_tags(memory_gateway: MemoryGateway) -> list[str]:
    return [name for snapshot in memory_gateway.engine.snapshots.list() for name in snapshot.names]


def test_creating_several_sandboxes_is_all_or_nothing(
    memory_gateway: MemoryGateway, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandboxes = spawn_sandboxes(api, n=5)
    assert len({each["id"] for each in sandboxes}) == len({each["guest_addr"] for each in sandboxes}) == 5
    for n in (0, 1001, -1, "2", True):
        assert "n: " in check_refusal(api.post("/v1/sandboxes", json={"snapshot_tag": "base", "n": n}), 400)
    assert "not found" in check_refusal(api.post("/v1/sandboxes", json={"snapshot_tag": "gone"}), 404)
    assert "snapshot_tag" in check_refusal(api.post("/v1/sandboxes", json={}), 400)
    original_fork, fork_numbers = memory_gateway.host.fork, iter(range(10))

    async def fail_second_fork(*args: Any, **kwargs: Any) -> None:
        if next(fork_numbers) == 1:
            raise BackendFailed("no machine")
        await original_fork(*args, **kwargs)

    monkeypatch.setattr(memory_gateway.host, "fork", fail_second_fork)
    assert "no machine" in check_refusal(api.post("/v1/sandboxes", json={"snapshot_tag": "base", "n": 3}), 500)
    assert len(api.get("/v1/sandboxes").json()) == 5


def test_unsupported_options_are_refused(api: httpx.Client) -> None:
    for body, words in (({"live_fork": True}, "live_fork"), ({"memory_limit_mib": 512}, "256 MiB of memory")):
        assert words in check_refusal(api.post("/v1/sandboxes", json={"snapshot_tag": "base", **body}), 400)
    assert spawn_sandboxes(api, memory_limit_mib=256)[0]["memory_limit_mib"] == 256
    assert len(api.get("/v1/sandboxes").json()) == 1


def test_a_timeout_sets_the_end_of_a_sandbox(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    (unlimited_sandbox,), (limited_sandbox,) = spawn_sandboxes(api), spawn_sandboxes(api, timeout=60)
    assert memory_gateway.engine.sandboxes.get(unlimited_sandbox["id"]).end_at is None
    assert memory_gateway.engine.sandboxes.get(limited_sandbox["id"]).end_at is not None


def test_paused_sandboxes_have_no_address(api: httpx.Client, sandbox_id: str) -> None:
    api.post(f"/sandboxes/{sandbox_id}/pause").raise_for_status()
    info = api.get(f"/v1/sandboxes/{sandbox_id}").json()
    assert info["state"] == "paused" and info["guest_addr"] == "" and info["snapshot_tag"] == "base"
    for verb, body in (("exec", {"args": ["exit", "0"]}), ("eval", {"code": "1"}), ("ping", {})):
        assert "paused" in check_refusal(api.post(f"/v1/sandboxes/{sandbox_id}/{verb}", json=body), 409)


def test_exec_returns_output_and_exit_code(api: httpx.Client, sandbox_id: str) -> None:
    def run_command(*args: str, **options: Any) -> Json:
        response = api.post(f"/v1/sandboxes/{sandbox_id}/exec", json={"args": args, **options})
        assert response.status_code == 200, response.text
        result: Json = response.json()
        return result

    run_command("write", "k", "v")
    assert run_command("read", "k") == {"stdout": "v", "stderr": "", "exit_code": 0}
    missing_program_result = run_command("nonsense")
    assert missing_program_result["exit_code"] == 127 and "not found" in missing_program_result["stderr"]
    timeout_result = run_command("sleep", "5", timeout_secs=0.2)
    assert timeout_result["exit_code"] == 137 and "did not finish within 0.2 s" in timeout_result["stderr"]
    for body in ({"args": []}, {"args": "ls"}, {}, {"args": ["x"], "timeout_secs": 0}):
        check_refusal(api.post(f"/v1/sandboxes/{sandbox_id}/exec", json=body), 400)
    assert "not found" in check_refusal(api.post("/v1/sandboxes/nothing/exec", json={"args": ["x"]}), 404)


def test_eval_returns_the_result_or_the_error(api: httpx.Client, sandbox_id: str) -> None:
    def evaluate(code: str) -> Json:
        response = api.post(f"/v1/sandboxes/{sandbox_id}/eval", json={"code": code})
        assert response.status_code == 200, response.text
        result: Json = response.json()
        return result

    assert evaluate("x = 'ä'") == {"result": "None", "error": None, "exit_code": 0}
    assert evaluate("x * 2") == {"result": "'ää'", "error": None, "exit_code": 0}
    assert evaluate("1 / 0") == {"result": None, "error": "ZeroDivisionError: division by zero", "exit_code": 1}
    check_refusal(api.post(f"/v1/sandboxes/{sandbox_id}/eval", json={}), 400)


@pytest.mark.parametrize(
    ("result", "status", "words"),
    [
        ({"result": "1"}, 500, "invalid response"),
        (Invalid("/eval not found"), 400, "too old"),
        (Invalid("no"), 400, "no"),
    ],
)
def test_invalid_agent_responses_to_eval_are_reported(
    api: httpx.Client, sandbox_id: str, monkeypatch: pytest.MonkeyPatch, result: Json | Invalid, status: int, words: str
) -> None:
    async def respond(*_: object, **__: object) -> Json:
        if isinstance(result, Invalid):
            raise result
        return result

    with monkeypatch.context() as patches:
        patches.setattr(AgentClient, "call", respond)
        assert words in check_refusal(api.post(f"/v1/sandboxes/{sandbox_id}/eval", json={"code": "1"}), status)


def test_ping_reaches_the_agent(memory_gateway: MemoryGateway, api: httpx.Client, sandbox_id: str) -> None:
    assert api.post(f"/v1/sandboxes/{sandbox_id}/ping").json() == {"pong": True, "numpy_version": None}
    memory_gateway.loop.call_soon_threadsafe(memory_gateway.machine(sandbox_id)._server.close)  # type: ignore[union-attr]
    assert "cannot be reached" in check_refusal(api.post(f"/v1/sandboxes/{sandbox_id}/ping"), 500)


def test_a_snapshot_in_use_is_removed_only_with_force(api: httpx.Client, sandbox_id: str) -> None:
    create_branch(api, sandbox_id, tag="cp")
    (user,) = spawn_sandboxes(api, "cp")
    assert user["id"] in check_refusal(api.delete("/v1/snapshots/cp"), 409)
    for query in ("cascade=true", "cascade=true&force=true"):
        assert "cascade" in check_refusal(api.delete(f"/v1/snapshots/cp?{query}"), 400)
    assert list_tags(api) == {"base", "cp"}
    assert api.delete("/v1/snapshots/cp?force=true").status_code == 204
    assert list_tags(api) == {"base"} and "not found" in check_refusal(api.delete("/v1/snapshots/cp"), 404)
    assert api.get(f"/v1/sandboxes/{user['id']}").json()["snapshot_tag"] not in ("cp", "")
    create_branch(api, sandbox_id, tag="cp")


def get_chain(api: httpx.Client, tag: str) -> tuple[Any, ...]:
    """Return what a snapshot's details say about its chain."""
    details = api.get(f"/v1/snapshots/{tag}/info").json()
    assert details["tag"] == tag
    return details["chain_depth"], details.get("parent_tag"), details["ancestors"], details["dependents"]


def test_chains_are_the_lineage(api: httpx.Client, sandbox_id: str) -> None:
    create_branch(api, sandbox_id, tag="one")
    create_branch(api, sandbox_id, tag="two")
    (child,) = spawn_sandboxes(api, "two")
    create_branch(api, child["id"], tag="left")
    create_branch(api, sandbox_id, tag="right")
    assert get_chain(api, "base") == (0, None, [], ["one"])
    assert get_chain(api, "one") == (1, "base", ["base"], ["two"])
    assert get_chain(api, "two") == (2, "one", ["base", "one"], ["left", "right"])
    assert get_chain(api, "left") == (3, "two", ["base", "one", "two"], [])
    api.delete("/v1/snapshots/one").raise_for_status()
    api.delete("/v1/snapshots/two?force=true").raise_for_status()
    assert get_chain(api, "left") == (1, "base", ["base"], []), "neither removed nor hidden snapshots are listed"
    assert get_chain(api, "base") == (0, None, [], ["left", "right"])


def test_compact_adds_a_tag(api: httpx.Client, sandbox_id: str) -> None:
    branch = create_branch(api, sandbox_id, tag="cp")
    response = api.post("/v1/snapshots/cp/compact", json={"to": "flat"})
    assert response.status_code == 201 and response.json() == {**branch, "tag": "flat"}
    assert api.get(f"/snapshots/{branch['id']}").json()["names"] == ["cp", "flat"]
    assert [each["tag"] for each in api.get("/v1/snapshots").json()] == ["base", "cp", "flat"]
    assert get_chain(api, "flat") == get_chain(api, "cp") == (1, "base", ["base"], [])
    (user,) = spawn_sandboxes(api, "flat")
    assert api.delete("/v1/snapshots/cp").status_code == 204, "the snapshot is in use, but its tag is not"
    assert list_tags(api) == {"base", "flat"}
    assert "not found" in check_refusal(api.get("/v1/snapshots/cp/info"), 404)
    assert user["id"] in check_refusal(api.delete("/v1/snapshots/flat"), 409), "this is its last tag"
    assert api.post("/v1/snapshots/flat/compact", json={"to": "cp"}).status_code == 201, "the old tag is free"
    assert user["id"] in check_refusal(api.delete(f"/v1/snapshots/{branch['id']}"), 409), "an id stands for all tags"
    api.delete(f"/v1/snapshots/{branch['id']}?force=true").raise_for_status()
    assert list_tags(api) == {"base"}
    assert "not found" in check_refusal(api.post("/v1/snapshots/flat/compact", json={"to": "new"}), 404)


def test_compact_adds_a_tag_to_a_template(api: httpx.Client, tmp_path: Path) -> None:
    api.post("/v1/snapshots", json={"tag": "py", "rootfs": str(tmp_path)}).raise_for_status()
    (user,) = spawn_sandboxes(api, "py")
    assert api.post("/v1/snapshots/py/compact", json={"to": "flat"}).json()["tag"] == "flat"
    api.post("/templates/tags", json={"target": "flat", "tags": ["v1"]}).raise_for_status()
    assert api.get("/templates/flat").json()["names"] == ["py", "flat", "flat:v1"]
    assert api.delete("/v1/snapshots/py").status_code == 204
    assert api.get("/templates/flat").json()["names"] == ["flat", "flat:v1"]
    assert user["id"] in check_refusal(api.delete("/v1/snapshots/flat"), 409)
    assert api.delete("/v1/snapshots/flat?force=true").status_code == 204


def test_compact_refuses_used_and_invalid_tags(api: httpx.Client, sandbox_id: str) -> None:
    create_branch(api, sandbox_id, tag="cp")
    for tag in ("cp", "base", sandbox_id):
        assert f"the name is already in use: '{tag}'" in check_refusal(
            api.post("/v1/snapshots/cp/compact", json={"to": tag}), 409
        )
    for tag in ("a b", "_x", "v1.0", ""):
        assert "1 to 64" in check_refusal(api.post("/v1/snapshots/cp/compact", json={"to": tag}), 400)
    assert "to: " in check_refusal(api.post("/v1/snapshots/cp/compact", json={}), 400)
    assert list_tags(api) == {"base", "cp"}
    assert "not found" in check_refusal(api.post("/v1/snapshots/gone/compact", json={"to": "flat"}), 404)


def test_two_tags_deleted_at_once_are_both_gone(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    create_branch(api, spawn_sandboxes(api)[0]["id"], tag="cp")
    api.post("/v1/snapshots/cp/compact", json={"to": "flat"}).raise_for_status()

    def try_delete(tag: str) -> int:
        with memory_gateway.client(ADMIN_KEY) as client:
            return client.delete(f"/v1/snapshots/{tag}").status_code

    with ThreadPoolExecutor() as pool:
        assert [*pool.map(try_delete, ("cp", "flat"))] == [204, 204]
    assert memory_gateway.engine.snapshots.list() == []


def test_missing_objects_are_not_found(api: httpx.Client) -> None:
    for route in ("/v1/snapshots/gone/info", "/v1/sandboxes/gone"):
        assert "not found" in check_refusal(api.get(route), 404)


def test_a_snapshot_is_built_from_a_root_file_system(api: httpx.Client, tmp_path: Path) -> None:
    for body, words in (
        ({"rootfs": "/srv/x.tar", "kernel": "/boot/vmlinux"}, "kernel"),
        ({"rootfs": "x.tar"}, "absolute"),
        ({"rootfs": "/nowhere/x.tar"}, "cannot be read"),
        ({}, "rootfs"),
    ):
        assert words in check_refusal(api.post("/v1/snapshots", json={"tag": "py", **body}), 400)
    response = api.post("/v1/snapshots", json={"tag": "py", "rootfs": str(tmp_path)})
    assert response.status_code == 201 and response.json()["tag"] == "py"
    assert spawn_sandboxes(api, "py")[0]["snapshot_tag"] == "py"
    assert api.delete("/v1/snapshots/py?force=true").status_code == 204


def test_an_invalid_root_file_system_is_reported(
    memory_gateway: MemoryGateway, api: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> str:
        raise BackendFailed("it is empty")

    monkeypatch.setattr(memory_gateway.host, "build_base", fail)
    response = api.post("/v1/snapshots", json={"tag": "py", "rootfs": str(tmp_path)})
    assert "could not be built: it is empty" in check_refusal(response, 500)
    assert list_tags(api) == {"base"}


def test_a_branch_without_memory_has_no_diff_sizes(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_capture = memory_gateway.host.capture

    async def capture_without_memory(*args: Any, **kwargs: Any) -> Snapshot:
        snapshot = await original_capture(*args, **kwargs)
        return snapshot.model_copy(update={"memory": MemoryMode.NONE, "memory_bytes_written": 0})

    monkeypatch.setattr(memory_gateway.host, "capture", capture_without_memory)
    branch = create_branch(api, sandbox_id, tag="cp", mode="diff")
    assert "diff_physical_bytes" not in branch and "memory" not in branch and branch["bootable"]
    assert api.get("/v1/snapshots/cp/info").json()["memory_logical_bytes"] == 0
