"""Test that unknown fields in request bodies cause a warning or, with `?strict=true`, an error."""

from __future__ import annotations

import inspect
import json
import re
import time
from typing import Any

import e2b.api.client.models as e2b_models
import httpx
import pytest
from ansible_collections.grove.sandbox.plugins.module_utils._client import Client

from sandbox_gateway.api.body import Body
from sandbox_gateway.api.forkd import shapes as forkd
from sandbox_gateway.api.native import requests
from sandbox_gateway.api.unknown_fields import MAX_LIST_ENTRIES, find_model, find_unknown_fields
from sandbox_gateway.cli.client import Client as CommandClient
from tests.api.test_errors import check_refusal
from tests.support.memory_gateway import MemoryGateway


def find_unknown_paths(model: type[Body], data: Any) -> list[str]:
    return [field.path for field in find_unknown_fields(model, data)]


@pytest.mark.parametrize(
    ("method", "route", "body", "path", "similar_field"),
    [
        ("POST", "/sandboxes", {"templateID": "base", "tmeout": 5}, "tmeout", "timeout"),
        ("POST", "/sandboxes", {"templateID": "base", "memory_MB": 256}, "memory_MB", "memoryMB"),
        ("POST", "/v2/sandboxes", {"templateID": "base", "zzz": 1}, "zzz", ""),
        (
            "POST",
            "/sandboxes",
            {"templateID": "base", "network": {"allowout": ["10.0.0.0/8"]}},
            "network.allowout",
            "allowOut",
        ),
        (
            "POST",
            "/sandboxes",
            {"templateID": "base", "volumeMounts": [{"name": "vol", "path": "/v", "readonly": True}]},
            "volumeMounts.0.readonly",
            "readOnly",
        ),
        ("POST", "/sandboxes/one/snapshots", {"retention": {"keepLast": 1, "keep": 2}}, "retention.keep", "keepLast"),
        ("POST", "/snapshots/base/fork", {"nmae": "single"}, "nmae", "name"),
        ("PATCH", "/sandboxes/one", {"meta": {}}, "meta", "metadata"),
        ("PUT", "/sandboxes/one/network", {"subnets": []}, "subnets", ""),
        ("POST", "/sandboxes/one/exec", {"args": ["id"], "tty": True}, "tty", ""),
        ("POST", "/v1/sandboxes", {"snapshot_tag": "base", "snapshottag": "base"}, "snapshottag", "snapshot_tag"),
        ("POST", "/v1/sandboxes/one/exec", {"args": ["id"], "timeout": 3}, "timeout", "timeout_secs"),
        ("POST", "/v1/sandboxes/one/branch", {"mod": "diff"}, "mod", "mode"),
    ],
)
def test_an_unknown_field_causes_a_warning_or_an_error(
    api: httpx.Client,
    sandbox: dict[str, Any],
    method: str,
    route: str,
    body: dict[str, Any],
    path: str,
    similar_field: str,
) -> None:
    api.post("/volumes", json={"name": "vol"}).raise_for_status()
    message = check_refusal(api.request(method, route, params={"strict": True}, json=body), 400, "invalid")
    hint = f" (did you mean {similar_field}?)" if similar_field else ""
    assert message == f"unknown field: {path}{hint}: correct or remove it"
    response = api.request(method, route, json=body)
    assert response.is_success, response.text
    assert response.headers.get_list("warning") == [f'299 - "ignored fields: {path}"']


@pytest.mark.parametrize(
    ("method", "route", "body", "path"),
    [
        ("POST", "/templates", {"name": "base", "exposedPorts": [80]}, "exposedPorts"),
        ("POST", "/templates", {"name": "base", "env": ["A=1"]}, "env"),
        ("POST", "/templates", {"name": "base", "command": ["nginx"]}, "command"),
        ("POST", "/templates", {"name": "base", "allowInternetAccess": False}, "allowInternetAccess"),
        ("POST", "/volumes", {"name": "vol", "driver": "nfs"}, "driver"),
        ("POST", "/sandboxes", {"templateID": "base", "distributionScope": ["node-1"]}, "distributionScope"),
        ("POST", "/sandboxes", {"templateID": "base", "autoPauseMemory": False}, "autoPauseMemory"),
        ("POST", "/sandboxes", {"templateID": "base", "auto_pause_memory": False}, "auto_pause_memory"),
        ("POST", "/sandboxes", {"templateID": "base", "network": {"dnsServers": ["1.1.1.1"]}}, "network.dnsServers"),
        ("POST", "/sandboxes", {"templateID": "base", "network": {"egress_proxy": "a"}}, "network.egress_proxy"),
        ("PUT", "/sandboxes/one/network", {"rules": {"api.example.com": []}}, "rules"),
        ("POST", "/sandboxes/one/pause", {"requireHealthyGuest": True}, "requireHealthyGuest"),
        ("POST", "/sandboxes/one/resume", {"autoPause": True}, "autoPause"),
        ("POST", "/v1/snapshots", {"tag": "a", "rootfs": "/", "kernel": "/vmlinuz"}, "kernel"),
        ("POST", "/v1/sandboxes", {"snapshot_tag": "base", "live_fork": True}, "live_fork"),
    ],
)
def test_an_unsupported_field_of_a_client_is_refused(
    api: httpx.Client, sandbox: dict[str, Any], method: str, route: str, body: dict[str, Any], path: str
) -> None:
    def list_objects() -> list[Any]:
        kinds = ("sandboxes", "templates", "volumes", "snapshots")
        return [
            [(each.get("names"), each.get("name"), each.get("state")) for each in api.get(f"/{kind}").json()]
            for kind in kinds
        ]

    objects_before = list_objects()
    for strict in ("", "?strict=true"):
        message = check_refusal(api.request(method, f"{route}{strict}", json=body), 400, "unsupported")
        assert message.startswith(f"{path}: not supported, because ") and message.count(": ") >= 2
    assert list_objects() == objects_before


def test_all_unsupported_fields_are_reported(api: httpx.Client) -> None:
    """The body is what the CubeSandbox client sends for `Template.build(name="base", image="nginx", envs=..., ...)`."""
    templates = api.get("/templates").json()
    body = {"image": "nginx:latest", "name": "base", "cpu": 2000, "exposedPorts": [80], "env": ["A=1"]}
    message = check_refusal(api.post("/templates", json=body), 400, "unsupported")
    assert [part.partition(":")[0] for part in message.split("; ")] == ["exposedPorts", "env"]
    assert api.get("/templates").json() == templates


def test_unsupported_fields_with_no_effect_are_accepted(api: httpx.Client) -> None:
    body = {
        "templateID": "base",
        "distributionScope": [],
        "iam": None,
        "autoPauseMemory": True,
        "network": {"rules": {}, "egressProxy": None, "dnsServers": []},
    }
    response = api.post("/sandboxes?strict=true", json=body)
    assert response.status_code == 201 and "warning" not in response.headers
    assert api.post("/volumes?strict=true", json={"name": "", "driver": ""}).status_code == 201


@pytest.mark.parametrize(("key", "remedy"), [("host-mount", "volumeMounts"), ("network-policy", "network")])
def test_metadata_keys_with_a_meaning_in_cubesandbox_are_refused(
    api: httpx.Client, sandbox: dict[str, Any], key: str, remedy: str
) -> None:
    metadata = {"team": "red", key: "[]"}
    for method, route, body in (
        ("POST", "/sandboxes", {"templateID": "base"}),
        ("POST", "/snapshots/base/fork", {}),
        ("POST", "/sandboxes/one/clone", {}),
        ("PATCH", "/sandboxes/one", {}),
    ):
        message = check_refusal(api.request(method, route, json={**body, "metadata": metadata}), 400, "invalid")
        assert message.startswith(f"metadata: the key '{key}' is not supported") and remedy in message
    assert [each["name"] for each in api.get("/sandboxes").json()] == ["one"]
    assert api.get("/sandboxes/one").json()["metadata"] == {}


def test_all_unknown_fields_are_reported(api: httpx.Client) -> None:
    body = {"templateId": "base", "one": 1, "network": {"two": 2}}
    message = check_refusal(api.post("/sandboxes?strict=true", json=body), 400, "invalid")
    assert message.startswith("unknown fields: templateId (did you mean templateID?), one")
    assert "network.two" in message


def test_other_errors_include_the_warning(api: httpx.Client) -> None:
    response = api.post("/sandboxes", json={"templateId": "base"})
    assert "templateID: this field is required" in check_refusal(response, 400, "invalid")
    assert response.headers["warning"] == '299 - "ignored fields: templateId"'


@pytest.mark.parametrize("strict", ["", "?strict=true"])
def test_known_fields_cause_no_warning(api: httpx.Client, strict: str) -> None:
    body = {"templateID": "base", "name": "one", "metadata": {"any": "key"}, "envVars": {"ANY": "1"}}
    response = api.post(f"/sandboxes{strict}", json=body | {"network": {"allow_internet_access": True}})
    assert response.status_code == 201 and "warning" not in response.headers
    for response in (
        api.post(f"/sandboxes/one/snapshots{strict}"),
        api.post(f"/sandboxes/one/exec{strict}", json={"args": ["id"]}),
        api.get(f"/sandboxes{strict}"),
        api.delete(f"/sandboxes/one{strict}"),
    ):
        assert response.is_success and "warning" not in response.headers


def test_strict_must_be_true_or_false(api: httpx.Client) -> None:
    assert "strict" in check_refusal(api.post("/sandboxes?strict=perhaps", json={"templateID": "base"}), 400, "invalid")


@pytest.mark.parametrize("content", [b"", b"null", b"[1]", b"{bad", b"[" * 100_000, b'"x"'])
def test_invalid_bodies_are_refused_in_both_modes(api: httpx.Client, content: bytes) -> None:
    for content_type in ("application/json", "text/plain"):
        messages = [
            check_refusal(api.post(route, content=content, headers={"Content-Type": content_type}), 400, "invalid")
            for route in ("/sandboxes", "/sandboxes?strict=true")
        ]
        assert messages[0] == messages[1]


def test_a_warning_is_short_and_printable(api: httpx.Client) -> None:
    names = ['a"b\\c', "\x1b[31m", "line\r\nX-Evil: 1", "größe", "\ud800", "long" * 1000]
    body = {"templateID": "base", **dict.fromkeys(names, 1), **{f"k{number}": 1 for number in range(1000)}}
    response = api.post("/sandboxes", content=json.dumps(body).encode())
    assert response.status_code == 201 and "x-evil" not in response.headers
    warning = response.headers["warning"]
    assert len(warning) < 700 and re.fullmatch(r'299 - "ignored fields: [ !#-\[\]-~]*"', warning)
    message = check_refusal(api.post("/sandboxes?strict=true", content=json.dumps(body).encode()), 400, "invalid")
    assert len(message) < 4001 and "and more" in message and message.isprintable()


def test_a_field_in_the_last_entry_of_the_longest_list_is_found() -> None:
    steps = [{"type": "RUN", "args": ["true"]}] * 999
    body = {"fromImage": "app", "steps": [*steps, {"type": "RUN", "agrs": ["true"]}]}
    assert find_unknown_paths(requests.BuildFromImage, body) == ["steps.999.agrs"]


def test_no_valid_list_is_longer_than_the_part_that_is_examined() -> None:
    models = [model for model in vars(requests).values() if inspect.isclass(model) and issubclass(model, Body)]
    models += [model for model in vars(forkd).values() if inspect.isclass(model) and issubclass(model, Body)]
    limits = {
        f"{model.__name__}.{name}": max(item.max_length for item in field.metadata if hasattr(item, "max_length"))
        for model in models
        for name, field in model.model_fields.items()
        if "list[" in str(field.annotation) and find_model(field.annotation)
    }
    assert limits["BuildFromImage.steps"] == MAX_LIST_ENTRIES
    assert max(limits.values()) <= MAX_LIST_ENTRIES, limits


def test_checking_a_large_body_is_fast() -> None:
    """The check must be fast because it blocks the event loop."""
    many_fields = {f"tmeout{number}" + "x" * 100: 1 for number in range(30_000)}
    many_mounts = {"volumeMounts": [{}] * 1_000_000}
    cpu_seconds_before = time.process_time()
    first_fields = [
        str(field) for _, field in zip(range(25), find_unknown_fields(requests.Fork, many_fields), strict=False)
    ]
    assert len(first_fields) == 25 and find_unknown_paths(requests.Fork, many_mounts) == []
    assert time.process_time() - cpu_seconds_before < 0.25


REQUESTS_BY_E2B_MODEL = {
    "NewSandbox": requests.CreateSandbox,
    "NewSandboxV2": requests.CreateSandbox,
    "SandboxNetworkConfig": requests.Network,
    "SandboxNetworkUpdateConfig": requests.Network,
    "SandboxLifecycle": requests.Lifecycle,
    "SandboxAutoResumeConfig": requests.AutoResume,
    "SandboxVolumeMount": requests.VolumeMount,
    "ConnectSandbox": requests.Resume,
    "ConnectSandboxV2": requests.Resume,
    "ResumedSandbox": requests.Resume,
    "SandboxPauseRequest": requests.Pause,
    "SandboxForkRequest": requests.Fork,
    "SandboxSnapshotRequest": requests.CreateSnapshot,
    "SandboxTimeoutRequest": requests.SetTimeout,
    "NewVolume": requests.CreateVolume,
}


@pytest.mark.parametrize("name", REQUESTS_BY_E2B_MODEL)
def test_the_published_client_sends_only_known_fields(name: str) -> None:
    source = inspect.getsource(getattr(e2b_models, name).from_dict)
    fields = re.findall(r'd\.pop\("(\w+)"', source)
    assert fields and find_unknown_paths(REQUESTS_BY_E2B_MODEL[name], dict.fromkeys(fields)) == []


def test_python_field_names_are_known() -> None:
    assert find_unknown_paths(requests.CreateSandbox, {"template": "base", "memory_mb": 1}) == []
    assert find_unknown_paths(forkd.Branch, {"tag": "a", "measure_diff": True, "wait": False, "parent_tag": "b"}) == []


@pytest.mark.parametrize(
    ("client", "message"),
    [(Client, "does not know nmae: "), (CommandClient, r"unknown field: nmae \(did you mean name\?\)")],
)
def test_our_clients_use_strict_mode(memory_gateway: MemoryGateway, client: Any, message: str) -> None:
    with pytest.raises(Exception, match=message):
        client(memory_gateway.unix_url).call("POST", "/sandboxes", body={"templateID": "base", "nmae": "one"})
    assert client(memory_gateway.unix_url).call("POST", "/sandboxes", body={"templateID": "base"})
