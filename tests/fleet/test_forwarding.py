"""Requests at one gateway for objects on another host."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from sandbox_gateway.api.fleet.route_targets import ROUTES, AllHolders, ByBody, ByObject
from sandbox_gateway.fleet import peers
from tests.api.test_websocket import open_websocket, recording_service
from tests.fleet.world import FleetHost, Held, Objects, World, connect_to_peer_listener
from tests.support.certificates import Authority
from tests.support.guest_services import (
    AGENT_PORT,
    PORT,
    make_port_headers,
    make_port_headers_with_host,
    make_port_host,
)
from tests.support.memory_gateway import ADMIN_KEY, EXEC_KEY, READ_KEY
from tests.support.waiting import wait_until

Pair = tuple[FleetHost, FleetHost]

_REFUSED = {
    ("POST", "/sandboxes/{ref}/resume"),
    ("POST", "/sandboxes/{ref}/move"),
    ("POST", "/sandboxes/{ref}/promote"),
    ("POST", "/sandboxes/{ref}/volumes"),
    ("POST", "/v2/templates/{ref}/builds/{build}"),
}
"""Routes that the object's own gateway refuses for these objects."""


@pytest.mark.parametrize(
    "route", [route for route, kind in sorted(ROUTES.items()) if isinstance(kind, ByObject | ByBody | AllHolders)]
)
def test_each_route_of_an_object_gives_the_same_through_another_gateway(route: tuple[str, str], pair: Pair) -> None:
    one, two = pair
    route_class = ROUTES[route]
    assert isinstance(route_class, ByObject | ByBody | AllHolders)
    method, path = route
    with_template = route_class.kind == "template"
    direct, remote = Objects(two, with_template=with_template), Objects(two, with_template=with_template)
    answers = []
    for gateway, objects in ((two, direct), (one, remote)):
        if method == "DELETE" and "sandboxes" not in path:
            two.client().delete(f"/sandboxes/{objects.names['sandbox']}").raise_for_status()
        if route == ("DELETE", "/templates/tags"):
            two.post("/templates/tags", {"target": objects.names["template"], "tags": ["tag"]})
        with gateway.client() as client:
            target, body = objects.fill(route_class.kind, path), objects.make_body(route)
            json_body = body if method != "GET" else None
            query = {"withSnapshots": True} if route == ("DELETE", "/volumes/{ref}") else {}
            response = client.request(method, target, json=json_body, params=query)
        assert response.headers["x-sandbox-host"] == "h2"
        is_json = response.headers.get("content-type", "").startswith("application/json")
        data = response.json() if is_json and response.content else None
        if path.endswith("/push") and isinstance(data, dict):
            # No registry answers. The push must not keep its slot until it has given up.
            with gateway.client() as client:
                client.delete(f"/transfers/{data['transferID']}").raise_for_status()
        answers.append((response.status_code, sorted(data) if isinstance(data, dict) else type(data)))
    assert answers[0] == answers[1]
    if route not in _REFUSED:
        assert answers[0][0] < 300, response.text


def test_results_name_their_host(pair: Pair) -> None:
    one, two = pair
    objects = Objects(two, with_template=True)
    for kind, name in objects.names.items():
        path = "sandboxes" if kind == "sandbox" else f"{kind}s"
        assert one.get(f"/{path}/{name}")["sandboxHost"] == "h2"
    assert one.get(f"/sandboxes/{objects.sandbox['sandboxID']}")["name"] == objects.names["sandbox"], "an id, too"


def test_what_exists_nowhere_is_not_found(pair: Pair) -> None:
    one, _ = pair
    with one.client() as client:
        for path in (
            "/sandboxes/x",
            "/snapshots/x",
            "/templates/x",
            "/volumes/x",
            "/v1/sandboxes/x",
            "/sandboxes/a%2fb",
        ):
            assert client.get(path).status_code == 404, path


@pytest.mark.parametrize(("key", "may_run"), [(ADMIN_KEY, True), (EXEC_KEY, True), (READ_KEY, False)])
def test_the_other_host_gets_the_scope_of_the_key(key: str, may_run: bool, pair: Pair) -> None:
    one, two = pair
    objects = Objects(two)
    with one.client(key) as client:
        shown = client.get(f"/sandboxes/{objects.names['sandbox']}").json()
        assert ("envdAccessToken" in shown) == may_run
        status = client.post(f"/sandboxes/{objects.names['sandbox']}/exec", json={"args": ["exit", "0"]}).status_code
        assert status == (200 if may_run else 403)
        deletion = client.delete(f"/sandboxes/{objects.names['sandbox']}").status_code
        assert deletion == (204 if key == ADMIN_KEY else 403)
    with one.client("") as client:
        assert client.get(f"/sandboxes/{objects.names['sandbox']}").status_code == 401


def test_a_client_cannot_claim_an_identity(pair: Pair) -> None:
    one, two = pair
    objects = Objects(two)
    headers = {"X-Sandbox-Gateway-Caller": "ADMIN root"}
    for host in pair:
        with host.client("") as client:
            assert client.get(f"/sandboxes/{objects.names['sandbox']}", headers=headers).status_code == 401
        with host.client(READ_KEY) as client:
            assert client.delete(f"/sandboxes/{objects.names['sandbox']}", headers=headers).status_code == 403
    assert one.get(f"/sandboxes/{objects.names['sandbox']}")


def test_only_gateways_of_the_fleet_reach_the_listener_for_gateways(pair: Pair, tmp_path_factory: Any) -> None:
    _, two = pair
    request = b"GET /sandboxes HTTP/1.1\r\nHost: h\r\nX-Sandbox-Gateway-Caller: ADMIN root\r\nConnection: close\r\n\r\n"
    own = two._world.get_certificate("h1")
    assert connect_to_peer_listener(two, own.create_client_context(), request).startswith(b"HTTP/1.1 200")
    without_certificate = ssl.create_default_context(cafile=own.ca)
    stranger = Authority(tmp_path_factory.mktemp("stranger")).issue("h1")
    strange = ssl.create_default_context(cafile=own.ca)
    strange.load_cert_chain(stranger.cert, stranger.key)
    for context in (without_certificate, strange):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            assert connect_to_peer_listener(two, context, request) == b"", "closed without an answer"
            raise ConnectionError


def test_a_forwarded_request_is_never_forwarded_again(pair: Pair) -> None:
    one, two = pair
    objects = Objects(one)
    certificate = two._world.get_certificate("h1")
    request = f"GET /sandboxes/{objects.names['sandbox']} HTTP/1.1\r\nHost: h\r\n"
    request += "X-Sandbox-Gateway-Caller: ADMIN root\r\nConnection: close\r\n\r\n"
    answer = connect_to_peer_listener(two, certificate.create_client_context(), request.encode())
    assert answer.startswith(b"HTTP/1.1 404"), "h2 could forward it to h1, but must not"
    assert two.get(f"/sandboxes/{objects.names['sandbox']}")["sandboxHost"] == "h1"


def test_both_gateways_log_the_same_request_id(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    one, two = pair
    path = f"/sandboxes/{Objects(two).names['sandbox']}/timeout"

    def list_ids() -> list[str]:
        # A gateway may log an earlier request only now, after the response.
        fields = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
        return [each["request"] for each in fields if each["path"] == path]

    with caplog.at_level("INFO", "sandbox_gateway.api"), one.client() as client:
        client.post(path, json={"timeout": 60}, headers={"X-Request-Id": "trace-7"}).raise_for_status()
        client.post(path, json={"timeout": 60}, headers={"X-Request-Id": "not valid\x7f"[:9]}).raise_for_status()
        wait_until(lambda: len(list_ids()) == 4)
    ids = list_ids()
    assert ids[:2] == ["trace-7", "trace-7"]
    assert ids[2] == ids[3] and re.fullmatch("[0-9a-f]{16}", ids[2])


# -- the data plane ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_headers", [make_port_headers, make_port_headers_with_host])
def test_a_request_to_a_port_reaches_the_other_host_unchanged(pair: Pair, make_headers: Any) -> None:
    one, two = pair
    sandbox = Objects(two).sandbox
    headers = make_headers(sandbox, **{"X-Own": "1", "Authorization": f"Bearer {EXEC_KEY}"})
    with one.client(EXEC_KEY) as client:
        response = client.post("/echo/a%2Fb//c?x=1&y=%20z", content=b"hello", headers=headers)
    assert response.status_code == 201 and response.headers["x-inside"] == "yes"
    echoed = response.json()
    assert echoed["target"] == "/echo/a%2Fb//c?x=1&y=%20z" and echoed["body"] == "hello"
    assert echoed["headers"]["x-own"] == "1"
    assert echoed["headers"]["host"] == (
        make_port_host(sandbox) if make_headers is make_port_headers_with_host else f"localhost:{AGENT_PORT}"
    )
    assert "authorization" not in echoed["headers"] and EXEC_KEY not in response.text
    assert "x-sandbox-gateway-caller" not in echoed["headers"]


def test_tokens_and_signed_urls_hold_on_every_host(pair: Pair) -> None:
    one, two = pair
    sandbox = Objects(two).sandbox
    token = sandbox["envdAccessToken"]
    with one.client("") as client:
        headers = make_port_headers(sandbox, **{"X-Access-Token": token})
        assert client.get("/echo", headers=headers).status_code == 201
        assert client.get("/echo", headers=headers | {"X-Access-Token": "0" * 64}).status_code == 401
        digest = hashlib.sha256(f"/tmp/a:write:user:{token}".encode()).digest()
        signature = "v1_" + base64.b64encode(digest).rstrip(b"=").decode()
        query = {"path": "/tmp/a", "username": "user", "signature": signature}
        assert client.post("/files", params=query, content=b"content").status_code == 200
        assert client.post("/files", params={**query, "path": "/tmp/b"}, content=b"content").status_code == 401
    assert two.gateway.machine(sandbox["sandboxID"]).state["/tmp/a"] == "content"


def test_a_stream_arrives_piece_by_piece_and_ends_with_its_client(pair: Pair) -> None:
    one, two = pair
    sandbox = Objects(two).sandbox
    machine = two.gateway.machine(sandbox["sandboxID"])
    before = machine.connection_count
    with (
        one.client(EXEC_KEY) as client,
        client.stream("GET", "/stream", headers=make_port_headers(sandbox)) as response,
    ):
        lines = response.iter_lines()
        assert [next(lines) for _ in range(3)] == ["tick 0", "tick 1", "tick 2"]
    wait_until(lambda: machine.connection_count <= before)


class _Upload:
    """A body that waits in the middle."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(8):
            yield b"x" * (1 << 20)
        assert self.may_go_on.wait(60)
        yield b"end"


def test_an_upload_is_not_buffered(pair: Pair) -> None:
    one, two = pair
    sandbox = Objects(two).sandbox
    address = two.gateway.machine(sandbox["sandboxID"]).address
    received = 0
    upload = _Upload()
    with socket.create_server((address, PORT)) as server:

        def serve() -> None:
            nonlocal received
            connection, _ = server.accept()
            with connection:
                data = b""
                while not data.endswith(b"0\r\n\r\n"):
                    data = data[-8:] + (piece := connection.recv(65536))
                    received += len(piece)
                    if received > 8 << 20:
                        upload.may_go_on.set()
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        thread = threading.Thread(target=serve)
        thread.start()
        with one.client(EXEC_KEY) as client:
            response = client.post("/upload", content=upload, headers=make_port_headers(sandbox, PORT))
        thread.join()
    assert (response.status_code, response.text) == (200, "ok")


def test_a_websocket_is_forwarded_with_its_messages_and_close_code(pair: Pair) -> None:
    one, two = pair
    sandbox = Objects(two).sandbox
    with recording_service(two.gateway, sandbox) as service:
        with open_websocket(one.gateway, sandbox, subprotocols=None) as connection:
            connection.send("hello")
            assert connection.recv(timeout=60) == "hello"
            connection.send(b"\x00" * 300_000)
            assert connection.recv(timeout=60) == b"\x00" * 300_000
            connection.close(4001, "done")
        wait_until(lambda: service.close_codes == [4001])
        names = {name.lower() for name, _ in service.headers}
        assert not names & {"x-api-key", "x-sandbox-gateway-caller"}


# -- hosts that do not answer ------------------------------------------------------------------------------------------


def test_a_host_that_is_down_is_named(world: World) -> None:
    one, two = world.start("h1", "h2")
    two.gateway.build_template()
    sandbox = two.post("/sandboxes", {"templateID": "base", "name": "web"})
    assert one.get("/sandboxes/web")["sandboxHost"] == "h2"
    two.end()
    wait_until(lambda: one.list_running_members() == ["h1"])
    with one.client() as client:
        refused = client.get("/sandboxes/web")
        assert (refused.status_code, refused.json()["kind"]) == (503, "unavailable")
        assert "on host 'h2', whose gateway does not run" in refused.json()["message"]
        assert client.get("/echo", headers=make_port_headers(sandbox)).status_code == 503


def test_a_host_that_hangs_does_not_keep_its_clients_waiting(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_PROBE_SECONDS", 3.0)
    one, two = pair
    objects = Objects(two)
    failures: dict[str, str] = {}

    is_streaming = threading.Event()

    def stream() -> None:
        with (
            one.client(EXEC_KEY) as client,
            client.stream("GET", "/stream", headers=make_port_headers(objects.sandbox)) as response,
        ):
            try:
                for line in response.iter_lines():
                    if line == "tick 2":
                        is_streaming.set()
            except httpx.TransportError as error:
                failures["stream"] = type(error).__name__

    with (
        recording_service(two.gateway, objects.sandbox),
        ThreadPoolExecutor(1) as threads,
        open_websocket(one.gateway, objects.sandbox, subprotocols=None) as connection,
    ):
        streaming = threads.submit(stream)
        assert is_streaming.wait(60)
        with two.hanging():
            with one.client() as client:
                refused = client.post(f"/sandboxes/{objects.names['sandbox']}/exec", json={"args": ["exit", "0"]})
            assert (refused.status_code, refused.json()["kind"]) == (503, "unavailable")
            assert "h2" in refused.json()["message"]
            streaming.result(60)
            assert failures == {"stream": "RemoteProtocolError"}, "the client notices that the response is not complete"
            with pytest.raises(ConnectionClosed):
                connection.recv(timeout=60)
            assert connection.close_code == 1012 and "no longer answers" in (connection.close_reason or "")
    assert one.get(f"/sandboxes/{objects.names['sandbox']}")["sandboxHost"] == "h2"


def test_a_stream_outlasts_the_membership_of_its_host(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_PROBE_SECONDS", 3.0)
    one, two = pair
    view = one.gateway.engine._context.name_claims._view  # type: ignore[attr-defined]
    with (
        one.client(EXEC_KEY) as client,
        client.stream("GET", "/stream", headers=make_port_headers(Objects(two).sandbox)) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        member = view.members.pop("h2")
        ends_at = time.monotonic() + 3 * peers._PROBE_SECONDS
        while time.monotonic() < ends_at:
            assert next(lines).startswith("tick")
        view.members.setdefault("h2", member)


@pytest.mark.usefixtures("real_times")
def test_forwarding_works_while_etcd_is_away(world: World) -> None:
    one, two = world.start("h1", "h2")
    two.gateway.build_template()
    sandbox = two.post("/sandboxes", {"templateID": "base", "name": "web"})
    assert one.get("/sandboxes/web")["sandboxHost"] == "h2"
    world.etcd.kill()
    time.sleep(8)
    assert one.get("/sandboxes/web")["sandboxHost"] == "h2"
    with one.client() as client:
        assert client.post("/sandboxes/web/exec", json={"args": ["exit", "3"]}).json()["exitCode"] == 3
        assert client.get("/echo", headers=make_port_headers(sandbox)).status_code == 201
        assert client.delete("/sandboxes/web").status_code == 204


def test_a_build_is_found_through_every_gateway(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = world.start("h1", "h2")
    builds = Held(two, "build_base", monkeypatch)
    build = two.post("/templates", {"name": "slow"}, 202)
    with one.client() as client:
        assert client.get(f"/templates/slow/builds/{build['buildID']}/status").json()["status"] == "building"
        builds.release()
        with client.stream("GET", f"/templates/slow/builds/{build['buildID']}/logs?follow=true") as response:
            assert "making a file system" in "".join(response.iter_text())
        announced = two.post("/v3/templates", {"name": "announced"}, 202)
        assert httpx.URL(_request_upload(one, announced["templateID"])).params["host"] == "h2"
        upload = httpx.URL(_request_upload(one, announced["templateID"]))
        response = client.put(upload.raw_path.decode(), content=b"")
        assert response.headers["x-sandbox-host"] == "h2"


def _request_upload(host: FleetHost, template: str) -> str:
    with host.client() as client:
        response = client.get(f"/templates/{template}/files/{'0' * 64}")
    assert response.status_code == 201, response.text
    url: str = response.json()["url"]
    return url
