"""The data plane: to a port inside, streamed both ways, with nothing of the gateway's own secrets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.served import ADMIN_KEY, EXEC_KEY, READ_KEY, Served
from tests.api.test_sandboxes import create

PORT = 49983


@pytest.fixture
def one(api: httpx.Client) -> dict[str, Any]:
    return create(api, name="one")


@pytest.fixture
def anyone(served: Served) -> Iterator[httpx.Client]:
    """A client over TCP that sends no key."""
    with served.client("") as client:
        yield client


def to(sandbox: dict[str, Any], port: int | str = PORT, **more: str) -> dict[str, str]:
    return {"E2b-Sandbox-Id": sandbox["sandboxID"], "E2b-Sandbox-Port": str(port), **more}


def at(sandbox: dict[str, Any], port: int | str = PORT, **more: str) -> dict[str, str]:
    return {"Host": f"{port}-{sandbox['sandboxID']}.sandbox.local", **more}


@pytest.mark.parametrize("addressed", [to, at])
def test_a_request_arrives_as_it_was_sent(api: httpx.Client, one: dict[str, Any], addressed: Any) -> None:
    own = {"X-Own": "1", "Keep-Alive": "timeout=3"}
    answer = api.post("/echo/a%2Fb//c?x=1&y=%20z", content=b"hello", headers=addressed(one, **own))
    assert answer.status_code == 201 and answer.headers["x-inside"] == "yes"
    assert "keep-alive" not in answer.headers
    told = answer.json()
    assert told["target"] == "/echo/a%2Fb//c?x=1&y=%20z" and told["body"] == "hello"
    headers = told["headers"]
    assert headers["x-own"] == "1" and headers["content-length"] == "5" and "keep-alive" not in headers
    assert headers["x-access-token"] == one["envdAccessToken"]
    assert headers["host"] == (f"{PORT}-{one['sandboxID']}.sandbox.local" if addressed is at else f"localhost:{PORT}")


def test_hosts_with_ports_and_capitals(api: httpx.Client, one: dict[str, Any]) -> None:
    for host in (f"{PORT}-{one['sandboxID']}.SANDBOX.local:8443", f"{PORT}-{one['sandboxID'].upper()}.sandbox.local"):
        assert api.get("/echo", headers={"Host": host}).status_code == 201
    assert api.get("/echo", headers={"Host": f"{PORT}-{one['sandboxID']}.elsewhere.example"}).status_code == 404


def test_keys_stay_outside(served: Served, one: dict[str, Any]) -> None:
    with served.client("") as client:
        for header in ({"X-API-Key": EXEC_KEY}, {"Authorization": f"Bearer {EXEC_KEY}"}):
            told = client.get("/echo", headers=to(one, **header)).json()
            assert EXEC_KEY not in str(told)
        both = {"X-API-Key": EXEC_KEY, "Authorization": "Bearer the-services-own"}
        passed = client.get("/echo", headers=to(one, **both)).json()["headers"]
        assert passed["authorization"] == "Bearer the-services-own" and "x-api-key" not in passed
        basic = {"X-API-Key": EXEC_KEY, "Authorization": "Basic dXNlcjo="}
        assert client.get("/echo", headers=to(one, **basic)).json()["headers"]["authorization"] == "Basic dXNlcjo="


def test_who_may(api: httpx.Client, anyone: httpx.Client, one: dict[str, Any]) -> None:
    token = {"X-Access-Token": one["envdAccessToken"]}
    assert anyone.get("/echo", headers=to(one, **token)).status_code == 201
    other = create(api)
    for headers in (
        to(one),
        to(other, **token),
        to(one, **{"X-Access-Token": "wrong"}),
        to({"sandboxID": "0" * 12}, **token),
        to(one, **{"X-API-Key": "wrong-key-0123456789"}),
    ):
        answer = anyone.get("/echo", headers=headers)
        assert answer.status_code == 401 and answer.json()["kind"] == "unauthorized", headers
    assert anyone.get("/echo", headers=to(one, **{"X-API-Key": READ_KEY})).status_code == 403
    assert anyone.get("/echo", headers=to(one, **{"X-API-Key": READ_KEY}, **token)).status_code == 201
    assert anyone.get("/echo", headers=to({"sandboxID": "0" * 12}, **{"X-API-Key": ADMIN_KEY})).status_code == 404
    assert anyone.get("/sandboxes", headers=token).status_code == 401, "a token opens no control plane"


@pytest.mark.parametrize("port", ["0", "65536", "999999", "-1", "x", ""])
def test_impossible_ports(api: httpx.Client, one: dict[str, Any], port: str) -> None:
    answer = api.get("/echo", headers=to(one, port))
    assert answer.status_code == 400 and "1 to 65535" in answer.json()["message"]


def test_a_port_where_nothing_listens(api: httpx.Client, one: dict[str, Any]) -> None:
    answer = api.get("/", headers=to(one, 3000))
    assert answer.status_code == 502
    assert "nothing listens on port 3000" in answer.json()["message"] and answer.json()["kind"] == "backend_failed"


def test_a_large_body_passes(served: Served, api: httpx.Client, one: dict[str, Any]) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(80):
            yield b"x" * 100_000

    told = api.post("/echo", content=chunks(), headers=to(one)).json()
    assert told["length"] == 8_000_000 and told["headers"]["transfer-encoding"] == "chunked"


def test_an_answer_is_streamed_and_ends_with_its_reader(served: Served, api: httpx.Client, one: dict[str, Any]) -> None:
    with served.client() as client, client.stream("GET", "/stream", headers=to(one)) as answer:
        lines = answer.iter_lines()
        assert [next(lines), next(lines)] == ["tick 0", "tick 1"]
    machine = served.machine(one["sandboxID"])
    deadline = time.monotonic() + 5
    while machine.connections and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not machine.connections, "the connection inside was closed"


def test_connections_end_with_the_machine(served: Served, api: httpx.Client, one: dict[str, Any]) -> None:
    api.post("/sandboxes/one/snapshots", json={"name": "s1"})
    with api.stream("GET", "/stream", headers=to(one)) as answer:
        lines = answer.iter_lines()
        next(lines)
        with served.client() as other:
            assert other.post("/sandboxes/one/rollback", json={"snapshotID": "s1"}).status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    assert api.get("/echo", headers=to(one)).status_code == 201, "the new machine answers"


def test_a_paused_sandbox(api: httpx.Client) -> None:
    stays, wakes = create(api), create(api, autoPause=True, autoResume={"enabled": True})
    for sandbox in (stays, wakes):
        api.post(f"/sandboxes/{sandbox['sandboxID']}/pause")
    answer = api.get("/echo", headers=to(stays))
    assert answer.status_code == 409 and "paused" in answer.json()["message"]
    assert api.get("/echo", headers=to(wakes)).status_code == 201
    assert api.get(f"/sandboxes/{wakes['sandboxID']}").json()["state"] == "running"


def test_hop_by_hop_headers_of_the_callers_choice(api: httpx.Client, one: dict[str, Any]) -> None:
    sent = {"Connection": "keep-alive, X-Private", "X-Private": "1", "TE": "trailers", "Proxy-Authorization": "x"}
    headers = api.get("/echo", headers=to(one, **sent)).json()["headers"]
    assert not {"x-private", "te", "proxy-authorization"} & set(headers)
