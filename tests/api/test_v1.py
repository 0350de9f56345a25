"""forkd's API, through a served gateway and, where a test says so, by the published client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forkd
import httpx
import pytest

from sandbox_gateway.engine.agent_client import AgentClient
from sandbox_gateway.errors import BackendFailed, Invalid, NoSpace
from sandbox_gateway.records import Memory, Sandbox, Snapshot
from tests.api.served import ADMIN_KEY, EXEC_KEY, READ_KEY, Served

Json = dict[str, Any]


@pytest.fixture
def client(served: Served) -> forkd.Controller:
    return forkd.Controller(base_url=served.url, token=ADMIN_KEY)


@pytest.fixture
def one(api: httpx.Client) -> str:
    """The id of a sandbox made from the template `base`."""
    return spawn(api)[0]["id"]


def spawn(api: httpx.Client, tag: str = "base", **body: Any) -> list[Json]:
    answer = api.post("/v1/sandboxes", json={"snapshot_tag": tag, **body})
    assert answer.status_code == 201, answer.text
    made: list[Json] = answer.json()
    return made


def branch(api: httpx.Client, sandbox: str, **body: Any) -> Json:
    answer = api.post(f"/v1/sandboxes/{sandbox}/branch", json=body)
    assert answer.status_code == 201, answer.text
    taken: Json = answer.json()
    return taken


def refused(answer: httpx.Response, status: int) -> str:
    """The error message of a refusal."""
    assert answer.status_code == status, answer.text
    sentence: str = answer.json()["error"]
    return sentence


def tags(api: httpx.Client) -> set[str]:
    return {snapshot["tag"] for snapshot in api.get("/v1/snapshots").json()}


def test_health_needs_no_key_and_version_does(served: Served) -> None:
    with served.client("") as nobody, served.client(READ_KEY) as reader:
        assert nobody.get("/healthz").json() == {"ok": True}
        assert "API key" in refused(nobody.get("/version"), 401)
        assert reader.get("/version").json() == {"version": reader.get("/health").json()["version"], "api": "v1"}


def test_scopes(served: Served, one: str) -> None:
    with served.client(READ_KEY) as reader, served.client(EXEC_KEY) as runner:
        for verb, body in (("exec", {"args": ["exit", "0"]}), ("eval", {"code": "1"}), ("ping", {})):
            assert runner.post(f"/v1/sandboxes/{one}/{verb}", json=body).status_code == 200
            assert reader.post(f"/v1/sandboxes/{one}/{verb}", json=body).status_code == 403
        for caller in (reader, runner):
            assert caller.get(f"/v1/sandboxes/{one}").status_code == 200
            assert caller.post(f"/v1/sandboxes/{one}/branch").status_code == 403
            assert caller.delete(f"/v1/sandboxes/{one}").status_code == 403
            assert caller.post("/v1/sandboxes", json={"snapshot_tag": "base"}).status_code == 403


def test_the_published_client(client: forkd.Controller) -> None:
    """All calls of the client."""
    (first,) = client.spawn_sandboxes("base", per_child_netns=True, prewarm=True, hugepages=True)
    assert first["snapshot_tag"] == "base" and first["guest_addr"].endswith(":8888")
    assert client.get_sandbox(first["id"]) == first and client.list_sandboxes() == [first]
    assert client.eval_code(first["id"], "counter = 41") == {"result": "None", "error": None, "exit_code": 0}
    checkpoint = client.branch_sandbox(first["id"], tag="checkpoint-1", mode="full")
    assert checkpoint["branched_from"] == first["id"] and checkpoint["status"] == "ready" and checkpoint["bootable"]
    again = client.branch_sandbox(first["id"], diff=True, wait=False)
    assert again["status"] == "ready" and again["diff_physical_bytes"] < again["diff_logical_bytes"]
    children = client.spawn_sandboxes(checkpoint["tag"], n=3)
    assert [client.eval_code(child["id"], "counter + 1")["result"] for child in children] == ["42"] * 3
    assert client.exec_command(children[0]["id"], ["exit", "3"]) == {
        "stdout": "",
        "stderr": "leaving\n",
        "exit_code": 3,
    }
    assert client.ping_sandbox(children[1]["id"])["pong"] is True
    for sandbox in (first, *children):
        client.kill_sandbox(sandbox["id"])
    assert client.list_sandboxes() == []
    for tag in (checkpoint["tag"], again["tag"]):
        client.delete_snapshot(tag)
    assert [snapshot["tag"] for snapshot in client.list_snapshots()] == ["base"]
    with pytest.raises(forkd.ControllerError) as caught:
        client.get_sandbox(first["id"])
    assert caught.value.status == 404 and "not found" in caught.value.body["error"]


def test_a_branch_says_what_was_taken(served: Served, api: httpx.Client, one: str) -> None:
    taken = branch(api, one, tag="cp_1")
    id = served.engine.snapshots.get("cp_1").id
    assert taken.pop("created_at_unix") > 1_700_000_000
    assert taken == {
        "tag": "cp_1",
        "id": id,
        "dir": f"/memory/{id}",
        "branched_from": one,
        "pause_ms": 7,
        "diff_physical_bytes": 4096,
        "diff_logical_bytes": 256 << 20,
        "status": "ready",
        "bootable": True,
    }
    spawn(api, "cp_1")
    detail = api.get("/v1/snapshots/cp_1/info").json()
    assert detail["memory_logical_bytes"] == 256 << 20 and detail["memory_physical_bytes"] == 4096
    assert detail["chain_depth"] == 0 and detail["ancestors"] == detail["dependents"] == []
    assert detail["sandboxes"] == [each["id"] for each in api.get("/v1/sandboxes").json() if each["id"] != one]


def test_a_template_is_a_snapshot_of_no_sandbox(api: httpx.Client) -> None:
    (template,) = api.get("/v1/snapshots").json()
    assert template["tag"] == "base" and template["bootable"] is True
    assert "branched_from" not in template and "pause_ms" not in template


def test_a_snapshot_whose_name_is_no_tag_goes_by_its_id(api: httpx.Client, one: str) -> None:
    named = api.post(f"/sandboxes/{one}/snapshots", json={"name": "v1.0"}).json()["snapshotID"]
    nameless = api.post(f"/sandboxes/{one}/snapshots", json={}).json()["snapshotID"]
    assert tags(api) == {"base", named, nameless}
    assert spawn(api, "v1.0")[0]["snapshot_tag"] == spawn(api, named)[0]["snapshot_tag"] == named


def test_numbers_of_branches_never_come_again(served: Served, api: httpx.Client, one: str) -> None:
    first, second = branch(api, one), branch(api, one)
    assert [first["tag"], second["tag"]] == [f"branch-{one}-1", f"branch-{one}-2"]
    branch(api, one, tag=f"branch-{one}-3")
    assert api.delete(f"/v1/snapshots/{second['tag']}").status_code == 204
    assert branch(api, one)["tag"] == f"branch-{one}-4", "the third is taken, the second was"
    api.delete(f"/v1/snapshots/branch-{one}-4")
    restarted = Sandbox.model_validate_json(served.host.saved[one].model_dump_json())
    assert restarted.branches == 4, "it is in the record, which a restarted gateway reads"
    api.post(f"/sandboxes/{one}/pause").raise_for_status()
    assert "paused" in refused(api.post(f"/v1/sandboxes/{one}/branch"), 409)
    api.post(f"/sandboxes/{one}/resume").raise_for_status()
    assert branch(api, one)["tag"] == f"branch-{one}-5"


def test_what_is_no_tag(api: httpx.Client, one: str) -> None:
    for tag in ("", "a" * 65, "a b", "../etc", "v1.0", "ä", "-x", "_x", "x\n"):
        sentence = refused(api.post(f"/v1/sandboxes/{one}/branch", json={"tag": tag}), 400)
        assert "1 to 64 letters, digits" in sentence, tag
    assert tags(api) == {"base"}


def test_a_taken_tag_changes_nothing(api: httpx.Client, one: str) -> None:
    branch(api, one, tag="cp")
    before = api.get(f"/sandboxes/{one}").json()
    for taken in ("cp", "base", one):
        assert taken in refused(api.post(f"/v1/sandboxes/{one}/branch", json={"tag": taken}), 409)
    assert api.get(f"/sandboxes/{one}").json() == before
    assert tags(api) == {"base", "cp"}


def test_of_two_that_race_for_a_tag_one_gets_it(served: Served, api: httpx.Client) -> None:
    sandboxes = [each["id"] for each in spawn(api, n=4)]

    def attempt(sandbox: str) -> int:
        with served.client(ADMIN_KEY) as own:
            return own.post(f"/v1/sandboxes/{sandbox}/branch", json={"tag": "cp"}).status_code

    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(attempt, sandboxes)) == [201, 409, 409, 409]
    assert len(served.engine.snapshots.list()) == 1


def test_branches_taken_at_once_have_numbers_of_their_own(served: Served, one: str) -> None:
    def attempt(_: int) -> str:
        with served.client(ADMIN_KEY) as own:
            tag: str = own.post(f"/v1/sandboxes/{one}/branch", json={}).json()["tag"]
            return tag

    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(attempt, range(5))) == [f"branch-{one}-{number}" for number in range(1, 6)]


def test_what_a_branch_cannot_be(api: httpx.Client, one: str) -> None:
    branch(api, spawn(api)[0]["id"], tag="other")
    for body, words in (
        ({"mode": "live"}, "stands still"),
        ({"live": True}, "stands still"),
        ({"mode": "diff", "diff": True}, "twice"),
        ({"mode": "full", "diff": True}, "twice"),
        ({"diff": True, "live": True}, "exclude"),
        ({"diff": True, "measure_diff": True}, "measure_diff"),
        ({"mode": "fast"}, "mode"),
        ({"parent_tag": "base"}, "goes with mode diff"),
        ({"mode": "diff", "parent_tag": "other"}, "was made from base"),
    ):
        assert words in refused(api.post(f"/v1/sandboxes/{one}/branch", json=body), 400)
    assert tags(api) == {"base", "other"}


def test_what_a_branch_can_be(api: httpx.Client, one: str) -> None:
    api.post(f"/v1/sandboxes/{one}/branch").raise_for_status()
    branch(api, one, mode="full", measure_diff=True, wait=False)
    branch(api, one, mode="diff", parent_tag="base", tag="cp")
    branch(api, one, diff=True, parent_tag="cp")
    assert "not found" in refused(api.post(f"/v1/sandboxes/{one}/branch", json={"diff": True, "parent_tag": "x"}), 404)


def test_a_branch_of_nothing(api: httpx.Client) -> None:
    for body in ({}, {"tag": "base"}, {"tag": "new"}):
        assert "'nothing' not found" in refused(api.post("/v1/sandboxes/nothing/branch", json=body), 404)


@pytest.mark.parametrize(("failure", "status"), [(BackendFailed("no pause"), 500), (NoSpace("the disk is full"), 507)])
def test_a_capture_that_fails_leaves_nothing(
    served: Served, api: httpx.Client, one: str, monkeypatch: pytest.MonkeyPatch, failure: Exception, status: int
) -> None:
    async def fail(*_: object, **__: object) -> Snapshot:
        raise failure

    with monkeypatch.context() as broken:
        broken.setattr(served.host, "capture", fail)
        assert str(failure) in refused(api.post(f"/v1/sandboxes/{one}/branch", json={"tag": "cp"}), status)
        refused(api.post(f"/v1/sandboxes/{one}/branch"), status)
    assert tags(api) == {"base"} and api.post(f"/v1/sandboxes/{one}/ping").status_code == 200
    branch(api, one, tag="cp")
    assert branch(api, one)["tag"] == f"branch-{one}-2", "a number that was tried is not tried again"


def test_a_source_that_dies_of_it_leaves_a_good_snapshot(
    served: Served, api: httpx.Client, one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(served.host, "end_reason", lambda _: "" if not tags_of(served) else "it did not go on")
        sentence = refused(api.post(f"/v1/sandboxes/{one}/branch", json={"tag": "cp"}), 500)
    assert "valid" in sentence and "source died" in sentence
    spawn(api, "cp")


def tags_of(served: Served) -> list[str]:
    return [name for snapshot in served.engine.snapshots.list() for name in snapshot.names]


def test_many_at_once_or_none(served: Served, api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    made = spawn(api, n=5)
    assert len({each["id"] for each in made}) == len({each["guest_addr"] for each in made}) == 5
    for n in (0, 1001, -1, "2", True):
        assert "n: " in refused(api.post("/v1/sandboxes", json={"snapshot_tag": "base", "n": n}), 400)
    assert "not found" in refused(api.post("/v1/sandboxes", json={"snapshot_tag": "gone"}), 404)
    assert "snapshot_tag" in refused(api.post("/v1/sandboxes", json={}), 400)
    fork, count = served.host.fork, iter(range(10))

    async def second_fails(*args: Any, **more: Any) -> None:
        if next(count) == 1:
            raise BackendFailed("no machine")
        await fork(*args, **more)

    monkeypatch.setattr(served.host, "fork", second_fails)
    assert "no machine" in refused(api.post("/v1/sandboxes", json={"snapshot_tag": "base", "n": 3}), 500)
    assert len(api.get("/v1/sandboxes").json()) == 5


def test_promises_that_cannot_be_kept(api: httpx.Client) -> None:
    for body, words in (({"live_fork": True}, "live_fork"), ({"memory_limit_mib": 512}, "256 MiB of memory")):
        assert words in refused(api.post("/v1/sandboxes", json={"snapshot_tag": "base", **body}), 400)
    assert spawn(api, memory_limit_mib=256)[0]["memory_limit_mib"] == 256
    assert len(api.get("/v1/sandboxes").json()) == 1


def test_a_sandbox_lives_as_long_as_it_is_told(served: Served, api: httpx.Client) -> None:
    (forever,), (mortal,) = spawn(api), spawn(api, timeout=60)
    assert served.engine.sandboxes.get(forever["id"]).end_at is None
    assert served.engine.sandboxes.get(mortal["id"]).end_at is not None


def test_paused_sandboxes_have_no_address(api: httpx.Client, one: str) -> None:
    api.post(f"/sandboxes/{one}/pause").raise_for_status()
    shown = api.get(f"/v1/sandboxes/{one}").json()
    assert shown["state"] == "paused" and shown["guest_addr"] == "" and shown["snapshot_tag"] == "base"
    for verb, body in (("exec", {"args": ["exit", "0"]}), ("eval", {"code": "1"}), ("ping", {})):
        assert "paused" in refused(api.post(f"/v1/sandboxes/{one}/{verb}", json=body), 409)


def test_programs(api: httpx.Client, one: str) -> None:
    def run(*args: str, **more: Any) -> Json:
        answer = api.post(f"/v1/sandboxes/{one}/exec", json={"args": args, **more})
        assert answer.status_code == 200, answer.text
        told: Json = answer.json()
        return told

    run("write", "k", "v")
    assert run("read", "k") == {"stdout": "v", "stderr": "", "exit_code": 0}
    missing = run("nonsense")
    assert missing["exit_code"] == 127 and "not found" in missing["stderr"]
    late = run("sleep", "5", timeout_secs=0.2)
    assert late["exit_code"] == 137 and "did not end within 0.2 s" in late["stderr"]
    for body in ({"args": []}, {"args": "ls"}, {}, {"args": ["x"], "timeout_secs": 0}):
        refused(api.post(f"/v1/sandboxes/{one}/exec", json=body), 400)
    assert "not found" in refused(api.post("/v1/sandboxes/nothing/exec", json={"args": ["x"]}), 404)


def test_code(api: httpx.Client, one: str) -> None:
    def evaluate(code: str) -> Json:
        answer = api.post(f"/v1/sandboxes/{one}/eval", json={"code": code})
        assert answer.status_code == 200, answer.text
        told: Json = answer.json()
        return told

    assert evaluate("x = 'ä'") == {"result": "None", "error": None, "exit_code": 0}
    assert evaluate("x * 2") == {"result": "'ää'", "error": None, "exit_code": 0}
    assert evaluate("1 / 0") == {"result": None, "error": "ZeroDivisionError: division by zero", "exit_code": 1}
    refused(api.post(f"/v1/sandboxes/{one}/eval", json={}), 400)


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ({"result": "1"}, 500, "something else"),
        (Invalid("/eval not found"), 400, "too old"),
        (Invalid("no"), 400, "no"),
    ],
)
def test_an_agent_that_does_not_evaluate(
    api: httpx.Client, one: str, monkeypatch: pytest.MonkeyPatch, answer: Json | Invalid, status: int, words: str
) -> None:
    async def call(*_: object, **__: object) -> Json:
        if isinstance(answer, Invalid):
            raise answer
        return answer

    with monkeypatch.context() as other:
        other.setattr(AgentClient, "call", call)
        assert words in refused(api.post(f"/v1/sandboxes/{one}/eval", json={"code": "1"}), status)


def test_a_ping_goes_to_the_agent_and_back(served: Served, api: httpx.Client, one: str) -> None:
    assert api.post(f"/v1/sandboxes/{one}/ping").json() == {"pong": True, "numpy_version": None}
    served.loop.call_soon_threadsafe(served.machine(one)._server.close)  # type: ignore[union-attr]
    assert "cannot be reached" in refused(api.post(f"/v1/sandboxes/{one}/ping"), 500)


def test_a_snapshot_in_use_stays_until_it_is_forced(api: httpx.Client, one: str) -> None:
    branch(api, one, tag="cp")
    (user,) = spawn(api, "cp")
    assert user["id"] in refused(api.delete("/v1/snapshots/cp"), 409)
    for query in ("cascade=true", "cascade=true&force=true"):
        assert "cascade" in refused(api.delete(f"/v1/snapshots/cp?{query}"), 400)
    assert tags(api) == {"base", "cp"}
    assert api.delete("/v1/snapshots/cp?force=true").status_code == 204
    assert tags(api) == {"base"} and "not found" in refused(api.delete("/v1/snapshots/cp"), 404)
    assert api.get(f"/v1/sandboxes/{user['id']}").json()["snapshot_tag"] not in ("cp", "")
    branch(api, one, tag="cp")


def test_there_is_nothing_to_compact(api: httpx.Client, one: str) -> None:
    branch(api, one, tag="cp")
    assert "complete by itself" in refused(api.post("/v1/snapshots/cp/compact", json={"to": "flat"}), 400)
    assert "not found" in refused(api.post("/v1/snapshots/gone/compact", json={"to": "flat"}), 404)
    assert "1 to 64" in refused(api.post("/v1/snapshots/cp/compact", json={"to": "a b"}), 400)
    for route in ("/v1/snapshots/gone/info", "/v1/sandboxes/gone"):
        assert "not found" in refused(api.get(route), 404)


def test_a_snapshot_of_a_root_file_system(api: httpx.Client, tmp_path: Path) -> None:
    for body, words in (
        ({"rootfs": "/srv/x.tar", "kernel": "/boot/vmlinux"}, "kernel"),
        ({"rootfs": "x.tar"}, "absolute"),
        ({"rootfs": "/nowhere/x.tar"}, "cannot be read"),
        ({}, "rootfs"),
    ):
        assert words in refused(api.post("/v1/snapshots", json={"tag": "py", **body}), 400)
    made = api.post("/v1/snapshots", json={"tag": "py", "rootfs": str(tmp_path)})
    assert made.status_code == 201 and made.json()["tag"] == "py"
    assert spawn(api, "py")[0]["snapshot_tag"] == "py"
    assert api.delete("/v1/snapshots/py?force=true").status_code == 204


def test_a_root_file_system_that_cannot_be_built(
    served: Served, api: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> Snapshot:
        raise BackendFailed("it is empty")

    monkeypatch.setattr(served.host, "build_base", fail)
    answer = api.post("/v1/snapshots", json={"tag": "py", "rootfs": str(tmp_path)})
    assert "not built: it is empty" in refused(answer, 500)
    assert tags(api) == {"base"}


def test_without_memory_there_is_no_difference_to_tell(
    served: Served, api: httpx.Client, one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = served.host.capture

    async def files_only(*args: Any, **more: Any) -> Snapshot:
        taken = await capture(*args, **more)
        return taken.model_copy(update={"memory": Memory.NONE, "memory_bytes_written": 0})

    monkeypatch.setattr(served.host, "capture", files_only)
    taken = branch(api, one, tag="cp", mode="diff")
    assert "diff_physical_bytes" not in taken and "memory" not in taken and taken["bootable"]
    assert api.get("/v1/snapshots/cp/info").json()["memory_logical_bytes"] == 0
