"""Test the template and build routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_gateway.hosts.base import Log, Room
from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Snapshot
from tests.support.memory_gateway import MemoryGateway
from tests.support.memory_host import MemoryHost


def test_a_ready_template_has_all_its_fields(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    memory_gateway.build_template("ready", packages=["python3"])
    template = api.get("/templates/ready").json()
    assert template["names"] == template["aliases"] == ["ready"] and template["buildStatus"] == "ready"
    assert template["recipe"]["from"] == "debootstrap" and template["recipe"]["packages"] == ["python3"]
    assert template["cpuCount"] == 1 and template["forks"] == 0 and len(template["digest"]) == 64
    assert template["status"] == "READY" and "lastError" not in template
    assert api.get(f"/templates/{template['templateID']}").json() == template
    assert [item["templateID"] for item in api.get("/templates?name=ready").json()] == [template["templateID"]]
    assert api.get("/templates?name=other").json() == []


def test_a_returned_recipe_can_be_posted_again(api: httpx.Client) -> None:
    template = api.get("/templates/base").json()
    response = api.post("/templates", json={"name": "base", **template["recipe"]})
    assert response.status_code == 200
    assert response.json()["buildStatus"] == "ready" and response.json()["templateID"] == template["templateID"]


def test_a_build_can_be_followed_to_its_end(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    memory_gateway.host.build_seconds = 0.2
    build_response = api.post("/templates", json={"name": "made", "setup": ["touch /made"], "memoryMB": 512})
    assert build_response.status_code == 202 and build_response.json()["buildStatus"] == "building"
    template = api.get("/templates/made").json()
    assert template["buildStatus"] == "building" and template["status"] == "BUILDING"
    assert "made" in [name for item in api.get("/templates").json() for name in item["names"]]
    route = f"/templates/{build_response.json()['templateID']}/builds/{build_response.json()['buildID']}"
    with api.stream("GET", f"{route}/logs", params={"follow": "true"}) as response:
        lines = list(response.iter_lines())
    assert "$ touch /made" in lines and "ran touch /made" in lines and lines[-1] == "ready"
    build_status = api.get(f"{route}/status", params={"logsOffset": len(lines) - 1}).json()
    assert build_status["status"] == "ready" and build_status["logs"] == ["ready"]
    assert "reason" not in build_status and build_status["errorMessage"] == ""
    assert [each["message"] for each in build_status["logEntries"]] == build_status["logs"] != []
    assert [each["message"] for each in api.get(f"{route}/logs").json()["logs"]] == lines
    assert api.get("/templates/made").json()["memoryMB"] == 512
    assert api.delete("/templates/made").status_code == 204
    assert api.get("/templates/made").status_code == 404


def test_a_build_without_room_is_refused_and_leaves_nothing(
    memory_gateway: MemoryGateway, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = api.post("/v3/templates", json={"name": "announced"}).json()
    full_room = Room(disk_free=50 << 30, disk_total=100 << 30, memory_free=256 << 20, memory_total=16 << 30)
    monkeypatch.setattr(memory_gateway.host, "available_room", full_room)
    refusal = api.post("/templates", json={"name": "large"})
    assert (refusal.status_code, refusal.json()["kind"]) == (507, "no_space")
    assert api.get("/templates/large").status_code == 404
    existing_recipe = api.get("/templates/base").json()["recipe"]
    assert api.post("/templates", json={"name": "base", **existing_recipe}).status_code == 200
    route = f"/v2/templates/{announced['templateID']}/builds/{announced['buildID']}"
    body = {"fromImage": "registry.example/web:1"}
    assert api.post(route, json=body).status_code == 507
    monkeypatch.undo()
    assert api.post(route, json=body).status_code == 202, "the announced build can still be started"


def test_a_failed_build_gives_a_reason(api: httpx.Client) -> None:
    build_fields = api.post("/templates", json={"name": "broken", "setup": ["fail"]}).json()
    route = f"/templates/{build_fields['templateID']}/builds/{build_fields['buildID']}"
    api.get(f"{route}/logs", params={"follow": "true"})
    build_status = api.get(f"{route}/status").json()
    assert build_status["status"] == "error" and "exit code 1" in build_status["errorMessage"]
    assert build_status["reason"] == {"message": build_status["errorMessage"]}
    template = api.get("/templates/broken").json()
    assert template["buildStatus"] == "error" and "exit code 1" in template["reason"]
    assert template["status"] == "FAILED" and template["lastError"] == template["reason"]
    assert api.post("/sandboxes", json={"templateID": "broken"}).status_code == 404


def test_invalid_recipes_are_refused(api: httpx.Client) -> None:
    for body, words in (
        ({"name": "x", "from": "rootfs"}, "path"),
        ({"name": "x", "from": "nowhere"}, "from"),
        ({"name": "x", "packages": ["a b"]}, "Debian package"),
        ({"name": "x", "memoryMB": -1}, "memoryMB"),
        ({"name": "x" * 10_000}, "name"),
        ({"name": "x", "readyTimeout": 1e9}, "readyTimeout: "),
        ({}, "name"),
    ):
        response = api.post("/templates", json=body)
        assert response.status_code == 400, response.text
        assert words in response.json()["message"] and len(response.json()["message"]) < 500


def test_an_alias_is_an_additional_name(api: httpx.Client) -> None:
    response = api.put("/templates/base/alias", json={"alias": "ground"})
    assert response.status_code == 200 and response.json()["names"] == ["base", "ground"]
    assert api.get("/templates/ground").json()["names"] == ["base", "ground"]


def test_a_template_can_be_built_and_used_by_a_tag(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    template_id = memory_gateway.build_template("web:v1", packages=["curl"])
    template = api.get("/templates/web:v1").json()
    assert template["names"] == ["web:v1"] and template["templateID"] == template_id
    assert [each["templateID"] for each in api.get("/templates?name=web:v1").json()] == [template_id]
    sandbox = api.post("/sandboxes", json={"templateID": "web:v1"}).json()
    assert sandbox["templateID"] == template_id and sandbox["alias"] == "web:v1"
    (tag,) = api.get("/templates/web/tags").json()
    assert tag["tag"] == "v1" and tag["buildID"] == template["buildID"] and tag["templateID"] == template_id
    response = api.post("/templates/tags", json={"target": "web:v1", "tags": ["default", "stable", "stable"]})
    assert response.status_code == 201
    assert response.json() == {"tags": ["default", "stable"], "buildID": template["buildID"]}
    assert api.get("/templates/web:default").json()["names"] == ["web", "web:v1", "web:stable"]
    assert api.get("/templates?name=web:default").json() == api.get("/templates?name=web").json() != []
    response = api.request("DELETE", "/templates/tags", json={"name": "web", "tags": ["v1", "stable"]})
    assert response.status_code == 204 and api.get("/templates/web").json()["names"] == ["web"]


def test_invalid_tags_are_refused(api: httpx.Client) -> None:
    names = api.get("/templates/base").json()["names"]
    for tag in ("", "no spaces", "a:b", "x" * 64, "-x", "ä", "0" * 32):
        for response in (
            api.post("/templates/tags", json={"target": "base", "tags": [tag]}),
            api.request("DELETE", "/templates/tags", json={"name": "base", "tags": [tag]}),
            api.put("/templates/base/alias", json={"alias": f"base:{tag}"}),
            api.post("/v3/templates", json={"name": "web", "tags": [tag]}),
            api.post("/templates", json={"name": f"web:{tag}"}),
        ):
            assert response.status_code == 400 and "is not allowed" in response.json()["message"], tag
    for body in ({"target": "base", "tags": []}, {"target": "base", "tags": ["v1"] * 101}, {"tags": ["v1"]}):
        assert api.post("/templates/tags", json=body).status_code == 400
    assert api.post("/templates/tags", json={"target": "base:v1", "tags": ["v2"]}).status_code == 404
    assert api.request("DELETE", "/templates/tags", json={"name": "base", "tags": ["v1"]}).status_code == 404
    assert api.get("/templates/nothing/tags").status_code == 404
    assert api.get("/templates/base").json()["names"] == names


def test_an_announced_build_has_the_tags_of_the_request(api: httpx.Client) -> None:
    for body, names, tags in (
        ({"name": "web"}, ["web"], ["default"]),
        ({"name": "web:v1"}, ["web:v1"], ["v1"]),
        ({"name": "web", "tags": ["v1", "v2"]}, ["web:v1", "web:v2"], ["v1", "v2"]),
        ({"name": "web:default", "tags": ["v1", "v1"]}, ["web", "web:v1"], ["default", "v1"]),
    ):
        announced_build = api.post("/v3/templates", json=body).json()
        assert announced_build["names"] == names and announced_build["tags"] == tags


@pytest.mark.parametrize("alias", ["", None])
def test_a_request_to_remove_an_alias_is_refused(api: httpx.Client, alias: str | None) -> None:
    """CubeSandbox's client sends an empty alias to remove the alias."""
    names = api.get("/templates/base").json()["names"]
    response = api.put("/templates/base/alias", json={"alias": alias})
    assert response.status_code == 400 and "give the name to a different template" in response.json()["message"]
    assert api.get("/templates/base").json()["names"] == names


def test_missing_templates_and_builds_are_not_found(api: httpx.Client) -> None:
    for route in ("/templates/nothing", "/templates/base/builds/nothing/status", "/templates/nothing/builds/x/logs"):
        response = api.get(route)
        assert response.status_code == 404 and "not found" in response.json()["message"]
    response = api.post("/sandboxes", json={"templateID": "nothing"})
    assert response.status_code == 404
    assert "template" in response.json()["message"] and "'nothing' not found" in response.json()["message"]


def test_a_template_with_an_older_guest_is_outdated_until_it_is_rebuilt(
    memory_gateway: MemoryGateway, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"name": "mine", "packages": ["curl"]}
    template = build_template(api, body)
    assert template["outdated"] is False
    monkeypatch.setattr(memory_gateway.host, "compute_guest_digest", lambda: "a newer guest")
    assert api.get("/templates/mine").json()["outdated"] is True
    assert [each["outdated"] for each in api.get("/templates?name=mine").json()] == [True]
    rebuilt_template = build_template(api, body)
    assert rebuilt_template["outdated"] is False and rebuilt_template["templateID"] != template["templateID"]
    assert api.post("/templates", json=body).status_code == 200


def test_unfinished_and_failed_templates_are_not_outdated(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    memory_gateway.host.build_seconds = 0.2
    build_fields = api.post("/templates", json={"name": "made", "setup": ["fail"]}).json()
    assert api.get("/templates/made").json()["outdated"] is False
    api.get(f"/templates/{build_fields['templateID']}/builds/{build_fields['buildID']}/logs", params={"follow": "true"})
    template = api.get("/templates/made").json()
    assert template["buildStatus"] == "error" and template["outdated"] is False


def test_new_files_at_the_path_do_not_make_a_template_outdated(
    memory_gateway: MemoryGateway, api: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tarball = tmp_path / "rootfs.tar"
    tarball.write_bytes(b"one")
    body = {"name": "mine", "from": "rootfs", "path": str(tarball)}
    build_template(api, body)
    assert api.get("/templates/mine").json()["outdated"] is False
    tarball.write_bytes(b"two")
    assert api.get("/templates/mine").json()["outdated"] is False
    monkeypatch.setattr(memory_gateway.host, "compute_guest_digest", lambda: "a newer guest")
    assert api.get("/templates/mine").json()["outdated"] is True


def test_outdated_may_be_null_for_templates_of_older_gateways(
    memory_gateway: MemoryGateway, api: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of older gateways do not contain the digest of the template's source files."""
    tarball = tmp_path / "rootfs.tar"
    tarball.write_bytes(b"one")
    build_template(api, {"name": "mine", "from": "rootfs", "path": str(tarball)})
    for name in ("base", "mine"):
        memory_gateway.engine.templates.get(name).source_digest = ""
    assert [api.get(f"/templates/{name}").json()["outdated"] for name in ("base", "mine")] == [False, None]
    monkeypatch.setattr(memory_gateway.host, "compute_guest_digest", lambda: "a newer guest")
    assert [api.get(f"/templates/{name}").json()["outdated"] for name in ("base", "mine")] == [True, None]


def build_template(api: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """Build a template, and return the API's representation of it."""
    response = api.post("/templates", json=body)
    assert response.status_code == 202
    route = f"/templates/{response.json()['templateID']}/builds/{response.json()['buildID']}"
    api.get(f"{route}/logs", params={"follow": "true"})
    template: dict[str, Any] = api.get(f"/templates/{body['name']}").json()
    assert template["buildStatus"] == "ready"
    return template


@pytest.mark.parametrize("alias", ["no spaces", "-x", "a:b:c", "a:", ":a", "ä"])
def test_the_lookup_of_an_invalid_alias_is_refused(api: httpx.Client, alias: str) -> None:
    response = api.get(f"/templates/aliases/{alias}")
    assert response.status_code == 400 and "is not allowed" in response.json()["message"]
    assert api.get("/templates/aliases/no-such").status_code == 404


def test_the_login_to_a_registry_must_be_complete(api: httpx.Client) -> None:
    image = {"name": "x", "image": "registry.test/app:1"}
    for body, words in (
        ({**image, "registryUsername": "reader"}, "send both a user name and a password"),
        ({**image, "registryPassword": "hunter2"}, "send both a user name and a password"),
        ({**image, "registryUsername": "a:b", "registryPassword": "hunter2"}, "registryUsername"),
        ({"name": "x", "registryUsername": "reader", "registryPassword": "hunter2"}, "image"),
        ({"name": "x", "image": "oci:/a", "registryUsername": "reader", "registryPassword": "hunter2"}, "registry"),
        ({**image, "registryUsername": "reader", "registryPassword": ["hunter2"]}, "registryPassword"),
    ):
        response = api.post("/templates", json=body)
        assert response.status_code == 400 and words in response.json()["message"], response.text
        assert "hunter2" not in response.text
    for login, words in (
        ({"type": "registry", "username": "reader"}, "send both"),
        ({"type": "gcp", "password": "hunter2"}, "has no 'username' and 'password'"),
        ({"type": "gcp"}, "send 'serviceAccountJson'"),
    ):
        build = api.post("/v3/templates", json={"name": "x"}).json()
        route = f"/v2/templates/{build['templateID']}/builds/{build['buildID']}"
        response = api.post(route, json={"fromImage": "registry.test/app:1", "fromImageRegistry": login})
        assert response.status_code == 400 and words in response.json()["message"]


def test_the_login_to_a_registry_reaches_the_host_and_is_not_shown(
    memory_gateway: MemoryGateway, api: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    logins: list[RegistryLogin | None] = []

    async def build_base(base: Snapshot, recipe: Recipe, digest: str, log: Log, login: RegistryLogin | None) -> str:
        logins.append(login)
        return await MemoryHost.build_base(memory_gateway.host, base, recipe, digest, log)

    monkeypatch.setattr(memory_gateway.host, "build_base", build_base)
    image = "registry.test/app:1"
    build_template(api, {"name": "mine", "image": image, "registryUsername": "reader", "registryPassword": "hunter2"})
    texts = [api.get("/templates/mine").text]
    for login in (
        {"type": "registry", "username": "reader", "password": "hunter3"},
        {"type": "gcp", "serviceAccountJson": '{"key": "hunter4"}'},
    ):
        build = api.post("/v3/templates", json={"name": "mine"}).json()
        path = f"/templates/{build['templateID']}/builds/{build['buildID']}"
        texts.append(api.post(f"/v2{path}", json={"fromImage": image, "fromImageRegistry": login}).text)
        texts += [api.get(f"{path}/logs", params={"follow": True}).text, api.get("/templates/mine").text]
    assert logins == [
        RegistryLogin("reader", "hunter2"),
        RegistryLogin("reader", "hunter3"),
        RegistryLogin("_json_key", '{"key": "hunter4"}'),
    ]
    assert not any("hunter" in text for text in texts)


def follow_build(api: httpx.Client, build: dict[str, Any]) -> str:
    """Wait until a build has finished, and return its log."""
    route = f"/templates/{build['templateID']}/builds/{build['buildID']}"
    return api.get(f"{route}/logs", params={"follow": "true"}).text


def start_e2b_build(api: httpx.Client, announcement: dict[str, Any], body: dict[str, Any]) -> httpx.Response:
    build = api.post("/v3/templates", json=announcement).json()
    return api.post(f"/v2/templates/{build['templateID']}/builds/{build['buildID']}", json=body)


def test_a_template_is_built_from_another_template(api: httpx.Client) -> None:
    build_template(api, {"name": "lower", "memoryMB": 512, "startCommand": "serve", "readyProbe": "true"})
    upper_template = build_template(api, {"name": "upper", "template": "lower", "setup": ["touch /upper"]})
    recipe = upper_template["recipe"]
    assert (recipe["from"], recipe["template"], recipe["startCommand"]) == ("template", "lower", "")
    assert upper_template["memoryMB"] == 512 and upper_template["outdated"] is False
    response = api.post("/templates", json={"name": "upper", **recipe})
    assert response.status_code == 200 and response.json()["templateID"] == upper_template["templateID"]
    assert "starting serve" in follow_build(api, upper_template), "the command of the lower template is started"
    top_template = build_template(api, {"name": "top", "template": "upper", "startCommand": "true", "cpuCount": 2})
    assert "starting true" in follow_build(api, top_template)
    assert (top_template["cpuCount"], top_template["memoryMB"]) == (2, 512)
    third_template = build_template(api, {"name": "third", "template": "upper"})
    assert "starting serve" in follow_build(api, third_template) and "waiting for" in follow_build(api, third_template)
    build_template(api, {"name": "lower", "packages": ["git"]})
    rebuild = api.post("/templates/upper")
    assert rebuild.status_code == 202 and rebuild.json()["templateID"] != upper_template["templateID"]
    assert "starting serve" not in follow_build(api, rebuild.json())
    assert api.delete("/templates/lower").status_code == 204 and api.get("/templates/upper").status_code == 200
    assert api.post("/templates/upper").status_code == 404


def test_a_build_from_a_template_with_steps(api: httpx.Client) -> None:
    build_template(api, {"name": "lower", "diskSizeMB": 3000})
    steps = [{"type": "RUN", "args": ["touch /upper"]}]
    response = start_e2b_build(api, {"name": "upper"}, {"fromTemplate": "lower", "steps": steps})
    assert response.status_code == 202 and follow_build(api, response.json()).endswith("ready\n")
    upper_template = api.get("/templates/upper").json()
    api.post("/sandboxes", json={"templateID": "upper", "name": "user"}).raise_for_status()
    result = api.post("/sandboxes/user/exec", json={"args": ["read", "/opt/sandbox/start"]}).json()
    assert result["stdout"] == "start", "the program that runs the steps was not installed"
    assert upper_template["recipe"]["template"] == "lower" and upper_template["diskSizeMB"] == 3000


def test_builds_from_templates_that_cannot_work_are_refused(api: httpx.Client) -> None:
    for body, status, words in (
        ({"template": "missing"}, 404, "'missing' not found"),
        ({"template": "base", "packages": ["git"]}, 400, "'packages' cannot be added to a template"),
        ({"template": "base", "diskSizeMB": 64}, 400, "is smaller than the disk of template 'base'"),
        ({"template": "base", "from": "debootstrap"}, 400, "'template' is valid only with 'from: template'"),
        ({"from": "template"}, 400, "needs the field 'template'"),
    ):
        response = api.post("/templates", json={"name": "x", **body})
        assert response.status_code == status and words in response.json()["message"], response.text
    login = {"type": "registry", "username": "reader", "password": "hunter2"}
    for body, status, words in (
        ({"fromTemplate": "missing"}, 404, "'missing' not found"),
        ({"fromTemplate": "base", "fromImage": "app:1"}, 400, "either 'fromImage' or 'fromTemplate'"),
        ({}, 400, "either 'fromImage' or 'fromTemplate'"),
        ({"fromTemplate": "base", "fromImageRegistry": login}, 400, "'fromImageRegistry' is for an image"),
    ):
        response = start_e2b_build(api, {"name": "x"}, body)
        assert response.status_code == status and words in response.json()["message"], response.text
