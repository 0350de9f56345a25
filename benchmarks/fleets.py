"""Run fleets of gateways on a real etcd, with mutual TLS. Each is a process of its own, and its host is in memory."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.fleet.world import World, created_world, running_process
from tests.support.certificates import Authority
from tests.support.etcd import running_etcd
from tests.support.memory_gateway import ADMIN_KEY
from tests.support.waiting import wait_until

_TIMEOUT_SECONDS = 120


class Client:
    """Sends requests to a gateway over one TCP connection, as an administrator."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_SECONDS)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON of the response, or None if it is empty. Raises RuntimeError if it is not a 2xx."""
        headers = {"X-API-Key": ADMIN_KEY, "Content-Type": "application/json"}
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = self._connection.getresponse()
        data = response.read()
        if not 200 <= response.status < 300:
            raise RuntimeError(f"{method} {path}: {response.status} {data[:500].decode(errors='replace')}")
        return json.loads(data) if data else None

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def created_tls_world(root: Path) -> Iterator[World]:
    """Run an etcd server that only accepts clients with a certificate, and yield a fleet on it without hosts."""
    root.mkdir()
    authority = Authority(root / "authority")
    with running_etcd(root / "etcd", authority.get("etcd")) as etcd, created_world(root, etcd, authority) as world:
        yield world


@contextlib.contextmanager
def running_gateways(world: World, names: Sequence[str], *, in_fleet: bool = True) -> Iterator[list[Client]]:
    """Run gateways with these names and the template ``base``, and yield a client for each.

    Members of a fleet know each other and all copies of the template.
    """
    with contextlib.ExitStack() as stack:
        ports = [
            stack.enter_context(running_process(world, name, in_fleet=in_fleet, is_patient=True))[1] for name in names
        ]
        clients = [Client(port) for port in ports]
        for client in clients:
            stack.callback(client.close)
        if in_fleet:
            for client in clients:
                wait_until(lambda client=client: _count_templates(client) == len(names))  # type: ignore[misc]
        yield clients


def _count_templates(client: Client) -> int:
    return len(client.call("GET", "/templates"))
