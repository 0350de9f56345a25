"""Fleets of gateways with in-memory hosts, on a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox_gateway.fleet.directory import Directory
from sandbox_gateway.hosts.base import Scan
from tests.support import session
from tests.support.certificates import Authority, Certificate
from tests.support.etcd import Etcd
from tests.support.memory_gateway import MemoryGateway
from tests.support.memory_host import MemoryHost
from tests.support.waiting import wait_until

SECRET = bytes(range(32))


class FleetHost:
    """A host whose gateway can be started again. It keeps its machines and objects in memory."""

    def __init__(self, world: World, name: str, host: MemoryHost | None = None, **settings: Any) -> None:
        self._world = world
        self.name = name
        self._root = world.root / name
        self._root.mkdir(exist_ok=True)
        self.host = host or MemoryHost()
        self._settings = settings
        self.server_settings: dict[str, Any] = {}
        self._gateway: MemoryGateway | None = None
        self.port = session.allocate_port()

    @property
    def gateway(self) -> MemoryGateway:
        assert self._gateway
        return self._gateway

    def start(self, *, in_fleet: bool = True) -> None:
        address = self._world.registry
        registry = {"allowed": [address], "plain_http": [address]}
        sections: dict[str, Any] = {"registry": registry, "server": self.server_settings}
        if in_fleet:
            sections["fleet"] = self.create_section()
        self._gateway = MemoryGateway(self._root, self.host, **sections)

    def create_section(self) -> dict[str, Any]:
        world = self._world
        certificate = world.get_certificate(self.name)
        return {
            "name": self.name,
            "address": f"127.0.0.1:{self.port}",
            "etcd": [world.etcd.endpoint],
            "tls_ca": str(certificate.ca),
            "tls_cert": str(certificate.cert),
            "tls_key": str(certificate.key),
            "secret_file": str(world.write_secret(self._root / "fleet-secret", SECRET)),
            **self._settings,
        }

    def end(self) -> None:
        gateway, self._gateway = self._gateway, None
        if gateway:
            gateway.end()

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Let the gateway do nothing in this context."""
        may_go_on = threading.Event()
        self.gateway.loop.call_soon_threadsafe(may_go_on.wait, 120)
        try:
            yield
        finally:
            may_go_on.set()

    def client(self, key: str | None = None) -> httpx.Client:
        return self.gateway.client(key)

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the JSON of a successful request with administrator rights."""
        with self.client() as client:
            response = client.get(path, params=parameters)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, body: Any = None, status: int = 201) -> Any:
        with self.client() as client:
            response = client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json() if response.content else None

    def get_directory(self) -> Directory:
        directory = self.gateway.engine._context.name_claims
        assert isinstance(directory, Directory)
        return directory

    def list_known_hosts(self, ref: str) -> list[str]:
        """Return the hosts that have an object with this name or id, as far as this gateway knows."""
        return sorted(holder.host for holder in self.get_directory()._view.find_holders(ref))

    def list_running_members(self) -> list[str]:
        return [host["name"] for host in self.get("/fleet")["hosts"] if host["state"] == "running"]


class Held:
    """Lets a method of a host, such as ``fork``, begin its work only when the test says so."""

    def __init__(self, host: FleetHost, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = host.gateway.loop
        self._may_begin = asyncio.Event()
        self.count = 0
        """How many calls have arrived."""
        work = getattr(host.host, method)

        async def work_later(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            await self._may_begin.wait()
            return await work(*arguments, **options)

        monkeypatch.setattr(host.host, method, work_later)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._may_begin.set)


class World:
    """Everything that the gateways of a fleet share."""

    def __init__(self, root: Path, etcd: Etcd, get_certificate: Callable[[str], Certificate]) -> None:
        self.root = root
        self.etcd = etcd
        self.registry = "127.0.0.1:1"
        """The registry to which the gateways may push. By default, none answers there."""
        self.get_certificate = get_certificate
        self.hosts: list[FleetHost] = []

    def write_secret(self, path: Path, secret: bytes) -> Path:
        path.touch(mode=0o600)
        path.write_bytes(secret)
        return path

    def create_host(self, name: str, host: MemoryHost | None = None, **settings: Any) -> FleetHost:
        self.hosts.append(FleetHost(self, name, host, **settings))
        return self.hosts[-1]

    def start(self, *names: str) -> list[FleetHost]:
        """Start hosts with these names, and wait until they see each other."""
        hosts = [self.create_host(name) for name in names]
        for host in hosts:
            host.start()
        self.wait_for_members(hosts)
        return hosts

    def wait_for_members(self, hosts: list[FleetHost]) -> None:
        names = {host.name for host in hosts}
        for host in hosts:
            wait_until(lambda host=host: names <= {*host.list_running_members()})  # type: ignore[misc]

    @staticmethod
    def keep_objects(host: FleetHost) -> None:
        """Let the next gateway of this host find its objects, as on a host with a disk; machines keep running."""
        index, memory = host.gateway.engine.index, host.host

        async def scan() -> Scan:
            return Scan(
                sandboxes=[each.model_copy(deep=True) for each in index.sandboxes.values()],
                snapshots=[each.model_copy(deep=True) for each in index.snapshots.values()],
                volumes=[each.model_copy(deep=True) for each in index.volumes.values()],
                volume_snapshots=[each.model_copy(deep=True) for each in index.volume_snapshots.values()],
                running_instances={*memory.machines},
            )

        memory.scan = scan  # type: ignore[method-assign]

    def end(self) -> None:
        with contextlib.ExitStack() as stack:
            for host in self.hosts:
                stack.callback(host.end)


@contextlib.contextmanager
def created_world(root: Path, etcd: Etcd, authority: Authority) -> Iterator[World]:
    world = World(root, etcd, authority.get)
    try:
        yield world
    finally:
        world.end()


@contextlib.contextmanager
def running_process(
    world: World,
    name: str,
    fork_seconds: float = 0,
    *,
    in_fleet: bool = True,
    is_patient: bool = False,
    **sections: dict[str, Any],
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a gateway in a process of its own, and kill it at the end. Yields the process and its port.

    ``is_patient``: it has the times for a busy machine.
    """
    host = world.create_host(name)
    argv = [sys.executable, "-m", "tests.fleet.gateway_process", str(world.root / name)]
    if in_fleet:
        sections["fleet"] = host.create_section()
    argv += [json.dumps(sections), str(fork_seconds), *(["patient"] if is_patient else [])]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


_numbers = itertools.count()


_BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("PATCH", "/sandboxes/{ref}"): {"metadata": {"a": "b"}},
    ("POST", "/sandboxes/{ref}/timeout"): {"timeout": 60},
    ("PUT", "/sandboxes/{ref}/network"): {"allowInternetAccess": False},
    ("POST", "/sandboxes/{ref}/exec"): {"args": ["write", "a", "b"]},
    ("POST", "/sandboxes/{ref}/clone"): {"count": 2},
    ("POST", "/v1/sandboxes/{ref}/exec"): {"args": ["write", "a", "b"]},
    ("POST", "/v1/sandboxes/{ref}/eval"): {"code": "1 + 1"},
    ("POST", "/snapshots/{ref}/prewarm"): {"count": 0},
    ("PATCH", "/volumes/{ref}"): {"sizeMB": 2048},
    ("POST", "/volumes/{ref}/rollback"): {"snapshot": "mark", "force": True},
}


class Objects:
    """One object of each kind on a host, with names that end in the same number."""

    def __init__(self, host: FleetHost, *, with_template: bool = False) -> None:
        number = next(_numbers)
        self.names = {kind: f"{kind}-{number}" for kind in ("sandbox", "snapshot", "template", "volume")}
        host.post("/volumes", {"name": self.names["volume"]})
        host.post(f"/volumes/{self.names['volume']}/snapshots", {"name": "mark"})
        mounts = [{"name": self.names["volume"], "path": "/data"}]
        body = {"templateID": "base", "name": self.names["sandbox"], "volumeMounts": mounts}
        self.sandbox = host.post("/sandboxes", body)
        host.post(f"/sandboxes/{self.names['sandbox']}/snapshots", {"name": self.names["snapshot"]})
        self.build_id = ""
        if with_template:
            self._build_template(host, number)

    def _build_template(self, host: FleetHost, number: int) -> None:
        build = host.post("/templates", {"name": self.names["template"], "description": str(number)}, 202)
        self.build_id = build["buildID"]
        template = f"/templates/{self.names['template']}"
        wait_until(lambda: host.get(f"{template}/builds/{self.build_id}/status")["status"] == "ready")

    def fill(self, kind: str, path: str) -> str:
        names = {"ref": self.names[kind], "volume": self.names["volume"], "snapshot": "mark", "build": self.build_id}
        names["digest"] = "0" * 64
        return re.sub(r"{(\w+)}", lambda match: names[match[1]], path)

    def make_body(self, route: tuple[str, str]) -> dict[str, Any]:
        _, path = route
        if route == ("POST", "/templates/tags"):
            return {"target": self.names["template"], "tags": ["tag"]}
        if route == ("DELETE", "/templates/tags"):
            return {"name": self.names["template"], "tags": ["tag"]}
        if route == ("PUT", "/templates/{ref}/alias"):
            return {"alias": f"alias-{self.names['template']}"}
        if route == ("POST", "/v1/snapshots/{ref}/compact"):
            return {"to": f"flat-{self.names['snapshot']}"}
        if route == ("POST", "/sandboxes/{ref}/rollback"):
            return {"snapshotID": self.names["snapshot"]}
        if route == ("POST", "/sandboxes/{ref}/volumes"):
            return {"name": self.names["volume"], "path": "/more"}
        if path.endswith("/push"):
            return {"reference": f"127.0.0.1:1/env:{self.names['snapshot']}"}
        if route == ("POST", "/templates"):
            return {"name": f"child-{self.names['template']}", "template": self.names["template"]}
        if route == ("POST", "/volumes"):
            return {"fromSnapshot": f"{self.names['volume']}@mark"}
        return _BODIES.get(route, {})


def connect_to_peer_listener(host: FleetHost, context: ssl.SSLContext, request: bytes) -> bytes:
    with (
        socket.create_connection(("127.0.0.1", host.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        connection.sendall(request)
        return connection.recv(4096)
