"""A gateway that fails on request: the real API and engine with an in-memory host, behind a proxy.

The proxy is an HTTP server that forwards requests, and can refuse, change, delay or drop them. The host's machines are
the hosts of tests/support/memory_host.py, with a shell that supports the commands that the collection's tests run.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.base import Log
from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Sandbox, Snapshot
from tests.support import memory_gateway
from tests.support.memory_host import Machine, MemoryHost

TEMPLATE = "base"
PAGE_SIZE = 3
"""Maximum number of entries in one response. It is small, so that tests detect a client that ignores further pages."""
_TIMEOUT_SECONDS = 60
Rewriter = Callable[[str, str, int, Any], tuple[int, Any]]
"""Takes (method, target, status, data) of a response. Returns the status and the data to send instead."""
Interceptor = Callable[[str, str], "tuple[int, Any] | None"]
"""Takes (method, target) of a request. Returns the status and the data to send, or None to forward the request."""


class ShellMachine(Machine):
    """A machine whose shell can write to a file, fails for `false`, and succeeds for all other commands."""

    def _start_process(self, body: bytes) -> bytes:
        return super()._start_process(body.replace(b'"false"', b'"fail"'))

    async def _exec(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["args"][0] == "/bin/sh":
            script = request["args"][-1]
            _, _, file = script.partition(">")
            request = {**request, "args": ["write", file, script] if file else ["exit", "0"]}
        return await super()._exec(request)


class FaultyHost(MemoryHost):
    """A host of ShellMachines. Forks of sandboxes in ``failing_names`` fail. Builds wait if ``holds_builds`` is set."""

    machine_type = ShellMachine
    holds_builds = False

    async def build_base(
        self, base: Snapshot, recipe: Recipe, source_digest: str, log: Log, login: RegistryLogin | None = None
    ) -> str:
        # Tests set ``holds_builds`` in another thread.
        while self.holds_builds:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return await super().build_base(base, recipe, source_digest, log, login)

    async def fork(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool, hold: bool = False) -> None:
        if sandbox.name in self.failing_names:
            raise BackendFailed(f"sandbox {sandbox.name!r} did not answer within 20 s")
        await super().fork(snapshot, sandbox, with_memory=with_memory)


class FaultyGateway:
    """A gateway behind a proxy at ``url``. ``calls``: (method, target) of each request to the proxy.

    ``sections``: sections of the gateway's configuration.

    ``token``: the only key that the proxy accepts, or "" if no key is needed. ``version``: the version that the proxy
    reports instead of the gateway's, unless empty.

    Faults: ``failing_names``, names of sandboxes whose fork or rollback fails; ``holds_builds``, whether builds wait;
    ``requests_to_refuse``, how many of the next requests to refuse with status 429; ``connections_to_drop``, how many
    of the next connections to close without a response; ``delay_seconds``, the time before each response;
    ``vanishing_ids``, ids of snapshots and sandboxes that are removed after a client has read them; ``intercept`` and
    ``rewrite``, see their types.
    """

    def __init__(self, root: Path, **sections: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self._thread_local = threading.local()
        self._forget_faults()
        self._gateway = memory_gateway.MemoryGateway(root, FaultyHost(), log={"level": "warning"}, **sections)
        self._gateway.build_template(TEMPLATE)
        self._api_fields = _ApiFields(self.request("GET", "/openapi.json"))
        self._handler = type("Handler", (_Handler,), {"gateway": self})
        self._cleanup_stack = contextlib.ExitStack()
        self._cleanup_stack.callback(self._gateway.end)
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler)
        # Connections inherit this option. Without it, each body waits 40 ms for the client to acknowledge the headers.
        server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self._cleanup_stack.enter_context(_serving(server))

    def _forget_faults(self) -> None:
        self.token = self.version = ""
        self.calls: list[tuple[str, str]] = []
        self.requests_to_refuse = self.connections_to_drop = 0
        self.delay_seconds = 0.0
        self.vanishing_ids: set[str] = set()
        self.intercept: Interceptor | None = None
        self.rewrite: Rewriter | None = None

    @contextlib.contextmanager
    def listening_on_unix_socket(self, path: Path) -> Iterator[str]:
        """Make the proxy listen on a unix socket as well, and yield the URL of that socket."""
        with _serving(_UnixServer(str(path), self._handler)):
            yield f"unix://{path}"

    def end(self) -> None:
        self._cleanup_stack.close()

    # -- direct requests, without the proxy ----------------------------------------------------------------------------

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request, check that it succeeds, and return the data in the response."""
        status, _, raw_body = self._forward(method, path, None if body is None else json.dumps(body).encode())
        assert status < 400, (method, path, raw_body)
        return json.loads(raw_body) if raw_body else None

    def list_objects(self, kind: str) -> list[dict[str, Any]]:
        """Return all `sandboxes`, `snapshots`, finished `templates` or `volumes`."""
        return [
            each for each in self.request("GET", f"/{kind}?limit=1000") if each.get("buildStatus") in (None, "ready")
        ]

    def list_names(self, kind: str) -> list[str]:
        return [name for each in self.list_objects(kind) for name in each.get("names") or [each["name"]]]

    def end_machine(self, name: str) -> None:
        """Stop a sandbox's machine as if its process had exited, and wait until the gateway has detected that."""
        (sandbox,) = self.request("GET", f"/sandboxes?name={name}")
        instance = self._host.saved_sandboxes[sandbox["sandboxID"]].instance

        async def end() -> None:
            await self._host.machines.pop(instance).stop()
            self._host._exit(instance)

        asyncio.run_coroutine_threadsafe(end(), self._gateway.loop).result(_TIMEOUT_SECONDS)
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while self.request("GET", f"/sandboxes?name={name}")[0]["state"] != "paused":
            assert time.monotonic() < deadline, f"the gateway did not detect that the machine of {name} ended"
            time.sleep(0.02)

    def write_file(self, name: str) -> None:
        """Write a file in a sandbox if the sandbox is running."""
        if self.request("GET", f"/sandboxes?name={name}&state=running"):
            self.request("POST", f"/sandboxes/{name}/exec", {"args": ["write", "/root/written", "something"]})

    def reset(self) -> None:
        """Reset all faults, and remove everything except the template."""
        self._forget_faults()
        self.failing_names, self.holds_builds = set(), False
        while any(each["buildStatus"] == "building" for each in self.request("GET", "/templates?limit=1000")):
            time.sleep(0.02)
        for sandbox in self.list_objects("sandboxes"):
            self.request("DELETE", f"/sandboxes/{sandbox['sandboxID']}")
        for snapshot in self.list_objects("snapshots"):
            self.request("DELETE", f"/snapshots/{snapshot['snapshotID']}")
        # A volume that was created from a snapshot must be removed before the volume of that snapshot.
        for volume in reversed(self.list_objects("volumes")):
            self.request("DELETE", f"/volumes/{volume['name']}?withSnapshots=true")
        for template in self.list_objects("templates"):
            if template["names"] != [TEMPLATE] or template["recipe"]["packages"] or template["recipe"]["setup"]:
                self.request("DELETE", f"/templates/{template['templateID']}")
        if TEMPLATE not in self.list_names("templates"):
            self._gateway.build_template(TEMPLATE)

    @property
    def _host(self) -> FaultyHost:
        host = self._gateway.host
        assert isinstance(host, FaultyHost)
        return host

    @property
    def failing_names(self) -> set[str]:
        return self._host.failing_names

    @failing_names.setter
    def failing_names(self, names: set[str]) -> None:
        self._host.failing_names = names

    @property
    def holds_builds(self) -> bool:
        return self._host.holds_builds

    @holds_builds.setter
    def holds_builds(self, value: bool) -> None:
        self._host.holds_builds = value

    # -- the proxy -----------------------------------------------------------------------------------------------------

    def respond(self, method: str, target: str, raw_body: bytes, key: str) -> tuple[int, Any, dict[str, str]]:
        """Return the status, the JSON data (None if there is no body) and the headers of the response."""
        time.sleep(self.delay_seconds)
        path, _, query = target.partition("?")
        with self._lock:
            self.calls.append((method, target))
            is_busy, self.requests_to_refuse = self.requests_to_refuse > 0, max(0, self.requests_to_refuse - 1)
        if path != "/health" and self.token and key != self.token:
            return 401, _make_error_body(401, "unauthorized", "this needs a key"), {}
        if path != "/health" and is_busy:
            return 429, _make_error_body(429, "busy", "too many requests at once: try again"), {"Retry-After": "0"}
        if self.intercept is not None and (intercepted := self.intercept(method, target)) is not None:
            return *intercepted, {}
        query_parameters = dict(parse_qsl(query))
        unknown_fields = self._api_fields.find_unknown_fields(
            method, path, query_parameters, json.loads(raw_body) if raw_body else {}
        )
        if unknown_fields:
            return 400, _make_error_body(400, "invalid", f"unknown: {', '.join(unknown_fields)}"), {}
        if "limit" in query_parameters:
            query_parameters["limit"] = str(min(int(query_parameters["limit"]), PAGE_SIZE))
        status, headers, body = self._forward(
            method, f"{path}?{urlencode(query_parameters)}" if query_parameters else path, raw_body
        )
        data = json.loads(body) if body else None
        if method == "GET" and isinstance(data, dict):
            self._remove_vanishing_object(path, data)
        if path == "/health" and self.version:
            data["version"] = self.version
        if self.rewrite is not None:
            status, data = self.rewrite(method, target, status, data)
        forwarded_header_names = ("Date", "Retry-After", "X-Next-Token")
        return status, data, {name: headers[name] for name in forwarded_header_names if headers[name] is not None}

    def _remove_vanishing_object(self, path: str, data: dict[str, Any]) -> None:
        for kind, id_field in (("sandboxes", "sandboxID"), ("snapshots", "snapshotID")):
            if re.fullmatch(rf"/{kind}/[^/]+", path) and data.get(id_field) in self.vanishing_ids:
                self.vanishing_ids.discard(data[id_field])
                self.request("DELETE", f"/{kind}/{data[id_field]}")

    def _forward(self, method: str, target: str, raw_body: bytes | None) -> tuple[int, Any, bytes]:
        idle_connection = getattr(self._thread_local, "connection", None)
        connection = idle_connection or _UnixConnection(str(self._gateway.socket))
        try:
            connection.request(
                method, target, raw_body or None, {"Content-Type": "application/json"} if raw_body else {}
            )
            response = connection.getresponse()
        except (http.client.HTTPException, ConnectionError):
            connection.close()
            self._thread_local.connection = None
            if idle_connection is None:
                raise
            # The gateway may have closed the connection because it was idle for too long.
            return self._forward(method, target, raw_body)
        self._thread_local.connection = connection
        return response.status, response.headers, response.read()


@contextlib.contextmanager
def running_gateway(**sections: dict[str, Any]) -> Iterator[FaultyGateway]:
    with tempfile.TemporaryDirectory(prefix="grove-faulty-") as root:
        gateway = FaultyGateway(Path(root), **sections)
        try:
            yield gateway
        finally:
            gateway.end()


@contextlib.contextmanager
def _serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _make_error_body(status: int, kind: str, message: str) -> dict[str, Any]:
    return {"code": status, "message": message, "error": message, "kind": kind, "blockers": []}


class _ApiFields:
    """The fields and query parameters in an OpenAPI document.

    The proxy rejects all other fields and parameters, although the gateway would not.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._paths = [(re.sub(r"\{[^}]+\}", "[^/]+", path), entry) for path, entry in document["paths"].items()]

    def find_unknown_fields(self, method: str, path: str, query: dict[str, Any], body: Any) -> list[str]:
        for pattern, entry in self._paths:
            operation = entry.get(method.lower())
            if operation and re.fullmatch(pattern, path):
                parameter_names = {each["name"] for each in operation.get("parameters", []) if each["in"] == "query"}
                media_type = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
                return sorted({*query} - parameter_names) + self._list_unknown_fields(
                    body, media_type.get("schema", {})
                )
        return []

    def _list_unknown_fields(self, value: Any, schema: dict[str, Any]) -> list[str]:
        """Return the fields of ``value`` that the schema does not define."""
        if "$ref" in schema:
            return self._list_unknown_fields(
                value, self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            )
        if "anyOf" in schema:
            json_type = {dict: "object", list: "array"}.get(type(value))
            candidates = [each for each in schema["anyOf"] if "$ref" in each or each.get("type") == json_type]
            return min((self._list_unknown_fields(value, each) for each in candidates), key=len, default=[])
        if isinstance(value, list):
            return [name for each in value for name in self._list_unknown_fields(each, schema.get("items", {}))]
        if not isinstance(value, dict) or "properties" not in schema:
            return []
        properties = schema["properties"]
        nested_fields = [
            name
            for key, each in value.items()
            if key in properties
            for name in self._list_unknown_fields(each, properties[key])
        ]
        return sorted(value.keys() - properties.keys()) + nested_fields


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("gateway", timeout=_TIMEOUT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gateway: FaultyGateway

    def _handle_request(self) -> None:
        raw_body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.gateway.connections_to_drop:
            self.gateway.connections_to_drop -= 1
            self.close_connection = True
            return
        key = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        status, data, headers = self.gateway.respond(self.command, self.path, raw_body, key)
        payload = b"" if data is None else json.dumps(data).encode()
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        # A client may have disconnected.
        with contextlib.suppress(OSError):
            self.wfile.write(payload)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle_request

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
