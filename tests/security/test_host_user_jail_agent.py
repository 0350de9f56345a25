"""An unprivileged user of a jail host connects to a jail's agent from the gateway's address.

In these tests, the agent is a process on this machine, and its gateway has the loopback address.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sandbox_agent
from sandbox_agent.http.server import MAX_CONNECTIONS
from sandbox_gateway.api.access.ports import derive_port_token
from sandbox_gateway.engine import agent_client
from sandbox_gateway.engine.agent_client import AgentClient, Identity
from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.base import Endpoint
from sandbox_gateway.hosts.connect import CODE_PORT
from sandbox_gateway.hosts.jail_zfs.jail import identity

ADDRESS = "127.0.0.1"
TOKEN = "the sandbox's own token"
AGENT_SCRIPT = f"""
import functools, sys, threading
sys.path.insert(0, sys.argv[1])
from sandbox_agent import agent
from sandbox_agent.machine import identity, system
agent.Identity = functools.partial(identity.Identity, run=sys.argv[2])
system.find_gateway_address = lambda: {ADDRESS!r}
server, code_server = agent.build_servers({ADDRESS!r}, 0, 0, managed=False, line_path="")
threading.Thread(target=code_server.serve, daemon=True).start()
print(server.port, code_server.port, flush=True)
server.serve()
"""


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    identity.write_gateway_key(tmp_path)
    return tmp_path


@pytest.fixture
def agent_ports(run_directory: Path) -> Iterator[tuple[int, int]]:
    """The ports of the agent and its code interpreter."""
    source_directory = Path(str(sandbox_agent.__file__)).parent.parent
    argv = [sys.executable, "-c", AGENT_SCRIPT, str(source_directory), str(run_directory)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            agent_port, code_port = map(int, process.stdout.readline().split())
            yield agent_port, code_port
        finally:
            process.kill()


@pytest.fixture
def agent_port(agent_ports: tuple[int, int]) -> int:
    return agent_ports[0]


@pytest.fixture
def code_port(agent_ports: tuple[int, int]) -> int:
    return agent_ports[1]


def send_request(
    port: int, path: str, body: dict[str, object], headers: dict[str, str] | None = None, *, method: str = "POST"
) -> int:
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=20)
    try:
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        return connection.getresponse().status
    finally:
        connection.close()


def send_identity(agent_port: int, key: str, monkeypatch: pytest.MonkeyPatch) -> AgentClient:
    """Send the agent an identity as the gateway does, and return the client that sent it."""
    monkeypatch.setattr(agent_client, "AGENT_PORT", agent_port)
    client = AgentClient(Endpoint(ADDRESS, key=key), TOKEN)
    sandbox_identity = Identity("0123456789ab", "one", TOKEN, {}, [])
    asyncio.run(client.identify(sandbox_identity, seconds=20, find_end_reason=lambda: ""))
    return client


FORGED_IDENTITY = {"accessToken": "mine"}
EXEC_REQUEST = {"args": ["true"]}


@pytest.mark.parametrize("headers", [{}, {"X-Gateway-Key": ""}, {"X-Gateway-Key": "0" * 64}, {"X-Access-Token": ""}])
def test_a_host_user_cannot_claim_an_unidentified_jail(agent_port: int, headers: dict[str, str]) -> None:
    assert send_request(agent_port, "/identity", FORGED_IDENTITY, headers) == 401
    assert send_request(agent_port, "/exec", EXEC_REQUEST, headers) == 401
    assert send_request(agent_port, "/mounts", {"mounts": []}, headers) in (401, 403)
    assert send_request(agent_port, "/exec", EXEC_REQUEST, {"X-Access-Token": "mine"}) == 401


def test_a_host_user_cannot_claim_an_identified_jail(
    agent_port: int, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = send_identity(agent_port, identity.read_gateway_key(run_directory), monkeypatch)
    assert send_request(agent_port, "/identity", FORGED_IDENTITY) == 401
    assert send_request(agent_port, "/mounts", {"mounts": []}) == 401
    assert send_request(agent_port, "/exec", EXEC_REQUEST) == 401
    assert send_request(agent_port, "/exec", EXEC_REQUEST, {"X-Access-Token": "mine"}) == 401
    assert asyncio.run(client.exec(["echo", "hello"])).stdout == b"hello\n", "the gateway can no longer run commands"


def send_to_code_port(code_port: int, headers: dict[str, str]) -> set[int]:
    """Send a request to each route of the code interpreter, and return the statuses of the responses."""
    requests = (
        *(("POST", "/execute", {"code": "print(1)"}), ("POST", "/contexts", {}), ("GET", "/contexts", {})),
        *(("POST", "/contexts/a/restart", {}), ("POST", "/contexts/a/start", {}), ("DELETE", "/contexts/a", {})),
    )
    return {send_request(code_port, path, body, headers, method=method) for method, path, body in requests}


@pytest.mark.parametrize("is_identified", [False, True], ids=["before its identity", "with an identity"])
def test_a_host_user_cannot_run_code_on_the_port_of_the_interpreter(
    agent_port: int, code_port: int, run_directory: Path, monkeypatch: pytest.MonkeyPatch, is_identified: bool
) -> None:
    """Only the token of this sandbox opens the port. The gateway's key does not open it."""
    key = identity.read_gateway_key(run_directory)
    derived_token = {"X-Access-Token": derive_port_token(TOKEN, CODE_PORT)}
    if is_identified:
        send_identity(agent_port, key, monkeypatch)
    attacks = [{}, {"X-Access-Token": ""}, {"X-Access-Token": "mine"}, {"X-Gateway-Key": "0" * 64}]
    attacks += [
        {"X-Access-Token": derive_port_token("", CODE_PORT)},
        {"X-Access-Token": derive_port_token("x", CODE_PORT)},
    ]
    for headers in (*attacks, {"X-Gateway-Key": key}, *([] if is_identified else [derived_token])):
        assert send_to_code_port(code_port, headers) == {401}
    if is_identified:
        assert 401 not in send_to_code_port(code_port, derived_token), "the gateway can no longer run code"


@pytest.mark.parametrize(
    "sent_data", [b"", b"GET /", b"GET /nothing HTTP/1.1\r\n\r\n"], ids=["nothing", "a part", "a request"]
)
def test_a_host_user_cannot_lock_the_gateway_out(
    agent_ports: tuple[int, int], run_directory: Path, monkeypatch: pytest.MonkeyPatch, sent_data: bytes
) -> None:
    agent_port, code_port = agent_ports
    client = send_identity(agent_port, identity.read_gateway_key(run_directory), monkeypatch)
    with contextlib.ExitStack() as stack:
        for port in agent_ports:
            for _ in range(MAX_CONNECTIONS + 8):
                stack.enter_context(socket.create_connection((ADDRESS, port), timeout=20)).sendall(sent_data)
        assert asyncio.run(client.exec(["echo", "hello"])).stdout == b"hello\n"
        derived_token = {"X-Access-Token": derive_port_token(TOKEN, CODE_PORT)}
        assert send_request(code_port, "/contexts", {}, derived_token, method="GET") == 200


def test_a_connection_flood_does_not_close_the_gateways_connections(
    agent_port: int, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_identity(agent_port, identity.read_gateway_key(run_directory), monkeypatch)
    connection = http.client.HTTPConnection(ADDRESS, agent_port, timeout=20)
    headers = {"Content-Type": "application/json", "X-Access-Token": TOKEN}
    with contextlib.closing(connection), contextlib.ExitStack() as stack:
        for _ in range(2):
            connection.request("POST", "/exec", json.dumps(EXEC_REQUEST), headers)
            assert connection.getresponse().read() and connection.sock is not None
            for _ in range(MAX_CONNECTIONS + 8):
                stack.enter_context(socket.create_connection((ADDRESS, agent_port), timeout=20))


def test_even_the_gateway_needs_the_key(agent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendFailed, match="not set the access token"):
        send_identity(agent_port, "", monkeypatch)


def test_the_key_is_readable_only_by_root_and_changes_at_each_start(run_directory: Path) -> None:
    first_key = identity.read_gateway_key(run_directory)
    assert len(first_key) == 64
    assert stat.S_IMODE((run_directory / "gateway-key").stat().st_mode) == 0o600
    identity.write_gateway_key(run_directory)
    assert identity.read_gateway_key(run_directory) not in ("", first_key)
    assert identity.read_gateway_key(run_directory / "nowhere") == ""
