"""Simulate several clients that use a gateway at the same time."""

from __future__ import annotations

import base64
import concurrent.futures
import itertools
from collections.abc import Callable
from typing import Any

import httpx

AGENT_PORT = 49983
_UPLOAD_DATA = b"x" * (1 << 20)
_STDIN_BASE64 = base64.b64encode(b"x" * 20_000).decode()


class MixedUse:
    """Runs concurrent clients with administrator rights. Their sandboxes are created from ``template``."""

    def __init__(self, create_client: Callable[[], httpx.Client], template: str, *, clients: int = 4) -> None:
        self._create_client = create_client
        self._template = template
        self._client_count = clients
        self._numbers = itertools.count()

    def run_rounds(self, count: int) -> None:
        """Run ``count`` rounds, several at a time. Raises the exception of the first round that failed."""
        with concurrent.futures.ThreadPoolExecutor(self._client_count) as pool:
            for future in [pool.submit(self._run_round) for _ in range(count)]:
                future.result()

    def _run_round(self) -> None:
        """Create a sandbox, use it in typical ways, then remove everything."""
        with self._create_client() as client:
            number = next(self._numbers)
            name = f"mixed-{number}"
            sandbox = _parse_json(client.post("/sandboxes", json={"templateID": self._template, "name": name}))
            try:
                self._use_sandbox(client, sandbox, number)
            finally:
                client.delete(f"/sandboxes/{name}").raise_for_status()

    def _use_sandbox(self, client: httpx.Client, sandbox: dict[str, Any], number: int) -> None:
        name = f"mixed-{number}"
        for _ in range(3):
            _parse_json(client.post(f"/sandboxes/{name}/exec", json={"args": ["cat"], "stdin": _STDIN_BASE64}))
            _parse_json(client.get(f"/sandboxes/{name}"))
        agent_headers = {"E2b-Sandbox-Id": sandbox["sandboxID"], "E2b-Sandbox-Port": str(AGENT_PORT)}
        file_path = f"/files?path=/tmp/{number}"
        upload_headers = agent_headers | {"Content-Type": "application/octet-stream"}
        client.post(file_path, content=_UPLOAD_DATA, headers=upload_headers).raise_for_status()
        client.get(file_path, headers=agent_headers).raise_for_status()
        snapshot = _parse_json(client.post(f"/sandboxes/{name}/snapshots", json={"name": f"snapshot-{number}"}))[
            "snapshotID"
        ]
        forks = _parse_json(client.post(f"/snapshots/{snapshot}/fork", json={"count": 2}))["sandboxes"]
        _parse_json(client.post(f"/sandboxes/{name}/rollback", json={"snapshotID": snapshot}))
        for path in ("/sandboxes", "/snapshots", "/lineage", "/templates", "/openapi.json"):
            _parse_json(client.get(path))
        client.get("/metrics").raise_for_status()
        for fork in forks:
            client.delete(f"/sandboxes/{fork['sandboxID']}").raise_for_status()
        client.delete(f"/snapshots/{snapshot}", params={"when": "unused"}).raise_for_status()


def _parse_json(response: httpx.Response) -> Any:
    response.raise_for_status()
    return response.json()
