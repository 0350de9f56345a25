"""Root in a real machine replaces the agent with another program. The gateway keeps serving other sandboxes."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.security.hostile import check_others_are_served
from tests.support.gateway import TEMPLATE, Gateway
from tests.support.waiting import wait_until

# A program that responds to every request with 200 KB in which each quote looks like the beginning of a string.
HOSTILE_AGENT_SCRIPT = """
import socket, threading
BODY = b'"' + bytes([92])
BODY *= 100_000
HEAD = b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(BODY)
listener = socket.create_server(("0.0.0.0", 49983), backlog=64)

def answer(connection):
    try:
        connection.recv(65536)
        connection.sendall(HEAD + BODY)
        connection.recv(1)
    except OSError:
        pass
    connection.close()

while True:
    threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()
"""
_REPLACE_COMMAND = "sleep 1; systemctl stop sandbox-agent; exec python3 /root/hostile.py"
_REQUEST_TIMEOUT_SECONDS = 280


@pytest.fixture
def attacker_id(shared_gateway: Gateway, template: str) -> Iterator[str]:
    """The id of a sandbox in which another program has replaced the agent."""
    new_sandbox = shared_gateway.call("POST", "/sandboxes", {"templateID": TEMPLATE, "timeout": -1})
    id: str = new_sandbox["sandboxID"]
    encoded_script = base64.b64encode(HOSTILE_AGENT_SCRIPT.encode()).decode()
    write_command = f"echo {encoded_script} | base64 -d > /root/hostile.py"
    shared_gateway.sh(id, f"{write_command}; setsid sh -c '{_REPLACE_COMMAND}' </dev/null >/dev/null 2>&1 &")
    wait_until(lambda: "with invalid JSON" in _ping_agent(shared_gateway, id), 120)
    yield id
    shared_gateway.call("DELETE", f"/sandboxes/{id}")


def _ping_agent(gateway: Gateway, id: str) -> str:
    return gateway.client.post(f"/v1/sandboxes/{id}/ping").text


def test_the_gateway_keeps_serving_others(shared_gateway: Gateway, attacker_id: str) -> None:
    gateway = shared_gateway
    other_id = gateway.call("POST", "/sandboxes", {"templateID": TEMPLATE, "timeout": -1})["sandboxID"]
    gateway.call("POST", "/volumes", {"name": "of-evil", "sizeMB": 64})
    try:
        for route, body, status in (
            (f"/sandboxes/{attacker_id}/exec", {"args": ["true"]}, 500),
            (f"/v1/sandboxes/{attacker_id}/exec", {"args": ["true"]}, 500),
            (f"/v1/sandboxes/{attacker_id}/eval", {"code": "1"}, 500),
            (f"/v1/sandboxes/{attacker_id}/ping", {}, 500),
            (f"/sandboxes/{attacker_id}/volumes", {"name": "of-evil", "path": "/srv"}, 500),
            (f"/sandboxes/{attacker_id}/snapshots", {"memory": "none"}, 500),
            (f"/sandboxes/{attacker_id}/snapshots", {"name": "of-evil-memory"}, 201),
            (f"/sandboxes/{attacker_id}/pause", {"memory": False}, 500),
        ):
            response = check_others_are_served(gateway.client, _prepare_request(gateway, route, body))
            assert response.status_code == status, (route, response.text)
            assert len(response.content) < 10_000
        sandbox_response = check_others_are_served(
            gateway.client, lambda: gateway.client.get(f"/sandboxes/{attacker_id}", timeout=_REQUEST_TIMEOUT_SECONDS)
        )
        assert sandbox_response.status_code == 200 and sandbox_response.json()["diverged"] is None
        assert gateway.execute(other_id, "echo", "served")["stdout"] == "served\n"
        # The fork must also receive an identity, so its agent must respond.
        fork_response = check_others_are_served(
            gateway.client, _prepare_request(gateway, "/snapshots/of-evil-memory/fork", {"name": "evil-fork"})
        )
        assert fork_response.status_code == 500, fork_response.text
    finally:
        gateway.call("DELETE", f"/sandboxes/{other_id}")
        gateway.client.delete("/snapshots/of-evil-memory?when=unused")
        gateway.client.delete(f"/sandboxes/{attacker_id}/volumes/of-evil")
        gateway.call("DELETE", "/volumes/of-evil?force=true")


def _prepare_request(gateway: Gateway, route: str, body: dict[str, Any]) -> Callable[[], httpx.Response]:
    return lambda: gateway.client.post(route, json=body, timeout=_REQUEST_TIMEOUT_SECONDS)
