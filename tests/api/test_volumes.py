"""Test the volume routes, and volumes in the responses of other routes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY, MemoryGateway, create_sandbox, run_command

e2b = pytest.importorskip("e2b", reason="needs the e2b client: pip install e2b==2.63.0")
DATA_MOUNT = {"name": "data", "path": "/srv/data", "readOnly": False}


def create_volume(api: httpx.Client, name: str = "data", **body: Any) -> dict[str, Any]:
    response = api.post("/volumes", json={"name": name, **body})
    assert response.status_code == 201, response.text
    volume: dict[str, Any] = response.json()
    return volume


def check_refusal(response: httpx.Response, status: int, kind: str, *words: str) -> dict[str, Any]:
    body: dict[str, Any] = response.json()
    assert (response.status_code, body["kind"]) == (status, kind), body
    assert all(word in body["message"] for word in words), body
    return body


def test_a_volume_has_all_its_fields(api: httpx.Client) -> None:
    volume = create_volume(api, sizeMB=2048)
    assert volume.pop("token") and volume.pop("createdAt")
    assert volume == {
        "volumeID": "data",
        "name": "data",
        "sizeMB": 2048,
        "usedMB": 0,
        "mounts": [],
        "fromSnapshot": "",
        "ownerSandboxID": "",
        "generation": 0,
        "ownChanges": 0,
        "stuck": [],
    }


@pytest.mark.parametrize("body", [{}, {"name": ""}, {"name": None}])
def test_an_unnamed_volume_gets_a_generated_name(api: httpx.Client, body: dict[str, Any]) -> None:
    response = api.post("/volumes", json=body)
    assert response.status_code == 201 and response.json()["sizeMB"] == 1024
    assert api.get(f"/volumes/{response.json()['name']}").status_code == 200


def test_the_volume_token_is_unique_stable_and_restricted(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    volume, other_volume = create_volume(api), create_volume(api, "other")
    assert volume["token"] != other_volume["token"]
    assert api.get("/volumes/data").json()["token"] == volume["token"]
    assert all("token" not in item for item in api.get("/volumes").json())
    assert "token" not in api.patch("/volumes/data", json={"sizeMB": 2048}).json()
    with memory_gateway.client(READ_KEY) as reader, memory_gateway.client(EXEC_KEY) as runner:
        assert reader.get("/volumes/data").json()["token"] == ""
        assert runner.get("/volumes/data").json()["token"] == volume["token"]
        assert reader.get("/volumes").status_code == reader.get("/volumes/data/snapshots").status_code == 200
        for caller in (reader, runner):
            assert caller.post("/volumes", json={"name": "mine"}).status_code == 403
            assert caller.delete("/volumes/data").status_code == 403
            assert caller.post("/volumes/data/snapshots").status_code == 403
            assert caller.post("/sandboxes/one/volumes", json=DATA_MOUNT).status_code == 403


def test_lists_are_paged_and_filtered(api: httpx.Client) -> None:
    for name in ("a", "b", "c"):
        create_volume(api, name)
    first_page = api.get("/volumes?limit=2")
    assert [item["name"] for item in first_page.json()] == ["a", "b"]
    last_page = api.get("/volumes", params={"limit": 2, "nextToken": first_page.headers["x-next-token"]})
    assert [item["name"] for item in last_page.json()] == ["c"] and "x-next-token" not in last_page.headers
    assert [item["name"] for item in api.get("/volumes?name=b").json()] == ["b"]
    for number in range(3):
        api.post("/volumes/a/snapshots", json={"name": f"s{number}"})
    page = api.get("/volumes/a/snapshots?limit=2")
    assert [item["name"] for item in page.json()] == ["s0", "s1"] and page.headers["x-next-token"]
    assert [item["name"] for item in api.get("/volumes/a/snapshots?name=s2").json()] == ["s2"]


def test_an_unpaged_list_contains_every_volume(api: httpx.Client) -> None:
    for number in range(101):
        create_volume(api, f"v{number}")
    assert len(api.get("/volumes").json()) == 101


def test_a_volume_grows_and_never_shrinks(api: httpx.Client) -> None:
    create_volume(api)
    assert api.patch("/volumes/data", json={"sizeMB": 4096}).json()["sizeMB"] == 4096
    assert api.get("/volumes/data").json()["sizeMB"] == 4096
    check_refusal(api.patch("/volumes/data", json={"sizeMB": 1024}), 400, "invalid", "4096", "shrink")
    check_refusal(api.patch("/volumes/data", json={}), 400, "invalid", "sizeMB", "required")
    check_refusal(api.post("/volumes", json={"name": "x", "sizeMB": 63}), 400, "invalid", "sizeMB")
    check_refusal(api.post("/volumes", json={"name": "a b"}), 400, "invalid", "not allowed")


def test_volumes_and_sandboxes_share_one_namespace(api: httpx.Client) -> None:
    create_volume(api)
    create_sandbox(api, name="one")
    check_refusal(api.post("/volumes", json={"name": "one"}), 409, "name_taken")
    check_refusal(api.post("/volumes", json={"name": "data"}), 409, "name_taken")
    check_refusal(api.post("/sandboxes", json={"templateID": "base", "name": "data"}), 409, "name_taken")


def test_a_sandbox_is_created_with_mounts(api: httpx.Client) -> None:
    create_volume(api)
    create_volume(api, "lib")
    mounts = [DATA_MOUNT, {"name": "lib", "path": "/srv/lib", "readOnly": True}]
    sandbox = create_sandbox(api, name="one", volumeMounts=mounts)
    assert sandbox["volumeMounts"] == mounts
    assert api.get("/sandboxes/one").json()["volumeMounts"] == api.get("/sandboxes").json()[0]["volumeMounts"] == mounts
    mount_fields = {"sandboxID": sandbox["sandboxID"], "sandboxName": "one", "path": "/srv/lib", "readonly": True}
    assert api.get("/volumes/lib").json()["mounts"] == [{**mount_fields, "state": "running"}]
    api.post("/sandboxes/one/pause")
    assert api.get("/volumes/lib").json()["mounts"] == [{**mount_fields, "state": "paused"}]


@pytest.mark.parametrize("path", ["relative", "/", "/srv/../etc", "/proc/x", "/a b", "/usr", ""])
def test_invalid_mount_paths_are_refused(api: httpx.Client, path: str) -> None:
    create_volume(api)
    mount = {"name": "data", "path": path}
    check_refusal(api.post("/sandboxes", json={"templateID": "base", "volumeMounts": [mount]}), 400, "invalid", path)
    assert api.get("/sandboxes").json() == []


def test_requests_for_a_missing_volume_fail(api: httpx.Client) -> None:
    create_sandbox(api, name="one")
    mount = {"name": "nothing", "path": "/srv/x"}
    for response in (
        api.post("/sandboxes", json={"templateID": "base", "volumeMounts": [mount]}),
        api.post("/sandboxes/one/volumes", json=mount),
        api.get("/volumes/nothing"),
        api.delete("/volumes/nothing"),
        api.patch("/volumes/nothing", json={"sizeMB": 4096}),
        api.get("/volumes/nothing/snapshots"),
        api.post("/volumes/nothing/snapshots"),
        api.delete("/volumes/nothing/snapshots/s"),
        api.post("/volumes/nothing/rollback", json={"snapshot": "s"}),
    ):
        check_refusal(response, 404, "not_found", "volume", "'nothing'", "not found")


def test_a_volume_is_attached_and_detached(api: httpx.Client) -> None:
    create_volume(api)
    create_sandbox(api, name="one")
    response = api.post("/sandboxes/one/volumes", json={"name": "data", "path": "/srv/data"})
    assert response.status_code == 201 and response.json() == DATA_MOUNT
    assert api.get("/sandboxes/one").json()["volumeMounts"] == [DATA_MOUNT]
    check_refusal(api.post("/sandboxes/one/volumes", json=DATA_MOUNT), 409, "conflict", "already")
    assert api.delete("/sandboxes/one/volumes/data").status_code == 204
    assert api.get("/sandboxes/one").json()["volumeMounts"] == api.get("/volumes/data").json()["mounts"] == []
    check_refusal(api.delete("/sandboxes/one/volumes/data"), 404, "not_found", "data")
    check_refusal(api.delete("/sandboxes/none/volumes/data"), 404, "not_found", "none")


def test_deleting_a_mounted_volume_lists_its_mounts(api: httpx.Client) -> None:
    create_volume(api)
    sandbox_ids = [create_sandbox(api, name=name, volumeMounts=[DATA_MOUNT])["sandboxID"] for name in ("one", "two")]
    api.post("/sandboxes/two/pause")
    body = check_refusal(api.delete("/volumes/data"), 409, "in_use", "2 mounts", "one", "two")
    assert sorted(body["blockers"]) == sorted(sandbox_ids)
    users = [{"kind": "mount", "id": id, "name": name} for id, name in zip(sandbox_ids, ("one", "two"), strict=True)]
    assert body["details"] == {"resource": "volume", "users": users, "overrides": []}
    api.delete("/sandboxes/two/volumes/data")
    check_refusal(api.delete("/volumes/data"), 409, "in_use", "1 mount")
    api.delete("/sandboxes/one")
    assert api.delete("/volumes/data").status_code == 204
    assert api.get("/volumes").json() == []


def test_volume_snapshots_are_created_listed_and_removed(api: httpx.Client) -> None:
    create_volume(api, sizeMB=512)
    response = api.post("/volumes/data/snapshots", json={"name": "monday"})
    assert response.status_code == 201
    snapshot = response.json()
    assert snapshot.pop("createdAt")
    assert snapshot == {
        "snapshotID": snapshot["snapshotID"],
        "name": "monday",
        "volumeID": "data",
        "sizeMB": 512,
        "sandboxSnapshotID": "",
        "clones": [],
    }
    unnamed_snapshot = api.post("/volumes/data/snapshots").json()
    assert unnamed_snapshot["name"] == unnamed_snapshot["snapshotID"]
    assert [item["name"] for item in api.get("/volumes/data/snapshots").json()] == ["monday", unnamed_snapshot["name"]]
    check_refusal(api.post("/volumes/data/snapshots", json={"name": "monday"}), 409, "name_taken")
    copy = create_volume(api, "copy", fromSnapshot="data@monday")
    assert copy["fromSnapshot"] == snapshot["snapshotID"] and copy["sizeMB"] == 512
    assert create_volume(api, "other", fromSnapshot=snapshot["snapshotID"], sizeMB=1024)["sizeMB"] == 1024
    listed_clones = {each["name"]: each["clones"] for each in api.get("/volumes/data/snapshots").json()}
    assert listed_clones == {"monday": ["copy", "other"], unnamed_snapshot["name"]: []}
    check_refusal(api.post("/volumes", json={"name": "x", "fromSnapshot": "data@never"}), 404, "not_found", "never")
    assert api.delete(f"/volumes/data/snapshots/{unnamed_snapshot['snapshotID']}").status_code == 204
    check_refusal(api.delete("/volumes/data/snapshots/never"), 404, "not_found", "never")
    for name in ("copy", "other"):
        assert api.delete(f"/volumes/{name}").status_code == 204
    long_name = "x" * 64
    create_volume(api, long_name)
    api.post(f"/volumes/{long_name}/snapshots", json={"name": long_name})
    assert create_volume(api, "copy", fromSnapshot=f"{long_name}@{long_name}")["fromSnapshot"]
    body = check_refusal(api.delete("/volumes/data"), 409, "in_use", "1 snapshot")
    assert body["blockers"] == [snapshot["snapshotID"]]
    users = [{"kind": "volume_snapshot", "id": snapshot["snapshotID"], "name": "monday"}]
    assert body["details"] == {"resource": "volume", "users": users, "overrides": ["withSnapshots"]}
    assert api.delete("/volumes/data?withSnapshots=true").status_code == 204


def test_rolling_back_a_mounted_volume_needs_force(api: httpx.Client) -> None:
    create_volume(api)
    sandbox = create_sandbox(api, name="one", volumeMounts=[DATA_MOUNT])
    run_command(api, "one", "write", "/srv/data/k", "then")
    api.post("/volumes/data/snapshots", json={"name": "monday"})
    api.patch("/volumes/data", json={"sizeMB": 2048})
    run_command(api, "one", "write", "/srv/data/k", "now")
    body = check_refusal(api.post("/volumes/data/rollback", json={"snapshot": "monday"}), 409, "in_use", "one")
    assert body["blockers"] == [sandbox["sandboxID"]]
    assert [user["kind"] for user in body["details"]["users"]] == ["mount"]
    assert body["details"]["overrides"] == ["force"]
    response = api.post("/volumes/data/rollback", json={"snapshot": "monday", "force": True})
    assert response.status_code == 200 and response.json()["sizeMB"] == 2048 and "token" not in response.json()
    assert run_command(api, "one", "read", "/srv/data/k")["stdout"] == "then"
    check_refusal(api.post("/volumes/data/rollback", json={"snapshot": "never"}), 404, "not_found", "never")


def test_a_snapshot_lists_its_volumes(api: httpx.Client) -> None:
    create_volume(api)
    create_sandbox(api, name="one", volumeMounts=[DATA_MOUNT])
    response = api.post("/sandboxes/one/snapshots", json={"name": "s1", "volumes": ["data"]})
    assert response.status_code == 201, response.text
    (volume_snapshot,) = api.get("/volumes/data/snapshots").json()
    assert volume_snapshot["sandboxSnapshotID"] == response.json()["snapshotID"]
    assert response.json()["volumes"] == [{"name": "data", "snapshotID": volume_snapshot["snapshotID"]}]
    assert api.get("/snapshots").json()[0] == response.json()
    assert api.get("/snapshots/s1").json() == {**response.json(), "users": []}
    assert response.json()["volumeMounts"] == [DATA_MOUNT] and "zfsSnapshot" not in response.json()
    check_refusal(api.delete("/volumes/data?withSnapshots=true"), 409, "in_use")
    check_refusal(api.delete(f"/volumes/data/snapshots/{volume_snapshot['snapshotID']}"), 409, "in_use", "s1")
    check_refusal(api.post("/sandboxes/one/snapshots", json={"volumes": ["nothing"]}), 404, "not_found", "volume")
    assert api.delete("/snapshots/s1").status_code == 204
    assert api.get("/volumes/data/snapshots").json() == []


@pytest.mark.parametrize("route", ["/snapshots/s1/fork", "/sandboxes/one/clone", "/sandboxes/one/fork"])
def test_forks_inherit_or_replace_volumes(api: httpx.Client, route: str) -> None:
    create_volume(api)
    create_volume(api, "other")
    create_sandbox(api, name="one", volumeMounts=[DATA_MOUNT])
    api.post("/sandboxes/one/snapshots", json={"name": "s1"})

    def fork_and_list_mounts(**body: Any) -> Any:
        response = api.post(route, json={"count": 1, **body})
        assert response.status_code == 201, response.text
        result = response.json()
        return (result[0]["sandbox"] if isinstance(result, list) else result["sandboxes"][0])["volumeMounts"]

    other_mount = {"name": "other", "path": "/srv/other", "readOnly": True}
    assert fork_and_list_mounts() == fork_and_list_mounts(volumeMounts=None) == [DATA_MOUNT]
    assert fork_and_list_mounts(volumeMounts=[]) == []
    assert fork_and_list_mounts(volumeMounts=[other_mount]) == [other_mount]


def test_forks_own_their_cloned_volumes(api: httpx.Client) -> None:
    create_volume(api)
    create_sandbox(api, name="one", volumeMounts=[DATA_MOUNT])
    api.post("/sandboxes/one/snapshots", json={"name": "s1", "volumes": ["data"]})
    body = {"names": ["a", "b"], "volumeMounts": [{**DATA_MOUNT, "clone": True}]}
    forks = api.post("/snapshots/s1/fork", json=body).json()["sandboxes"]
    owners = {item["name"]: item["ownerSandboxID"] for item in api.get("/volumes").json()}
    assert owners == {"data": "", "a-data": forks[0]["sandboxID"], "b-data": forks[1]["sandboxID"]}
    assert forks[0]["volumeMounts"] == [{**DATA_MOUNT, "name": "a-data"}]
    api.delete("/sandboxes/a")
    assert [item["name"] for item in api.get("/volumes").json()] == ["data", "b-data"]


def test_forking_fails_if_a_mounted_volume_is_missing(api: httpx.Client) -> None:
    create_volume(api)
    create_sandbox(api, name="one", volumeMounts=[DATA_MOUNT])
    api.post("/sandboxes/one/snapshots", json={"name": "s1"})
    api.delete("/sandboxes/one/volumes/data")
    api.delete("/volumes/data")
    assert api.get("/snapshots/s1").json()["volumeMounts"][0]["path"] == "/srv/data"
    check_refusal(api.post("/snapshots/s1/fork"), 409, "conflict", "volumeMounts")
    assert api.post("/snapshots/s1/fork", json={"volumeMounts": []}).status_code == 201


def test_the_published_client_manages_volumes(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    client_options = {"api_key": ADMIN_KEY, "api_url": memory_gateway.url, "validate_api_key": False}
    volume = e2b.Volume.create("data", **client_options)
    assert (volume.volume_id, volume.name) == ("data", "data") and volume.token
    assert e2b.Volume.connect("data", **client_options).token == volume.token
    assert [(item.volume_id, item.name) for item in e2b.Volume.list(**client_options)] == [("data", "data")]
    create_sandbox(api, name="one", volumeMounts=[DATA_MOUNT])
    sandbox_info = e2b.Sandbox.get_info(api.get("/sandboxes/one").json()["sandboxID"], **client_options)
    assert sandbox_info.volume_mounts == [{"name": "data", "path": "/srv/data"}]
    with pytest.raises(e2b.VolumeException, match="1 mount"):
        e2b.Volume.destroy("data", **client_options)
    api.delete("/sandboxes/one")
    assert (
        e2b.Volume.destroy("data", **client_options) is True and e2b.Volume.destroy("data", **client_options) is False
    )
    with pytest.raises(e2b.VolumeNotFoundException):
        e2b.Volume.connect("data", **client_options)


@pytest.mark.parametrize(
    ("method", "kind"), [("GET", "dir"), ("POST", "dir"), ("GET", "file"), ("PUT", "file"), ("PATCH", "path")]
)
def test_file_requests_for_volumes_are_refused_with_a_reason(
    memory_gateway: MemoryGateway, api: httpx.Client, method: str, kind: str
) -> None:
    """E2B's clients authenticate these calls with the volume's token, and interpret 404 as a missing path."""
    token = api.post("/volumes", json={"name": "v"}).json()["token"]
    headers = {"Authorization": f"Bearer {token}"}
    with memory_gateway.client("") as client:
        response = client.request(method, f"/volumecontent/v/{kind}", params={"path": "/"}, headers=headers)
        assert response.status_code == 400 and response.json()["kind"] == "unsupported"
        assert "mount the volume in a sandbox" in response.json()["message"]
        assert client.request(method, "/volumes", headers=headers).status_code == 401
