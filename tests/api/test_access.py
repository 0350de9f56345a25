"""Access to ports inside sandboxes with keys, tokens and signed URLs, and without a secret."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import e2b
import httpx
import pytest
from e2b.sandbox.signature import get_signature

from sandbox_gateway.api.access.ports import derive_port_token
from sandbox_gateway.api.access.signed_urls import SignedUrl, SignerFinder, parse_signed_url, verify_signed_query
from sandbox_gateway.engine.secret import Secret
from sandbox_gateway.errors import Unauthorized
from tests.support import memory_host
from tests.support.guest_services import (
    AGENT_PORT,
    PORT,
    make_port_headers,
    make_port_headers_with_host,
    make_port_host,
    raw_service,
    wait_until,
)
from tests.support.memory_gateway import ADMIN_KEY, READ_KEY, MemoryGateway, create_sandbox

TOKEN = "5" * 64
NOW = 1_800_000_000


def test_each_sandbox_has_two_unique_tokens(
    memory_gateway: MemoryGateway, api: httpx.Client, sandbox: dict[str, Any]
) -> None:
    other_sandbox = create_sandbox(api)
    tokens = {each[name] for each in (sandbox, other_sandbox) for name in ("envdAccessToken", "trafficAccessToken")}
    assert len(tokens) == 4
    assert api.get("/sandboxes/one").json()["trafficAccessToken"] == sandbox["trafficAccessToken"]
    with memory_gateway.client(READ_KEY) as reader:
        assert not tokens & set(reader.get("/sandboxes/one").text.split('"'))
    assert "trafficAccessToken" not in api.get("/sandboxes").text


@pytest.mark.parametrize("header", ["E2B-Traffic-Access-Token", "Cube-Traffic-Access-Token"])
def test_the_traffic_token_is_valid_for_every_port_except_the_agents(
    memory_gateway: MemoryGateway, api: httpx.Client, keyless_client: httpx.Client, sandbox: dict[str, Any], header: str
) -> None:
    token_header = {header: sandbox["trafficAccessToken"]}
    with raw_service(memory_gateway, sandbox) as service:
        assert keyless_client.get("/", headers=make_port_headers(sandbox, PORT, **token_header)).text == "ok"
        assert (
            sandbox["trafficAccessToken"] not in str(service.heads)
            and header.lower() not in service.parse_request_headers()
        )
        for wrong_token in (sandbox["envdAccessToken"], create_sandbox(api)["trafficAccessToken"], "", "é"):
            headers: Any = {**make_port_headers(sandbox, PORT), header: wrong_token.encode("latin-1")}
            response = keyless_client.get("/", headers=headers)
            assert response.status_code == 403 and (not wrong_token or wrong_token not in response.text)
        assert len(service.heads) == 1
    assert (
        keyless_client.get("/echo", headers=make_port_headers(sandbox, AGENT_PORT, **token_header)).status_code == 401
    )
    assert keyless_client.get("/sandboxes", headers=token_header).status_code == 401


def test_the_code_interpreter_token_is_valid_for_no_other_port(
    memory_gateway: MemoryGateway, keyless_client: httpx.Client, sandbox: dict[str, Any]
) -> None:
    with raw_service(memory_gateway, sandbox, port=49999) as service:
        for credentials in (
            {"X-API-Key": ADMIN_KEY},
            {"E2B-Traffic-Access-Token": sandbox["trafficAccessToken"]},
            {"X-Access-Token": sandbox["envdAccessToken"], "E2B-Traffic-Access-Token": "wrong"},
        ):
            assert (
                keyless_client.get("/contexts", headers=make_port_headers(sandbox, 49999, **credentials)).status_code
                == 200
            )
            headers = service.parse_request_headers()
            forwarded_token = headers["x-access-token"]
            assert forwarded_token == derive_port_token(sandbox["envdAccessToken"], 49999) != sandbox["envdAccessToken"]
            assert (
                keyless_client.get(
                    "/files", headers=make_port_headers(sandbox, AGENT_PORT, **{"X-Access-Token": forwarded_token})
                ).status_code
                == 401
            )
            assert service.heads[-1].lower().count(b"x-access-token") == 1
            assert not {"x-api-key", "e2b-traffic-access-token"} & set(headers)


def test_other_ports_receive_no_token(
    memory_gateway: MemoryGateway, keyless_client: httpx.Client, sandbox: dict[str, Any]
) -> None:
    with raw_service(memory_gateway, sandbox) as service:
        for credentials in ({"X-API-Key": ADMIN_KEY}, {"X-Access-Token": sandbox["envdAccessToken"]}):
            assert keyless_client.get("/", headers=make_port_headers(sandbox, PORT, **credentials)).status_code == 200
        for secret in (ADMIN_KEY, sandbox["envdAccessToken"], sandbox["trafficAccessToken"]):
            assert secret not in str(service.heads)


def test_ports_are_public_only_on_request(
    memory_gateway: MemoryGateway, api: httpx.Client, keyless_client: httpx.Client
) -> None:
    default_sandbox, private_sandbox = create_sandbox(api), create_sandbox(api, network={"allowPublicTraffic": False})
    public_sandbox = create_sandbox(api, network={"allowPublicTraffic": True})
    assert (
        public_sandbox["network"]["allowPublicTraffic"] is True
        and default_sandbox["network"]["allowPublicTraffic"] is False
    )
    for sandbox in (default_sandbox, private_sandbox):
        assert keyless_client.get("/", headers=make_port_headers_with_host(sandbox, PORT)).status_code == 403
    with raw_service(memory_gateway, public_sandbox):
        assert keyless_client.get("/", headers=make_port_headers_with_host(public_sandbox, PORT)).text == "ok"
        ref = public_sandbox["sandboxID"]
        assert api.put(f"/sandboxes/{ref}/network", json={"denyOut": ["10.0.0.0/8"]}).status_code == 204
        assert keyless_client.get("/", headers=make_port_headers_with_host(public_sandbox, PORT)).text == "ok", (
            "a policy for outgoing traffic does not change it"
        )
        for port, status in ((AGENT_PORT, 401), (49999, 403)):
            assert (
                keyless_client.get("/echo", headers=make_port_headers_with_host(public_sandbox, port)).status_code
                == status
            )
        fork = api.post(f"/sandboxes/{ref}/clone", json={"count": 1}).json()["sandboxes"][0]
        assert keyless_client.get("/", headers=make_port_headers_with_host(fork, PORT)).status_code == 403, (
            "forks do not inherit public ports"
        )
        assert api.put(f"/sandboxes/{ref}/network", json={"allowPublicTraffic": False}).status_code == 204
        assert keyless_client.get("/", headers=make_port_headers_with_host(public_sandbox, PORT)).status_code == 403
    for value in ("yes", 1, "true"):
        assert api.post("/sandboxes", json={"templateID": "base", "network": {"allowPublicTraffic": value}}).is_error


def test_an_administrator_can_make_ports_public_by_default(tmp_path: Path) -> None:
    gateway = MemoryGateway(tmp_path, network={"public_ports": True})
    try:
        gateway.build_template()
        with gateway.client() as api, gateway.client("") as keyless_client:
            default_sandbox = create_sandbox(api)
            private_sandbox = create_sandbox(api, network={"allowPublicTraffic": False})
            ref = default_sandbox["sandboxID"]
            assert default_sandbox["network"]["allowPublicTraffic"] is True
            assert api.put(f"/sandboxes/{ref}/network", json={"denyOut": ["10.0.0.0/8"]}).status_code == 204
            forkd_sandbox = api.post("/v1/sandboxes", json={"snapshot_tag": "base", "n": 1}).json()[0]
            assert api.get(f"/sandboxes/{forkd_sandbox['id']}").json()["network"]["allowPublicTraffic"] is True
            with raw_service(gateway, default_sandbox):
                assert keyless_client.get("/", headers=make_port_headers_with_host(default_sandbox, PORT)).text == "ok"
            for sandbox, port, status in (
                (private_sandbox, PORT, 403),
                (default_sandbox, AGENT_PORT, 401),
                (default_sandbox, 49999, 403),
            ):
                headers = make_port_headers_with_host(sandbox, port)
                assert keyless_client.get("/echo", headers=headers).status_code == status
            assert keyless_client.get("/sandboxes").status_code == 401
    finally:
        gateway.end()


def test_services_receive_the_masked_host(
    memory_gateway: MemoryGateway, api: httpx.Client, keyless_client: httpx.Client
) -> None:
    network = {"allowPublicTraffic": True, "maskRequestHost": "${PORT}-shop.example.com"}
    sandbox = create_sandbox(api, network=network)
    assert sandbox["network"]["maskRequestHost"] == network["maskRequestHost"]
    route = f"/sandboxes/{sandbox['sandboxID']}/network"
    with raw_service(memory_gateway, sandbox) as service:
        expected_hosts = [f"{PORT}-shop.example.com"] * 2
        for headers in (make_port_headers_with_host(sandbox, PORT), make_port_headers(sandbox, PORT)):
            assert keyless_client.get("/", headers=headers).text == "ok"
        assert api.put(route, json={"denyOut": ["10.0.0.0/8"]}).status_code == 204, "the mask is kept"
        assert keyless_client.get("/", headers=headers).text == "ok"
        expected_hosts.append(f"{PORT}-shop.example.com")
        for mask, expected_host in (("shop:${PORT}", f"shop:{PORT}"), ("", make_port_host(sandbox, PORT))):
            assert api.put(route, json={"maskRequestHost": mask}).status_code == 204
            assert keyless_client.get("/", headers=make_port_headers_with_host(sandbox, PORT)).text == "ok"
            expected_hosts.append(expected_host)
        assert [service.parse_request_headers(number)["host"] for number in range(5)] == expected_hosts
        assert all(head.lower().count(b"\nhost:") == 1 for head in service.heads)
    assert "maskRequestHost" not in api.get(f"/sandboxes/{sandbox['sandboxID']}").json()["network"]
    agent_sandbox = create_sandbox(api, network=network)
    echo = api.get("/echo", headers=make_port_headers_with_host(agent_sandbox)).json()
    assert echo["headers"]["host"] == make_port_host(agent_sandbox), "the agent's own ports keep the host"


@pytest.mark.parametrize(
    "mask", ["a b", "a\r\nX-Api-Key: b", "a/b", "${HOST}.example.com", "a:b", "ä.example", "a" * 256]
)
def test_an_invalid_host_mask_is_refused(api: httpx.Client, mask: str) -> None:
    response = api.post("/sandboxes", json={"templateID": "base", "network": {"maskRequestHost": mask}})
    assert response.status_code == 400 and "maskRequestHost" in response.json()["message"]


def test_secrets_are_not_logged(
    memory_gateway: MemoryGateway,
    keyless_client: httpx.Client,
    sandbox: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "sandbox_gateway")
    envd_token, traffic_token = sandbox["envdAccessToken"], sandbox["trafficAccessToken"]
    signature = get_signature("/x", "read", None, envd_token)["signature"]
    for headers, target in (
        ({"X-API-Key": ADMIN_KEY, "X-Access-Token": envd_token, "E2B-Traffic-Access-Token": traffic_token}, "/"),
        ({"Authorization": f"Bearer {ADMIN_KEY}"}, "/"),
        ({}, f"/files?path=/x&signature={quote(signature)}"),
        ({"X-Access-Token": envd_token[:-1]}, f"/files?path=/y&signature={quote(signature)}"),
    ):
        for port in (AGENT_PORT, PORT):
            text = keyless_client.get(target, headers=make_port_headers(sandbox, port, **headers)).text
            upgrade_headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
            upgrade_headers["Sec-WebSocket-Key"] = "A" * 22 + "=="
            text += keyless_client.get(
                target, headers=make_port_headers(sandbox, port, **headers, **upgrade_headers)
            ).text
            for secret in (ADMIN_KEY, envd_token, envd_token[:-1], traffic_token, signature, quote(signature)):
                assert secret not in text
    # Refusals are logged after the response.
    wait_until(lambda: caplog.text.count("request") >= 16)
    assert "ERROR" not in caplog.text
    for secret in (ADMIN_KEY, envd_token[:-1], traffic_token, signature, quote(signature)):
        assert secret not in caplog.text + str([record.__dict__ for record in caplog.records])


# --- removed, paused, closed -----------------------------------------------------------------------------------------


def test_a_removed_sandbox_is_reported_to_holders_of_its_token(
    api: httpx.Client, keyless_client: httpx.Client, sandbox: dict[str, Any]
) -> None:
    api.delete("/sandboxes/one")
    for port, credentials in (
        (AGENT_PORT, {"X-API-Key": ADMIN_KEY}),
        (AGENT_PORT, {"X-Access-Token": sandbox["envdAccessToken"]}),
        (PORT, {"E2B-Traffic-Access-Token": sandbox["trafficAccessToken"]}),
    ):
        response = keyless_client.get("/echo", headers=make_port_headers(sandbox, port, **credentials))
        assert response.status_code == response.json()["code"] == 502 and response.json()["kind"] == "not_found"
        assert "was not found" in response.json()["message"] and sandbox["sandboxID"] in response.json()["message"]
    refusals = [
        keyless_client.get("/echo", headers=make_port_headers({"sandboxID": ref}, **{"X-Access-Token": token})).text
        for ref, token in ((sandbox["sandboxID"], "wrong"), ("0" * 12, "wrong"), ("0" * 12, sandbox["envdAccessToken"]))
    ]
    existing_sandbox = create_sandbox(api)
    refusals.append(
        keyless_client.get("/echo", headers=make_port_headers(existing_sandbox, **{"X-Access-Token": "wrong"})).text
    )
    assert len(set(refusals)) == 1 and '"unauthorized"' in refusals[0]


def test_the_e2b_client_raises_the_expected_errors(
    memory_gateway: MemoryGateway, api: httpx.Client, keyless_client: httpx.Client
) -> None:
    options: Any = {
        "api_key": ADMIN_KEY,
        "api_url": memory_gateway.url,
        "sandbox_url": memory_gateway.url,
        "retries": 0,
    }
    e2b_sandbox = e2b.Sandbox.create(template="base", **options)
    assert e2b_sandbox.is_running()
    e2b_sandbox.pause()
    assert not e2b_sandbox.is_running()
    with pytest.raises(e2b.exceptions.SandboxNotRunningException, match="is paused: resume it first"):
        e2b_sandbox.commands.run("true")
    e2b_sandbox = e2b.Sandbox.connect(e2b_sandbox.sandbox_id, **options)
    assert e2b_sandbox.is_running()
    # The agent stops, but the machine keeps running.
    asyncio.run_coroutine_threadsafe(memory_gateway.machine(e2b_sandbox.sandbox_id).stop(), memory_gateway.loop).result(
        30
    )
    with pytest.raises(e2b.exceptions.SandboxUnreachableException, match="port is not open"):
        e2b_sandbox.files.read("/etc/hostname")
    e2b_sandbox.kill()
    assert not e2b_sandbox.is_running()
    with pytest.raises(e2b.exceptions.SandboxNotRunningException, match="was not found"):
        e2b_sandbox.commands.run("true")
    with pytest.raises(e2b.exceptions.SandboxNotRunningException, match="was not found"):
        e2b_sandbox.files.read("/etc/hostname")


@pytest.mark.parametrize("ending", ["kill", "rollback"])
def test_the_e2b_client_reports_a_machine_that_stops_during_a_stream(
    memory_gateway: MemoryGateway, api: httpx.Client, ending: str
) -> None:
    options: Any = {
        "api_key": ADMIN_KEY,
        "api_url": memory_gateway.url,
        "sandbox_url": memory_gateway.url,
        "retries": 0,
    }
    e2b_sandbox = e2b.Sandbox.create(template="base", **options)
    sandbox = api.get(f"/sandboxes/{e2b_sandbox.sandbox_id}").json()
    api.post(f"/sandboxes/{e2b_sandbox.sandbox_id}/snapshots", json={"name": "s1"})
    start_frame = memory_host._encode_frame(0, {"event": {"start": {"pid": 7}}})
    response_head = b"HTTP/1.1 200 OK\r\nContent-Type: application/connect+json\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def hold_connection(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read(1)

    with raw_service(
        memory_gateway,
        sandbox,
        response_head + b"%x\r\n%s\r\n" % (len(start_frame), start_frame),
        port=AGENT_PORT,
        next_handler=hold_connection,
    ):
        command = e2b_sandbox.commands.run("sleep 100", background=True)
        assert command.pid == 7
        if ending == "kill":
            assert e2b_sandbox.kill()
        else:
            assert (
                api.post(f"/sandboxes/{e2b_sandbox.sandbox_id}/rollback", json={"snapshotID": "s1"}).status_code == 200
            )
        expected_errors = {
            "kill": e2b.exceptions.SandboxNotRunningException,
            "rollback": e2b.exceptions.SandboxUnreachableException,
        }
        with pytest.raises(expected_errors[ending]):
            command.wait()
    assert e2b_sandbox.is_running() == (ending == "rollback"), "the same client object still works"


# --- signed URLs -----------------------------------------------------------------------------------------------------


def sign_query(
    operation: Any = "read", path: str = "/etc/hostname", user: str | None = None, **other_fields: Any
) -> dict[str, str]:
    signature = get_signature(
        path, operation, user, other_fields.pop("token", TOKEN), other_fields.pop("seconds", None)
    )
    fields = {"path": path, "signature": signature["signature"]}
    if user:
        fields["username"] = user
    if signature["expiration"] is not None:
        fields["signature_expiration"] = str(signature["expiration"])
    return fields | other_fields


def verify_query(fields: dict[str, str] | str, method: str = "GET", now: float = NOW) -> bytes | None:
    text = fields if isinstance(fields, str) else urlencode(fields, quote_via=quote)
    return verify_signed_query(method, text.encode(), TOKEN, now)


@pytest.mark.parametrize("user", [None, "root", "ü user"])
@pytest.mark.parametrize("path", ["/etc/hostname", "a b/ü+&=?#%2F;x", "/with:colon:write:root", "~"])
def test_a_signed_path_is_forwarded_unchanged(path: str, user: str | None) -> None:
    for operation, method in (("read", "GET"), ("write", "POST")):
        forwarded_query = verify_query(sign_query(operation, path, user), method)
        assert forwarded_query is not None
        assert dict(parse_qsl(forwarded_query.decode())) == (
            {"path": path, "username": user} if user else {"path": path}
        )
        wrong_method = "POST" if method == "GET" else "GET"
        assert verify_query(sign_query(operation, path, user), wrong_method) is None
    assert verify_query(sign_query("read", path, user, extra="1")) == verify_query(sign_query("read", path, user)), (
        "unsigned fields are dropped"
    )


def test_invalid_signatures_are_refused() -> None:
    valid_fields = sign_query("read", "/a", "bob")
    assert verify_query(valid_fields) is not None
    signature = valid_fields["signature"]
    text = urlencode(valid_fields, quote_via=quote)
    for invalid_query in (
        valid_fields | {"path": "/b"},
        valid_fields | {"username": "root"},
        {name: value for name, value in valid_fields.items() if name != "username"},
        {name: value for name, value in valid_fields.items() if name != "path"},
        {name: value for name, value in valid_fields.items() if name != "signature"},
        valid_fields | {"signature": ""},
        valid_fields | {"signature": signature[:-1]},
        valid_fields | {"signature": signature.removeprefix("v1_")},
        valid_fields | {"signature": "é"},
        valid_fields | {"signature_expiration": str(NOW + 60)},
        sign_query("read", "/a", "bob", token="6" * 64),
        # A second value, which another parser might prefer.
        text + "&path=/b",
        "path=/b&" + text,
        text + "&username=root",
        text + "&signature=v1_x",
        text + "&p%61th=/b",
        text.replace("%2Fa", "%2Fa%26path%3D%2Fb"),
        text.replace("%2Fa", "%ff"),
        "",
    ):
        assert verify_query(invalid_query) is None, invalid_query
    for method in ("PUT", "DELETE", "HEAD", "OPTIONS"):
        assert verify_query(valid_fields, method) is None
    # Moving parts of the path into the user's name does not change the signed text.
    signed_fields = sign_query("read", "/a:write:root", None)
    assert (
        verify_query({"path": "/a", "username": "root:read:", "signature": signed_fields["signature"]}, "POST") is None
    )
    assert verify_query(signed_fields) == b"path=%2Fa%3Awrite%3Aroot"


def test_expired_signatures_are_refused() -> None:
    valid_fields = sign_query(seconds=60)
    expiration = int(valid_fields["signature_expiration"])
    assert verify_query(valid_fields, now=expiration) is not None
    with pytest.raises(Unauthorized, match="has expired"):
        verify_query(valid_fields, now=expiration + 1)
    extended_fields = {**valid_fields, "signature_expiration": str(expiration + 1)}
    unlimited_fields = {name: value for name, value in valid_fields.items() if name != "signature_expiration"}
    for invalid_query in (
        extended_fields,
        unlimited_fields,
        {**valid_fields, "signature_expiration": "-1"},
        {**valid_fields, "signature_expiration": f"+{expiration}"},
    ):
        assert verify_query(invalid_query, now=expiration + 1) is None
    assert verify_query({**valid_fields, "signature_expiration": "9" * 5000}) is None


def test_signed_urls_are_accepted_over_http(
    memory_gateway: MemoryGateway, api: httpx.Client, keyless_client: httpx.Client
) -> None:
    sandbox = create_sandbox(api, name="one")
    e2b_sandbox = e2b.Sandbox.connect("one", api_key=ADMIN_KEY, api_url=memory_gateway.url, domain="sandbox.local")
    urls = [httpx.URL(e2b_sandbox.download_url("/a b/ü", user="bob")), httpx.URL(e2b_sandbox.download_url("/x"))]
    upload_url = httpx.URL(e2b_sandbox.upload_url("/x", use_signature_expiration=60))
    assert all(url.host == make_port_host(sandbox) for url in (*urls, upload_url))
    host_headers = {"Host": make_port_host(sandbox)}
    with raw_service(memory_gateway, sandbox, port=AGENT_PORT) as agent:
        for url, target in zip(urls, ("/files?path=%2Fa%20b%2F%C3%BC&username=bob", "/files?path=%2Fx"), strict=True):
            for headers in (
                host_headers,
                host_headers | {"Authorization": "Basic cm9vdDo=", "X-Access-Token": "wrong"},
            ):
                assert keyless_client.get(url.raw_path.decode(), headers=headers).text == "ok"
                assert agent.parse_request_target() == target
                assert agent.parse_request_headers()["x-access-token"] == sandbox["envdAccessToken"]
                assert "authorization" not in agent.parse_request_headers(), (
                    "a signed URL is valid only for the user it names"
                )
        assert (
            keyless_client.post(upload_url.raw_path.decode(), headers=host_headers, files={"file": b"new"}).text == "ok"
        )
        assert agent.parse_request_target() == "/files?path=%2Fx" and b"new" in agent.bodies[-1]
        request_count = len(agent.heads)
        read_query, write_query = urls[1].query.decode(), upload_url.query.decode()
        for method, path in (
            ("POST", f"/files?{read_query}"),
            ("GET", f"/files?{write_query}"),
            ("GET", f"/files/?{read_query}"),
            ("GET", f"/%66iles?{read_query}"),
            ("GET", f"/health?{read_query}"),
            ("GET", f"/files?{read_query}&path=/etc/shadow"),
            ("GET", "/files?path=/x"),
        ):
            assert keyless_client.request(method, path, headers=host_headers).status_code == 401, path
        other_sandbox = create_sandbox(api)
        assert (
            keyless_client.get(f"/files?{read_query}", headers=make_port_headers_with_host(other_sandbox)).status_code
            == 401
        )
        assert (
            keyless_client.get(f"/files?{read_query}", headers=make_port_headers_with_host(sandbox, 49999)).status_code
            == 403
        )
        expired_signature = get_signature("/x", "read", None, sandbox["envdAccessToken"], -10)
        expired_query = urlencode(
            {
                "path": "/x",
                "signature": expired_signature["signature"],
                "signature_expiration": expired_signature["expiration"],
            }
        )
        response = keyless_client.get(f"/files?{expired_query}", headers=host_headers)
        assert response.status_code == 401 and "has expired" in response.json()["message"]
        assert len(agent.heads) == request_count
        assert expired_signature["expiration"] is not None and expired_signature["expiration"] < time.time()
    api.delete("/sandboxes/one")
    response = keyless_client.get(f"/files?{read_query}", headers=host_headers)
    assert response.status_code == 502 and "was not found" in response.json()["message"]


def test_signed_urls_with_the_gateways_address_are_accepted(
    memory_gateway: MemoryGateway, api: httpx.Client, keyless_client: httpx.Client
) -> None:
    """With `E2B_SANDBOX_URL`, as documented, only the signature of the URL identifies the sandbox."""
    sandboxes = [create_sandbox(api, name=name) for name in ("one", "two", "three")]
    options = {"api_key": ADMIN_KEY, "api_url": memory_gateway.url, "sandbox_url": memory_gateway.url}
    e2b_sandbox = e2b.Sandbox.connect("two", **options)
    with contextlib.ExitStack() as stack:
        first_agent, second_agent, third_agent = (
            stack.enter_context(raw_service(memory_gateway, each, port=AGENT_PORT)) for each in sandboxes
        )
        for url, target in (
            (e2b_sandbox.download_url("/a b/ü", user="bob"), "/files?path=%2Fa%20b%2F%C3%BC&username=bob"),
            (e2b_sandbox.download_url("/x", use_signature_expiration=60), "/files?path=%2Fx"),
        ):
            for headers in ({}, {"Authorization": "Basic cm9vdDo=", "X-Access-Token": "wrong", "X-API-Key": "wrong"}):
                response = keyless_client.get(url, headers=headers)
                assert response.text == "ok" and second_agent.parse_request_target() == target
                assert "authorization" not in second_agent.parse_request_headers()
                assert second_agent.parse_request_headers()["x-access-token"] == sandboxes[1]["envdAccessToken"]
                assert response.headers["content-security-policy"] == "sandbox", "a browser must not run the file"
                assert response.headers["x-content-type-options"] == "nosniff"
        upload_url = e2b_sandbox.upload_url("/x")
        assert (
            keyless_client.post(upload_url, files={"file": b"new"}).text == "ok" and b"new" in second_agent.bodies[-1]
        )
        request_count = len(second_agent.heads)
        read_url = e2b_sandbox.download_url("/x")
        for method, url in (
            ("POST", read_url),
            ("GET", upload_url),
            ("GET", read_url.replace("/files", "/files/")),
            ("GET", read_url.replace("/files", "/%66iles")),
            ("GET", f"{read_url}&path=/etc/shadow"),
            ("GET", read_url.replace("path=%2Fx", "path=%2Fy")),
            ("GET", f"{read_url}&username=bob"),
            ("HEAD", read_url),
        ):
            assert keyless_client.request(method, url).status_code == 401, (method, url)
        expired_signature = get_signature("/x", "read", None, sandboxes[1]["envdAccessToken"], -10)
        query = {
            "path": "/x",
            "signature": expired_signature["signature"],
            "signature_expiration": str(expired_signature["expiration"]),
        }
        response = keyless_client.get("/files", params=query)
        assert response.status_code == 401 and "has expired" in response.json()["message"]
        assert len(second_agent.heads) == request_count and first_agent.heads == third_agent.heads == []
    api.delete("/sandboxes/two")
    response = keyless_client.get(read_url)
    assert response.status_code == 401 and "was removed: create a new URL" in response.json()["message"]


def test_a_signed_url_resumes_its_sandbox(
    memory_gateway: MemoryGateway, api: httpx.Client, keyless_client: httpx.Client
) -> None:
    sandbox = create_sandbox(api, name="one", autoPause=True, autoResume={"enabled": True})
    paused_sandbox = create_sandbox(api, name="two")
    for name in ("one", "two"):
        api.post(f"/sandboxes/{name}/pause").raise_for_status()
    query = sign_query(token=sandbox["envdAccessToken"])
    assert keyless_client.get("/files", params=query).status_code != 401
    assert api.get("/sandboxes/one").json()["state"] == "running"
    response = keyless_client.get("/files", params=sign_query(token=paused_sandbox["envdAccessToken"]))
    assert response.status_code == 502 and "was not found" in response.json()["message"]


def test_the_sandbox_that_signed_a_url_is_found_quickly() -> None:
    """Anyone can cause a search, which blocks the event loop. A long path is hashed only once."""
    secret = Secret()
    secret.key = b"k" * 32
    ids = [f"{number:012x}" for number in range(1000)]
    engine: Any = SimpleNamespace(
        index=SimpleNamespace(sandboxes={each: f"record of {each}" for each in ids}), secret=secret
    )
    signers = SignerFinder(engine)
    path = "/" + "x" * 60_000

    def make_url(token: str) -> SignedUrl:
        url = parse_signed_url("GET", urlencode(sign_query("read", path, token=token), quote_via=quote).encode())
        assert url is not None
        return url

    assert signers.find(make_url(secret.derive(ids[-1]))) == f"record of {ids[-1]}"
    unknown_urls = [make_url(f"{number:064x}") for number in range(10)]
    cpu_seconds_before = time.process_time()
    assert [signers.find(url) for url in unknown_urls] == [None] * 10
    assert time.process_time() - cpu_seconds_before < 0.2
    del engine.index.sandboxes[ids[-1]]
    assert signers.find(make_url(secret.derive(ids[-1]))) is None, "a removed sandbox is not found in the cache"
