"""Plan sessions and runs that apply a plan: they read the objects of all hosts, and change those of one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from ansible_collections.grove.sandbox.plugins.module_utils import _sandbox

from tests.api.memory_gateway import READ_KEY
from tests.api.test_artifact_modules import run_task
from tests.fleet.test_forwarding import Objects
from tests.fleet.world import FleetHost, World
from tests.support.waiting import wait_until

Pair = tuple[FleetHost, FleetHost]
_numbers = itertools.count()


@pytest.fixture(params=["plan session", "run that applies a plan"])
def run(request: pytest.FixtureRequest, pair: Pair) -> tuple[str, str]:
    """The noun for a run in errors, and the prefix of its paths, at the gateway of h1."""
    one, _ = pair
    name = f"a-run-of-a-test-in-a-fleet-{next(_numbers)}"
    if request.param == "plan session":
        return request.param, f"/plans/{one.post('/plans', {'run': name}, 200)['planID']}"
    return request.param, f"/applied-runs/{one.post('/applied-runs', {'run': name}, 200)['runID']}"


def test_a_run_reads_the_objects_of_all_hosts(pair: Pair, run: tuple[str, str]) -> None:
    one, two = pair
    objects = Objects(two, with_template=True)
    _, prefix = run
    for kind, name in objects.names.items():
        path = "sandboxes" if kind == "sandbox" else f"{kind}s"
        assert one.get(f"{prefix}/{path}/{name}")["sandboxHost"] == "h2"
        assert [each["sandboxHost"] for each in one.get(f"{prefix}/{path}", name=name)] == ["h2"]


def test_a_run_refuses_to_change_objects_of_other_hosts(pair: Pair, run: tuple[str, str]) -> None:
    one, two = pair
    objects = Objects(two, with_template=True)
    noun, prefix = run
    names = objects.names
    with one.client() as client:
        for method, path, body in (
            ("PATCH", f"/sandboxes/{names['sandbox']}", {"metadata": {}}),
            ("DELETE", f"/sandboxes/{names['sandbox']}", None),
            ("POST", f"/sandboxes/{names['sandbox']}/snapshots", {}),
            ("POST", f"/snapshots/{names['snapshot']}/push", {"reference": "127.0.0.1:1/a:b"}),
            ("POST", f"/snapshots/{names['snapshot']}/fork", {}),
            ("POST", "/sandboxes", {"templateID": names["snapshot"]}),
            ("DELETE", f"/templates/{names['template']}", None),
            ("PATCH", f"/volumes/{names['volume']}", {"sizeMB": 4096}),
        ):
            refused = client.request(method, prefix + path, json=body)
            assert refused.status_code == 400, (path, refused.text)
            assert f"on host 'h2', but a {noun} can change only the host" in refused.json()["message"], path
    assert two.get(f"/sandboxes/{names['sandbox']}")["state"] == "running"


def test_a_run_refuses_a_placement(pair: Pair, run: tuple[str, str]) -> None:
    one, _ = pair
    noun, prefix = run
    with one.client() as client:
        for path, body in (("/sandboxes", {"templateID": "base"}), ("/snapshots/base/fork", {"count": 2})):
            refused = client.post(prefix + path, json={**body, "placement": {"host": "h1"}})
            assert refused.status_code == 400 and f"placement: not supported in a {noun}" in refused.json()["message"]


def test_a_plan_session_knows_the_names_of_all_hosts(pair: Pair) -> None:
    one, two = pair
    objects = Objects(two)
    plan = one.post("/plans", {"run": f"a-run-with-names-{next(_numbers)}"}, 200)["planID"]
    with one.client() as client:
        for path, body in (
            ("/sandboxes", {"templateID": "base", "name": objects.names["volume"]}),
            ("/volumes", {"name": objects.names["sandbox"]}),
        ):
            refused = client.post(f"/plans/{plan}{path}", json=body)
            assert (refused.status_code, refused.json()["kind"]) == (409, "name_taken"), refused.text
            assert "of host h2" in refused.json()["message"]


def test_a_read_key_gets_no_more_through_a_plan_session(pair: Pair) -> None:
    one, two = pair
    objects = Objects(two, with_template=True)
    with one.client(READ_KEY) as client:
        plan = client.post("/plans", json={"run": "a-run-of-a-reader-1"}).json()["planID"]
        path = f"/plans/{plan}/snapshots/{objects.names['snapshot']}/export"
        assert client.get(path).status_code == 403
        upload = f"/plans/{plan}/templates/{objects.names['template']}/files/{'0' * 64}"
        assert client.get(upload).status_code == 403
        shown = client.get(f"/plans/{plan}/sandboxes/{objects.names['sandbox']}").json()
        assert "envdAccessToken" not in shown


def _run_sandbox_task(host: FleetHost, *, check: bool, **options: Any) -> Any:
    return run_task(_sandbox, host.gateway, check=check, **options)


def test_check_mode_predicts_what_the_module_does_on_the_other_host(pair: Pair) -> None:
    one, two = pair
    name = Objects(two).names["sandbox"]
    for check in (True, False):
        result = _run_sandbox_task(one, check=check, name=[name])
        assert not result.get("failed") and not result["changed"], "it exists on h2"
        for host in pair:
            result = _run_sandbox_task(host, check=check, name=[name], template="base", recreate=True)
            assert not result.get("failed") and not result["changed"], "h1 has a copy of its template"
    refused = _run_sandbox_task(one, check=True, name=[name], state="absent")
    assert refused["failed"] and "can change only the host of its own gateway" in refused["msg"]
    assert _run_sandbox_task(one, check=False, name=[name], state="absent")["changed"]
    with two.client() as client:
        assert client.get(f"/sandboxes/{name}").status_code == 404


def test_a_module_does_not_take_the_sandboxes_of_a_silent_host_for_missing(world: World) -> None:
    one, two = world.start("h1", "h2")
    for host in (one, two):
        host.gateway.build_template()
    two.post("/sandboxes", {"templateID": "base", "name": "web"})
    assert one.get("/sandboxes/web")["sandboxHost"] == "h2"
    two.end()
    wait_until(lambda: one.list_running_members() == ["h1"])
    for names in (["web"], ["web", "db"]):
        for state in ("absent", "running"):
            result = _run_sandbox_task(one, check=False, name=names, state=state, gateway_timeout=4)
            assert result["failed"] and result["failure"]["kind"] == "unavailable", result
            assert "h2" in result["msg"]
    with one.client() as client:
        answer = client.get("/sandboxes", params={"name": "other"})
        assert answer.json() == [] and "x-sandbox-hosts-missing" not in answer.headers, "h2 does not have this name"
