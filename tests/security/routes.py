"""List all routes of the gateway in many spellings, and record the effects of requests.

The routes are read from the application itself, so new routes are attacked automatically.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter
from fastapi.routing import APIRoute

from sandbox_gateway import api
from sandbox_gateway.server.serving import build_openapi_document
from tests.support.memory_gateway import MemoryGateway
from tests.support.memory_host import Machine

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "delete", "get")
READ_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods that do not change anything on any route."""


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    """The path with the names of objects that exist in a `Target`."""
    template: str
    """The path in the application, such as `/sandboxes/{ref}`."""

    def __str__(self) -> str:
        return f"{self.method} {self.template}"


@dataclass
class Target:
    """A gateway with one object of each kind, and a record of the effects that requests have on it."""

    gateway: MemoryGateway
    secrets: list[str]
    build_id: str
    agent_calls: list[str] = field(default_factory=list)
    """The paths of the gateway's requests to agents."""
    events: list[str] = field(default_factory=list)

    def read_state(self) -> str:
        """Return everything that a request can change, as JSON."""
        index, host = self.gateway.engine.index, self.gateway.host
        collections = (index.sandboxes, index.snapshots, index.volumes, index.volume_snapshots)
        records = [[item.model_dump(mode="json") for item in collection.values()] for collection in collections]
        machine_states = {
            id: [machine.state, machine.mounted_volumes, machine.allowed] for id, machine in host.machines.items()
        }
        build_ids = [build.build_id for build in self.gateway.engine.templates.list_unready_builds()]
        return json.dumps([records, machine_states, build_ids, host.files, host.disks, host.fork_count], sort_keys=True)

    def fill_template(self, template: str) -> str:
        """Return the path ``template`` with its parameters replaced by the names of existing objects."""
        kind = template.split("/")[2 if template.startswith(("/v1/", "/v2/")) else 1]
        ref = {"sandboxes": "one", "snapshots": "taken", "templates": "spare", "volumes": "data"}.get(kind, "one")
        names = {"ref": ref, "volume": "data", "snapshot": "mark", "id": "0" * 32, "build": self.build_id}
        names |= {"digest": "0" * 64, "transfer": "0" * 16}
        return re.sub(r"{(\w+)}", lambda match: names[match[1]], template)


def list_route_templates() -> list[tuple[str, str]]:
    """Return (method, path) of all routes, including the routes that the OpenAPI document omits."""
    routes = {(method.upper(), path) for path, item in build_openapi_document()["paths"].items() for method in item}
    for module in pkgutil.walk_packages(api.__path__, f"{api.__name__}."):
        router = getattr(importlib.import_module(module.name), "router", None)
        for route in router.routes if isinstance(router, APIRouter) else ():
            if isinstance(route, APIRoute):
                routes |= {(method, route.path) for method in route.methods}
    return sorted({*routes, ("GET", "/openapi.json")})


def list_routes(target: Target) -> list[Route]:
    return [Route(method, target.fill_template(path), path) for method, path in list_route_templates()]


@contextlib.contextmanager
def created_target(memory_gateway: MemoryGateway) -> Iterator[Target]:
    with memory_gateway.client() as admin:
        template = admin.post("/templates", json={"name": "spare", "packages": ["git"]}).json()
        admin.get(f"/templates/spare/builds/{template['buildID']}/logs", params={"follow": True})
        volume = admin.post("/volumes", json={"name": "data"}).json()
        assert admin.post("/volumes/data/snapshots", json={"name": "mark"}).status_code == 201
        mounts = [{"name": "data", "path": "/data"}]
        sandbox = admin.post("/sandboxes", json={"templateID": "base", "name": "one", "volumeMounts": mounts}).json()
        assert admin.post("/sandboxes/one/snapshots", json={"name": "taken"}).status_code == 201
        secrets = [
            sandbox["envdAccessToken"],
            sandbox["trafficAccessToken"],
            volume["token"],
            memory_gateway.engine.secret.key.hex(),
        ]
        target = Target(memory_gateway, secrets, template["buildID"])
        with recording_effects(target):
            yield target
        for path in ("/sandboxes/one", "/snapshots/taken", "/volumes/data?withSnapshots=true", "/templates/spare"):
            admin.delete(path)


@contextlib.contextmanager
def recording_effects(target: Target) -> Iterator[None]:
    """Record events and requests to agents in ``target`` while the context is active."""
    original_publish, original_handle_request = target.gateway.engine.events.publish, Machine._handle_request

    def record_event(type: str, **data: Any) -> None:
        target.events.append(type)
        original_publish(type, **data)

    async def record_request(machine: Machine, line: str, path: str, *args: Any) -> None:
        if machine in target.gateway.host.machines.values():
            target.agent_calls.append(path)
        await original_handle_request(machine, line, path, *args)

    target.gateway.engine.events.publish = record_event  # type: ignore[method-assign]
    Machine._handle_request = record_request  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        target.gateway.engine.events.publish = original_publish  # type: ignore[method-assign]
        Machine._handle_request = original_handle_request  # type: ignore[method-assign]


# --- spellings of a path --------------------------------------------------------------------------------------------

SPELLINGS: dict[str, Callable[[str], str]] = {
    "unchanged": lambda path: path,
    "first letter encoded": lambda path: f"/%{ord(path[1]):02x}{path[2:]}",
    "every letter encoded": lambda path: "/" + "".join(f"%{ord(letter):02X}" for letter in path[1:]),
    "slashes encoded": lambda path: "/" + quote(path[1:], safe=""),
    "all slashes encoded": lambda path: quote(path, safe=""),
    "encoded twice": lambda path: f"/%25{ord(path[1]):02x}{path[2:]}",
    "overlong slash": lambda path: path[0] + path[1:].replace("/", "%c0%af"),
    "a dot segment": lambda path: f"/.{path}",
    "up and down": lambda path: f"/x/..{path}",
    "up and down, encoded": lambda path: f"/x/%2e%2e{path}",
    "up from an open path": lambda path: f"/health/..{path}",
    "up from an open path, encoded": lambda path: f"/health%2f..{path}",
    "a parameter after an open path": lambda path: f"/health;/..{path}",
    "a query after an open path": lambda path: f"/health?{path}",
    "followed by an open path": lambda path: f"{path}/../../../health",
    "an open path as a parameter": lambda path: f"{path};/health",
    "an open path as a query": lambda path: f"{path}?/health",
    "an open path as a fragment": lambda path: f"{path}#/health",
    "an additional slash at the end": lambda path: f"{path}/",
    "an additional slash at the beginning": lambda path: f"/{path}",
    "double slashes": lambda path: path[0] + path[1:].replace("/", "//"),
    "backslashes": lambda path: path.replace("/", "\\"),
    "an encoded backslash": lambda path: path[0] + path[1:].replace("/", "%5c"),
    "capitals": lambda path: path.upper(),
    "a parameter": lambda path: f"{path};jsessionid=1",
    "a suffix": lambda path: f"{path}.json",
    "an encoded space": lambda path: f"{path}%20",
    "an encoded line end": lambda path: f"{path}%0d%0a",
    "an encoded line feed": lambda path: f"{path}%0a",
    "an encoded NUL": lambda path: f"{path}%00",
    "an encoded question mark": lambda path: f"{path}%3f",
    "an encoded hash": lambda path: f"{path}%23/exec",
    "followed by exec": lambda path: f"{path}/exec",
    "followed by exec, encoded": lambda path: f"{path}%2fexec",
    "preceded by exec": lambda path: f"/sandboxes/one/exec/../../..{path}",
    "as the name of a sandbox before exec": lambda path: f"/sandboxes/{quote(path, safe='')}/exec",
    "an absolute URL": lambda path: f"http://gateway{path}",
    "an absolute URL with an open path as its host": lambda path: f"http://health{path}",
    "without a slash": lambda path: path[1:],
    "another version": lambda path: f"/v2{path}",
    "a method in the query": lambda path: f"{path}?_method=DELETE",
}
SAMPLED_SPELLINGS = (
    "unchanged",
    "slashes encoded",
    "up from an open path",
    "an open path as a query",
    "double slashes",
    "an encoded line feed",
    "followed by exec",
    "an absolute URL",
)
"""Spellings for complete test runs: one of each kind of trick, and each that has worked."""

OVERRIDE_HEADERS: list[dict[str, str]] = [
    {name: value}
    for name, value in (
        *((name, "DELETE") for name in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override")),
        *((name, "GET") for name in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override")),
        *((name, "/health") for name in ("X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Prefix", "X-Forwarded-Path")),
        *((name, "127.0.0.1") for name in ("X-Forwarded-For", "X-Real-IP", "X-Client-IP", "True-Client-IP")),
        ("Forwarded", "for=127.0.0.1;proto=https;host=gateway"),
        ("X-Forwarded-Host", "gateway"),
        ("X-Remote-User", "root"),
        ("X-Local", "1"),
        ("X-Sandbox-Gateway-Caller", "local"),
        ("Cookie", "key=admin; X-API-Key=admin"),
        ("Authorization", "Basic cm9vdDpyb290"),
        ("Authorization", "Bearer "),
        ("X-API-Key", ""),
        ("Upgrade", "h2c"),
        ("Connection", "X-API-Key"),
    )
]
"""Headers by which some proxies and frameworks let a caller change the method, path, address or user."""


class Caller:
    """Sends requests with targets that client libraries would reject. Reuses its connection if possible."""

    def __init__(self, memory_gateway: MemoryGateway, headers: dict[str, str]) -> None:
        self._headers = headers
        self._connection = http.client.HTTPConnection("127.0.0.1", memory_gateway.port, timeout=20)

    def request(self, method: str, target: str, body: bytes = b"{}", **headers: str) -> tuple[int, str]:
        """Send a request and return the response's status and body. The body is "" if its length is unknown."""
        try:
            return self._request(method, target, body, headers)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            # The server closed the connection after its previous response.
            self._connection.close()
            return self._request(method, target, body, headers)

    def _request(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
        connection = self._connection
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        default_headers = {"Host": "gateway", "Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in (default_headers | self._headers | headers).items():
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        if response.length is None:
            connection.close()
            return response.status, ""
        return response.status, response.read().decode("latin-1")

    def close(self) -> None:
        self._connection.close()
