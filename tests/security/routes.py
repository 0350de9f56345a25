"""Every route of the gateway, in every spelling, and a record of the effects of a request.

The routes come from the application itself, so a new route is attacked without a change here.
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
from sandbox_gateway.server.serving import document
from tests.api.memory_gateway import MemoryGateway
from tests.api.memory_host import Machine

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "delete", "get")
READING = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing on any route."""


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    """With the names of objects that exist in a `Target`."""
    template: str
    """As in the application, such as `/sandboxes/{ref}`."""

    def __str__(self) -> str:
        return f"{self.method} {self.template}"


@dataclass
class Target:
    """A gateway with one object of each kind, and its state before the attack."""

    gateway: MemoryGateway
    secrets: list[str]
    build: str
    agent_calls: list[str] = field(default_factory=list)
    """Paths of the gateway's requests to agents."""
    events: list[str] = field(default_factory=list)

    def state(self) -> str:
        """Everything that a request could have changed, as text."""
        index, host = self.gateway.engine.index, self.gateway.host
        things = (index.sandboxes, index.snapshots, index.volumes, index.volume_snapshots)
        records = [[thing.model_dump(mode="json") for thing in kind.values()] for kind in things]
        machines = {id: [machine.state, machine.mounted, machine.allowed] for id, machine in host.machines.items()}
        builds = [build.build_id for build in self.gateway.engine.templates.list_unfinished_builds()]
        return json.dumps([records, machines, builds, host.files, host.disks, host.forked], sort_keys=True)

    def fill_in(self, template: str) -> str:
        """Put names of existing objects into a path of the application."""
        kind = template.split("/")[2 if template.startswith(("/v1/", "/v2/")) else 1]
        ref = {"sandboxes": "one", "snapshots": "taken", "templates": "spare", "volumes": "data"}.get(kind, "one")
        names = {"ref": ref, "volume": "data", "snapshot": "mark", "build": self.build}
        return re.sub(r"{(\w+)}", lambda match: names[match[1]], template)


def route_templates() -> list[tuple[str, str]]:
    """(method, path) of all routes: those of the OpenAPI document, and those of the routers that it omits."""
    found = {(method.upper(), path) for path, item in document()["paths"].items() for method in item}
    for module in pkgutil.walk_packages(api.__path__, f"{api.__name__}."):
        router = getattr(importlib.import_module(module.name), "router", None)
        for route in router.routes if isinstance(router, APIRouter) else ():
            if isinstance(route, APIRoute):
                found |= {(method, route.path) for method in route.methods}
    return sorted({*found, ("GET", "/openapi.json")})


def all_routes(target: Target) -> list[Route]:
    return [Route(method, target.fill_in(path), path) for method, path in route_templates()]


@contextlib.contextmanager
def attack_target(memory_gateway: MemoryGateway) -> Iterator[Target]:
    with memory_gateway.client() as admin:
        spare = admin.post("/templates", json={"name": "spare", "packages": ["git"]}).json()
        admin.get(f"/templates/spare/builds/{spare['buildID']}/logs", params={"follow": True})
        volume = admin.post("/volumes", json={"name": "data"}).json()
        assert admin.post("/volumes/data/snapshots", json={"name": "mark"}).status_code == 201
        mounts = [{"name": "data", "path": "/data"}]
        one = admin.post("/sandboxes", json={"templateID": "base", "name": "one", "volumeMounts": mounts}).json()
        assert admin.post("/sandboxes/one/snapshots", json={"name": "taken"}).status_code == 201
        secrets = [
            one["envdAccessToken"],
            one["trafficAccessToken"],
            volume["token"],
            memory_gateway.engine.secret.key.hex(),
        ]
        made = Target(memory_gateway, secrets, spare["buildID"])
        with _recorded(made):
            yield made
        for path in ("/sandboxes/one", "/snapshots/taken", "/volumes/data?withSnapshots=true", "/templates/spare"):
            admin.delete(path)


@contextlib.contextmanager
def _recorded(made: Target) -> Iterator[None]:
    """Record the requests to agents and the events in ``made`` inside the context."""
    publish, answer = made.gateway.engine.events.publish, Machine._answer

    def record_event(type: str, **data: Any) -> None:
        made.events.append(type)
        publish(type, **data)

    async def record_answer(machine: Machine, line: str, asked: str, *more: Any) -> None:
        made.agent_calls.append(asked)
        await answer(machine, line, asked, *more)

    made.gateway.engine.events.publish = record_event  # type: ignore[method-assign]
    Machine._answer = record_answer  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        made.gateway.engine.events.publish = publish  # type: ignore[method-assign]
        Machine._answer = answer  # type: ignore[method-assign]


# --- spellings of a path --------------------------------------------------------------------------------------------

SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": lambda path: path,
    "first letter encoded": lambda path: f"/%{ord(path[1]):02x}{path[2:]}",
    "every letter encoded": lambda path: "/" + "".join(f"%{ord(letter):02X}" for letter in path[1:]),
    "slashes encoded": lambda path: "/" + quote(path[1:], safe=""),
    "all slashes encoded": lambda path: quote(path, safe=""),
    "encoded twice": lambda path: f"/%25{ord(path[1]):02x}{path[2:]}",
    "overlong slash": lambda path: path[0] + path[1:].replace("/", "%c0%af"),
    "a dot segment": lambda path: f"/.{path}",
    "up and down": lambda path: f"/x/..{path}",
    "up and down, encoded": lambda path: f"/x/%2e%2e{path}",
    "up from what is open": lambda path: f"/health/..{path}",
    "up from what is open, encoded": lambda path: f"/health%2f..{path}",
    "a parameter after what is open": lambda path: f"/health;/..{path}",
    "a query after what is open": lambda path: f"/health?{path}",
    "what is open behind it": lambda path: f"{path}/../../../health",
    "what is open as its parameter": lambda path: f"{path};/health",
    "what is open as its query": lambda path: f"{path}?/health",
    "what is open as its fragment": lambda path: f"{path}#/health",
    "a slash more at the end": lambda path: f"{path}/",
    "a slash more at the beginning": lambda path: f"/{path}",
    "two slashes within": lambda path: path[0] + path[1:].replace("/", "//"),
    "backslashes": lambda path: path.replace("/", "\\"),
    "an encoded backslash": lambda path: path[0] + path[1:].replace("/", "%5c"),
    "capitals": lambda path: path.upper(),
    "a parameter": lambda path: f"{path};jsessionid=1",
    "a suffix": lambda path: f"{path}.json",
    "an encoded blank": lambda path: f"{path}%20",
    "an encoded line's end": lambda path: f"{path}%0d%0a",
    "an encoded NUL": lambda path: f"{path}%00",
    "an encoded question mark": lambda path: f"{path}%3f",
    "an encoded hash": lambda path: f"{path}%23/exec",
    "exec behind it": lambda path: f"{path}/exec",
    "exec behind it, encoded": lambda path: f"{path}%2fexec",
    "exec before it": lambda path: f"/sandboxes/one/exec/../../..{path}",
    "as a sandbox's name before exec": lambda path: f"/sandboxes/{quote(path, safe='')}/exec",
    "absolute": lambda path: f"http://gateway{path}",
    "absolute, with what is open as its host": lambda path: f"http://health{path}",
    "without a slash": lambda path: path[1:],
    "another version": lambda path: f"/v2{path}",
    "a method in the query": lambda path: f"{path}?_method=DELETE",
}

OVERRIDES: list[dict[str, str]] = [
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
    """Sends requests with targets that client libraries would reject; reuses its connection if possible."""

    def __init__(self, memory_gateway: MemoryGateway, headers: dict[str, str]) -> None:
        self._headers = headers
        self._connection = http.client.HTTPConnection("127.0.0.1", memory_gateway.port, timeout=20)

    def ask(self, method: str, target: str, body: bytes = b"{}", **headers: str) -> tuple[int, str]:
        """The status, and the body if it has an end."""
        try:
            return self._ask(method, target, body, headers)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            # The server closed the connection after its previous answer.
            self._connection.close()
            return self._ask(method, target, body, headers)

    def _ask(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> tuple[int, str]:
        connection = self._connection
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        given = {"Host": "gateway", "Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in (given | self._headers | headers).items():
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        if answer.length is None:
            connection.close()
            return answer.status, ""
        return answer.status, answer.read().decode("latin-1")

    def close(self) -> None:
        self._connection.close()
