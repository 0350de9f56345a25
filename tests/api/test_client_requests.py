"""Test that what a published client can request, but this gateway cannot do, is refused with a reason.

The clients are unmodified. Here they use a gateway with an in-memory host; the tests in tests/sdk use real hosts.
"""

from __future__ import annotations

import os
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import cubesandbox
import e2b
import e2b.exceptions
import httpx
import pytest
from e2b.api.client.api.templates import (
    get_templates,
    get_templates_template_id,
    get_templates_template_id_builds_build_id_logs,
)

from sandbox_gateway.api.body import Body
from sandbox_gateway.api.client_requests import IGNORED_PARAMETERS, UNSUPPORTED_REQUESTS
from sandbox_gateway.api.native import requests
from sandbox_gateway.api.unknown_fields import find_refusal, find_refused_fields, get_fields
from tests.api.test_errors import check_refusal
from tests.sdk import fields
from tests.sdk.servers import build_e2b_environment
from tests.support.memory_gateway import ADMIN_KEY, MemoryGateway

_BUILD_REQUESTS = {
    "POST /templates": requests.CreateTemplate,
    "POST /v3/templates": requests.AnnounceTemplate,
    "POST /v2/templates/{}/builds/{}": requests.BuildFromImage,
}
_RENAMED_FIELDS = {
    "fromImage": ("nginx:latest", "use 'image'"),
    "fromTemplate": ("base", "use 'template'"),
    "fromImageRegistry": ({"type": "registry"}, "use 'registryUsername' and 'registryPassword'"),
    "steps": ([{"type": "RUN", "args": ["true"]}], "use 'setup'"),
    "startCmd": ("nginx", "use 'startCommand'"),
    "readyCmd": ("true", "use 'readyProbe'"),
    "start_cmd": ("nginx", "use 'startCommand'"),
    "dockerfile": ("FROM nginx", "`POST /dockerfiles`"),
    "alias": ("other", "use 'name'"),
    "tags": (["v1"], "use 'name', as NAME:TAG"),
    "minFreeDiskMb": (512, "use 'diskSizeMB'"),
    "force": (True, "`POST /templates/{}`"),
    "public": (True, "every key"),
    "envVars": ({"A": "1"}, "when you create a sandbox"),
}


@pytest.fixture
def cube_config(memory_gateway: MemoryGateway) -> cubesandbox.Config:
    return cubesandbox.Config(api_url=memory_gateway.url, api_key=ADMIN_KEY)


def test_the_fields_of_another_build_request_are_refused(api: httpx.Client, cube_config: cubesandbox.Config) -> None:
    templates = api.get("/templates").json()
    for field, (value, remedy) in _RENAMED_FIELDS.items():
        message = check_refusal(api.post("/templates", json={"name": "base", field: value}), 400, "unsupported")
        assert message.startswith(f"{field}: not supported, because ") and remedy in message
        if field in ("dockerfile", "start_cmd"):
            continue  # The client itself refuses these.
        with pytest.raises(cubesandbox.ApiError, match=f"^{field}: not supported"):
            cubesandbox.Template.build(name="base", image="r.example/app:1", config=cube_config, **{field: value})
    assert api.get("/templates").json() == templates


@pytest.mark.parametrize("request_name", _BUILD_REQUESTS)
def test_every_build_request_knows_the_fields_of_the_others(request_name: str) -> None:
    model = _BUILD_REQUESTS[request_name]
    other_fields = {
        name
        for request in [*fields.list_e2b_requests(), *fields.list_cubesandbox_requests()]
        if str(request) in _BUILD_REQUESTS
        for name in request.body
    }
    assert {"fromImage", "image", "tags"} <= other_fields
    unknown_fields = other_fields - get_fields(model).keys() - model.ignored_fields.keys()
    assert [name for name in sorted(unknown_fields) if find_refusal(model, name) is None] == []


@pytest.mark.parametrize("model", [*_BUILD_REQUESTS.values(), requests.RebuildTemplate])
def test_no_supported_field_is_refused_as_misplaced(model: type[Body]) -> None:
    assert model.misplaced_fields and not model.misplaced_fields.keys() & get_fields(model).keys()
    for name in model.misplaced_fields:
        (refused,) = find_refused_fields(model, {name: "value"})
        assert ": " in refused.reason, "the sentence must say what to do"


def test_builds_and_rebuilds_have_a_status(memory_gateway: MemoryGateway, cube_config: cubesandbox.Config) -> None:
    memory_gateway.build_template("web", packages=["nginx"])
    build = cubesandbox.Template.build(name="app", image="r.example/app:1", config=cube_config)
    assert build.status in ("building", "ready")
    assert cubesandbox.Template.rebuild("web", config=cube_config).status == "ready"


def test_a_rebuild_with_changes_is_refused(
    memory_gateway: MemoryGateway, api: httpx.Client, cube_config: cubesandbox.Config
) -> None:
    memory_gateway.build_template("web", packages=["nginx"])
    template = api.get("/templates/web").json()
    for changes in ({"cpu": 4000, "memory": 4096}, {"image": "nginx"}, {"startCmd": "x"}, {"suite": "sid"}):
        with pytest.raises(cubesandbox.ApiError, match="`POST /templates`") as error_info:
            cubesandbox.Template.rebuild("web", config=cube_config, **changes)
        for name in changes:
            assert f"{name}: not supported, because a template is built again" in str(error_info.value)
    assert api.get("/templates/web").json() == template


def test_contradictory_fields_of_a_template_are_refused(api: httpx.Client) -> None:
    image = "r.example/app:1"
    for body, text in (
        ({"image": image, "suite": "trixie"}, "'suite' is valid only with 'from: debootstrap'"),
        ({"template": "base", "mirror": "http://mirror.example"}, "'mirror' is valid only with 'from: debootstrap'"),
        ({"memory": 256, "memoryMB": 512}, "'memory' is 256 MiB, but 'memoryMB' is 512: specify only one"),
        ({"image": "-rf"}, "the image '-rf' is not valid"),
    ):
        assert check_refusal(api.post("/templates", json={"name": "app", **body}), 400, "invalid").startswith(text)
    assert api.get("/templates/app").status_code == 404


def test_the_memory_of_a_template_has_two_names(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    memory_gateway.build_template("small", memory=512)
    memory_gateway.build_template("same", memory=512, memoryMB=512, suite="bookworm")
    assert [api.get(f"/templates/{name}").json()["memoryMB"] for name in ("small", "same")] == [512, 512]


def test_a_login_with_fields_of_another_type_is_refused(api: httpx.Client) -> None:
    build = api.post("/v3/templates", json={"name": "app"}).json()
    route = f"/v2/templates/{build['templateID']}/builds/{build['buildID']}"
    for kind, text in (("gcp", "'gcp' has no 'username'"), ("registry", "'registry' has no 'serviceAccountJson'")):
        login = {"type": kind, "serviceAccountJson": "{}", "username": "u", "password": "p"}
        body = {"fromImage": "r.example/app:1", "fromImageRegistry": login}
        assert text in check_refusal(api.post(route, json=body), 400, "invalid")


@pytest.mark.usefixtures("sandbox")
def test_a_value_that_would_change_something_is_refused(api: httpx.Client) -> None:
    for route, body, field in (
        ("/volumes", {"name": "vol", "driver": 0}, "driver"),
        ("/templates", {"name": "app", "probePort": 0}, "probePort"),
        ("/sandboxes/one/resume", {"autoPause": False}, "autoPause"),
    ):
        message = check_refusal(api.post(route, json=body), 400, "unsupported")
        assert message.startswith(f"{field}: not supported, because ")


@pytest.fixture
def e2b_options(memory_gateway: MemoryGateway) -> dict[str, Any]:
    return {"api_key": ADMIN_KEY, "api_url": memory_gateway.url, "validate_api_key": False}


def test_requests_without_a_route_say_what_to_use_instead(api: httpx.Client, sandbox: dict[str, Any]) -> None:
    """The status must not be 404, which clients take for the answer that an object does not exist."""
    for request, reason in UNSUPPORTED_REQUESTS.items():
        method, route = request.split()
        for name in ("one", sandbox["sandboxID"], "no-such"):
            response = api.request(method, route.replace("{}", name))
            assert check_refusal(response, 400, "unsupported") == f"{request} is not supported: {reason}"


def test_other_requests_are_not_affected(api: httpx.Client) -> None:
    assert "sandbox 'missing' not found" in check_refusal(api.get("/sandboxes/missing"), 404, "not_found")
    assert "not found" in check_refusal(api.get("/secrets/a/b"), 404, "not_found")
    created = api.post("/sandboxes", json={"templateID": "base", "name": "metrics"}).json()
    assert api.get("/sandboxes/metrics").json()["sandboxID"] == created["sandboxID"]


def test_an_unsupported_request_needs_a_key(keyless_client: httpx.Client) -> None:
    check_refusal(keyless_client.get("/secrets"), 401, "unauthorized")


def test_secrets_are_refused_and_not_reported_as_missing(e2b_options: dict[str, Any]) -> None:
    calls = (
        lambda: e2b.Secret.create("name", "value", **e2b_options),
        lambda: e2b.Secret.update("name", "value", **e2b_options),
        lambda: e2b.Secret.get_info("name", **e2b_options),
        lambda: e2b.Secret.exists("name", **e2b_options),
        lambda: e2b.Secret.destroy("name", **e2b_options),
        lambda: e2b.Secret.list(**e2b_options).next_items(),
    )
    for call in calls:
        with pytest.raises(
            e2b.exceptions.SecretException, match="is not supported: there are no secrets: use 'envVars'"
        ):
            call()


def test_file_calls_on_volumes_reach_the_gateway_with_the_documented_variables(
    memory_gateway: MemoryGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer variables, the client would send the volume's token to another service."""
    for name in [name for name in os.environ if name.startswith("E2B_")]:
        monkeypatch.delenv(name)
    for name, value in build_e2b_environment(memory_gateway.url, ADMIN_KEY).items():
        monkeypatch.setenv(name, value)
    volume = e2b.Volume.create("files", validate_api_key=False)
    with pytest.raises(e2b.VolumeException, match="mount the volume in a sandbox"):
        volume.list("/")


def test_unknown_query_parameters_cause_a_warning_or_an_error(api: httpx.Client, sandbox: dict[str, Any]) -> None:
    for route in ("/sandboxes?stat=running", "/v2/sandboxes?stat=running"):
        response = api.get(route)
        assert response.status_code == 200 and response.headers["warning"] == '299 - "ignored parameters: stat"'
        message = check_refusal(api.get(f"{route}&strict=true"), 400, "invalid")
        assert message == "unknown parameter: stat (did you mean state?): correct or remove it"
    response = api.delete("/sandboxes/one?force=1&bogus=2&strict=true")
    assert check_refusal(response, 400, "invalid").startswith("unknown parameters: force")
    assert api.get("/sandboxes/one").json()["sandboxID"] == sandbox["sandboxID"]
    response = api.post("/sandboxes/one/timeout?bogus=1", json={"timeout": 60, "tmeout": 60})
    assert response.status_code == 204
    assert response.headers["warning"] == '299 - "ignored parameters: bogus; ignored fields: tmeout"'


def test_known_query_parameters_cause_no_warning(api: httpx.Client) -> None:
    build_id = api.get("/templates/base").json()["buildID"]
    for request, parameters in IGNORED_PARAMETERS.items():
        method, route = request.split()
        path = route.replace("{}", "base", 1).replace("{}", build_id)
        for name in parameters:
            response = api.request(method, f"{path}?strict=true&{name}=1")
            assert response.status_code == 200 and "warning" not in response.headers, response.text
    upload_url = api.get(f"/templates/base/files/{'0' * 64}").json()["url"]
    upload_path = upload_url[upload_url.index("/build-files/") :]
    response = api.put(f"{upload_path}&strict=true", content=b"archive")
    assert response.status_code == 204 and "warning" not in response.headers, response.text
    response = api.get("/v2/sandboxes?state=running&limit=1&order=asc&metadata=a%3Db&strict=true")
    assert response.status_code == 200 and "warning" not in response.headers


def test_many_unknown_parameters_are_shortened(api: httpx.Client) -> None:
    query = "&".join(f"bogus{number}=1" for number in range(500))
    assert len(api.get(f"/sandboxes?{query}").headers["warning"]) < 700
    assert "and more" in check_refusal(api.get(f"/sandboxes?{query}&strict=true"), 400, "invalid")


def test_the_log_of_a_build_can_be_read_in_parts(memory_gateway: MemoryGateway, api: httpx.Client) -> None:
    memory_gateway.build_template("made", setup=["touch /made"])
    route = f"/templates/made/builds/{api.get('/templates/made').json()['buildID']}"
    entries = api.get(f"{route}/logs").json()["logs"]
    assert len(entries) > 2

    def read(**parameters: Any) -> list[dict[str, Any]]:
        response = api.get(f"{route}/logs", params={"strict": True, **parameters})
        assert response.status_code == 200, response.text
        logs: list[dict[str, Any]] = response.json()["logs"]
        return logs

    assert read(limit=2) == entries[:2] and read(limit=0) == []
    assert read(direction="backward", limit=1) == entries[-1:]
    assert read(direction="backward") == entries[::-1]
    assert read(level="error") == read(level="warn") == [] and read(level="info") == entries
    assert read(cursor=0) == entries and read(cursor=1 << 50) == []
    assert read(cursor=0, direction="backward") == [] and read(cursor=1 << 50, direction="backward") == entries[::-1]
    last_time = int(datetime.fromisoformat(entries[-1]["timestamp"]).timestamp() * 1000)
    assert entries[-1] in read(cursor=last_time) and entries[-1] in read(cursor=last_time, direction="backward")
    assert api.get(f"{route}/status?level=error").json()["logs"] == []
    for query in ("level=loud", "direction=up", "cursor=-1", "limit=x", "follow=1&limit=1", "follow=1&level=error"):
        check_refusal(api.get(f"{route}/logs?{query}"), 400, "invalid")


def test_the_generated_client_of_e2b_can_parse_templates_and_logs(api: httpx.Client) -> None:
    """No method of the client calls these routes, but its generated part contains them."""

    def call(module: Any, *names: str) -> Any:
        request = module._get_kwargs(*names)
        response = api.request(request["method"], request["url"])
        assert response.status_code == 200
        return module._parse_response(client=SimpleNamespace(raise_on_unexpected_status=True), response=response)

    api.post("/v3/templates", json={"name": "waiting"}).raise_for_status()
    template = call(get_templates_template_id, "base")
    assert template.names == ["base"] and template.envd_version and not template.public
    (build,) = template.builds
    assert str(build.build_id) == template.build_id and build.status == template.build_status == "ready"
    (listed_template,) = [each for each in call(get_templates) if each.names == ["base"]]
    assert listed_template.memory_mb == template.memory_mb == build.memory_mb > 0
    logs = call(get_templates_template_id_builds_build_id_logs, "base", str(build.build_id)).logs
    assert [each.message for each in logs][-1] == "ready" and logs[0].level == "info"
