"""The data plane, which streams requests to ports inside sandboxes, and their responses back to the clients.

A request belongs to a sandbox when its Host is `{port}-{sandboxID}.{domain}`, when it carries `E2b-Sandbox-Id` and
`E2b-Sandbox-Port`, or when the sandbox's token signed its URL. `access.ports` authorizes requests. This module
does not use a proxy library: such libraries trust the service, and they pool connections by address. Here, services
are untrusted, and connections must close when the machine stops.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

import httpx
import websockets.datastructures
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from websockets.exceptions import InvalidHandshake

from sandbox_gateway.api.access import auth
from sandbox_gateway.api.access.forwarded import INTERNAL_HEADERS
from sandbox_gateway.api.access.ports import (
    AGENT_PORTS,
    SECRET_HEADERS,
    TOKEN_HEADER,
    NotRunning,
    PortAccess,
    derive_port_token,
)
from sandbox_gateway.api.data_plane import websocket
from sandbox_gateway.api.data_plane.heads import HeadByteCounter
from sandbox_gateway.api.data_plane.pools import CONNECT_SECONDS, MachineConnections, Pools
from sandbox_gateway.api.data_plane.streams import (
    HOP_BY_HOP_HEADERS,
    RequestBody,
    forward_response_body,
    has_body,
    lowercase_name,
    parse_connection_options,
    run_unless_interrupted,
)
from sandbox_gateway.api.dependencies import MAX_REF_LENGTH
from sandbox_gateway.api.errors import clip
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import BackendFailed, Conflict, Invalid, NotFound, Unsupported
from sandbox_gateway.hosts.connect import AGENT_PORT
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox, SandboxState

log = Logger("proxy")

_ID_HEADER, _PORT_HEADER = "e2b-sandbox-id", "e2b-sandbox-port"
# With the value `false`, the request does not resume a paused sandbox.
_RESUME_HEADER = "x-sandbox-auto-resume"
# E2B's client (2.26) also sends both headers with POST /sandboxes/ID/connect. The agent has none of these paths.
_CONTROL_PLANE_PATH_PATTERN = re.compile(r"/(?:v2/)?(?:sandboxes|snapshots|templates|volumes)(?:/|$)")
_OWN_HEADERS = SECRET_HEADERS | {_ID_HEADER, _PORT_HEADER, _RESUME_HEADER} | INTERNAL_HEADERS
_DROPPED_REQUEST_HEADERS = HOP_BY_HOP_HEADERS | _OWN_HEADERS | {"expect", "host"}
# uvicorn adds its own date. `Alt-Svc` would redirect clients to other ports at the gateway's address.
_DROPPED_RESPONSE_HEADERS = HOP_BY_HOP_HEADERS | {"date", "alt-svc"}
# If the Host header is the gateway's own address, these headers would apply to the gateway and all its sandboxes.
_HOST_WIDE_HEADERS = frozenset({"set-cookie", "strict-transport-security", "clear-site-data", "public-key-pins"})
# A browser that opens a signed URL must not run a sandbox's file as a page at the gateway's address.
_ISOLATION_HEADERS = {"content-security-policy": b"sandbox", "x-content-type-options": b"nosniff"}
_COOKIE_DOMAIN_PATTERN = re.compile(rb";\s*domain\s*=\s*([^;\s]*)", re.IGNORECASE)
_REPEATABLE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_TIMEOUTS = {"connect": CONNECT_SECONDS, "read": None, "write": None, "pool": None}


class ProxyFailed(BackendFailed):
    status = 502


class ForwardingUnsupported(Unsupported):
    status = 501


@dataclass(frozen=True)
class Target:
    """The sandbox and the port that a request is for."""

    ref: str
    """The id or name of the sandbox."""
    port: int
    host: str
    """The Host header of the request, or `localhost:PORT` if that header does not name the sandbox."""
    is_named_by_host: bool
    """Whether the client's Host header names the sandbox."""
    is_signed: bool = False
    """Whether only the signature of the URL identifies the sandbox."""


class AddressFormats:
    """The formats that requests use to specify a sandbox and a port."""

    def __init__(self, domain: str) -> None:
        self._host_pattern = re.compile(rf"(\d+)-([^.]+)\.{re.escape(domain.lower())}\.?(?::\d{{1,5}})?")

    def find_target(self, headers: Headers, path: str) -> Target | None:
        """Return the target of a request, or None if it is for the gateway itself. Raises Invalid."""
        host_header = headers.get("host", "")
        match = self._host_pattern.fullmatch(host_header.lower())
        if match:
            return Target(match[2], _parse_port(match[1]), host_header, is_named_by_host=True)
        if _ID_HEADER in headers and _PORT_HEADER in headers:
            ref = headers[_ID_HEADER]
            if not 0 < len(ref) <= MAX_REF_LENGTH:
                raise Invalid(
                    f"E2b-Sandbox-Id is {len(ref)} characters long: send an id or a name of 1 to {MAX_REF_LENGTH} "
                    "characters"
                )
            port = _parse_port(headers[_PORT_HEADER])
            if port == AGENT_PORT and _CONTROL_PLANE_PATH_PATTERN.match(path):
                return None
            return Target(ref, port, f"localhost:{port}", is_named_by_host=False)
        return None


def _parse_port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise Invalid(f"the port must be a number from 1 to 65535 (got {clip(text, 40)!r})")
    return int(text)


@dataclass(frozen=True)
class ServiceRequest:
    """One request from a client to a service."""

    scope: Scope
    receive: Receive
    send: Send
    target: Target
    sandbox: Sandbox
    address: str
    host: str
    """The Host header for the service."""
    path: bytes
    """The path with the query."""
    headers: list[tuple[bytes, bytes]]
    """The headers for the service."""

    @property
    def description(self) -> str:
        return f"port {self.target.port} of sandbox {self.sandbox.id}"


class Elsewhere(Protocol):
    """The sandboxes of other hosts of the fleet."""

    async def find_host(self, scope: Scope, ref: str | None) -> str | None:
        """Return the other host that a request is for, or None if it is for this one.

        ``ref``: the sandbox; None if the request names none, but perhaps has a signed URL.
        """

    async def forward(self, host: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a host answer a request. Raises GatewayError."""


class DataPlane:
    """Middleware that forwards requests for sandboxes to their ports, and all other requests to the control plane."""

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        keys: auth.Keys,
        addresses: AddressFormats,
        pools: Pools,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.app = app
        self.engine = engine
        self.keys = keys
        self.addresses = addresses
        self.pools = pools
        self.access = PortAccess(engine, keys)
        self.elsewhere = elsewhere

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        target = self.addresses.find_target(headers, scope["path"]) if scope["type"] in ("http", "websocket") else None
        if self.elsewhere and (host := await self.elsewhere.find_host(scope, target.ref if target else None)):
            _require_forwardable(scope, headers)
            await self.elsewhere.forward(host, scope, receive, send)
            return
        admission = self.access.admit_signed_url(scope) if target is None else None
        if admission is not None:
            target = Target(
                admission.sandbox.id, AGENT_PORT, f"localhost:{AGENT_PORT}", is_named_by_host=False, is_signed=True
            )
        if target is None:
            if scope["type"] == "websocket":
                raise Unsupported(
                    "the gateway itself has no WebSocket endpoints: connect to a port of a sandbox (docs/api.md)"
                )
            await self.app(scope, receive, send)
            return
        scope["sandbox_gateway.route"] = "data plane"
        _require_forwardable(scope, headers)
        admission = admission or self.access.admit(scope, headers, target.ref, target.port)
        may_resume = headers.get(_RESUME_HEADER, "").lower() != "false"
        sandbox = await self._find_running_sandbox(admission.sandbox, may_resume=may_resume)
        try:
            address, token = self.engine.agents.get_endpoint(sandbox.id)
        except (Conflict, NotFound) as error:
            raise NotRunning.from_error(error) from None
        host = _choose_host_for_service(target, sandbox)
        incoming_request = ServiceRequest(
            scope,
            receive,
            send,
            target,
            sandbox,
            address,
            host,
            _join_path_and_query(scope, admission.query),
            self._build_headers_for_service(headers, target.port, host, token, is_signed=admission.query is not None),
        )
        with self.pools.request_counted(sandbox) as machine:
            if scope["type"] == "websocket":
                await _forward_websocket(incoming_request, machine)
            else:
                await _forward_http(
                    incoming_request, machine, self.engine.config.server.stalled_seconds, has_body=has_body(headers)
                )

    async def _find_running_sandbox(self, sandbox: Sandbox, *, may_resume: bool) -> Sandbox:
        """Return the sandbox. Resume it first if it is paused, was created with autoResume, and ``may_resume`` is set.

        Concurrent requests wait for the sandbox to be resumed. Raises NotRunning if it has been removed.
        """
        if may_resume and sandbox.state is SandboxState.PAUSED and sandbox.auto_resume:
            try:
                return await self.engine.sandboxes.resume(sandbox.id)
            except Conflict:
                pass
            except NotFound as error:
                raise NotRunning.from_error(error) from None
        try:
            return self.engine.sandboxes.get(sandbox.id)
        except NotFound:
            raise NotRunning.create_for_missing_sandbox(sandbox.id) from None

    def _build_headers_for_service(
        self, headers: Headers, port: int, host: str, token: str, *, is_signed: bool
    ) -> list[tuple[bytes, bytes]]:
        """Return the request's headers to forward, without the gateway's secrets and connection-specific headers.

        Host becomes ``host``. A request to a port of the agent also gets the access token of that port.
        """
        dropped_names = _DROPPED_REQUEST_HEADERS | parse_connection_options(headers)
        # A signed URL is valid only for the user it names.
        if is_signed or any(self._has_api_key(value) for value in headers.getlist("authorization")):
            dropped_names |= {"authorization"}
        forwarded_headers = [(name, value) for name, value in headers.raw if lowercase_name(name) not in dropped_names]
        forwarded_headers.insert(0, (b"host", host.encode("latin-1")))
        if port in AGENT_PORTS:
            forwarded_headers.append((TOKEN_HEADER.encode(), derive_port_token(token, port).encode()))
        return forwarded_headers

    def _has_api_key(self, authorization: str) -> bool:
        scheme, _, secret = authorization.partition(" ")
        return scheme.lower() == "bearer" and self.keys.find(secret.strip()) is not None


def _choose_host_for_service(target: Target, sandbox: Sandbox) -> str:
    """Return the Host header for the service: the sandbox's ``mask_request_host``, or else the target's."""
    host_mask = sandbox.network.mask_request_host
    return (
        host_mask.replace("${PORT}", str(target.port)) if host_mask and target.port not in AGENT_PORTS else target.host
    )


def _require_forwardable(scope: Scope, headers: Headers) -> None:
    """Raise Invalid or ForwardingUnsupported for a request that cannot be forwarded to any service."""
    if scope.get("method") == "CONNECT":
        raise ForwardingUnsupported("the method CONNECT is not supported: use a different method, or a WebSocket")
    if not scope.get("raw_path", b"/").startswith(b"/"):
        raise Invalid("the request target must be a path that begins with '/'")
    if scope["type"] == "http" and "upgrade" in parse_connection_options(headers):
        protocol = headers.get("upgrade", "").strip()
        # A client that offers an upgrade to HTTP/2 accepts a response in HTTP/1.1.
        if protocol and protocol.lower() != "h2c":
            raise ForwardingUnsupported(
                f"an upgrade to {clip(protocol, 40)!r} is not supported: use a plain request or a WebSocket"
            )


async def _forward_http(
    incoming_request: ServiceRequest, machine: MachineConnections, stalled_seconds: float, *, has_body: bool
) -> None:
    body = RequestBody(incoming_request.receive, stalled_seconds, has_body=has_body)
    request = httpx.Request(
        incoming_request.scope["method"],
        httpx.URL(scheme="http", host=incoming_request.address, port=incoming_request.target.port),
        headers=incoming_request.headers,
        content=body if has_body else None,
        extensions={"timeout": _TIMEOUTS, "target": incoming_request.path},
    )
    exchange = _Exchange(
        incoming_request, machine, request, may_repeat=not has_body and request.method in _REPEATABLE_METHODS
    )
    if await run_unless_interrupted(exchange.run(), body, machine.end_future):
        return
    if not exchange.has_started:
        raise _create_machine_stopped_error(incoming_request)
    # Returning before the response is complete makes uvicorn close the client's connection.
    log.info("data plane connection ended", sandbox=incoming_request.sandbox.id, port=incoming_request.target.port)


class _Exchange:
    """A request and its response, which is forwarded as it arrives."""

    def __init__(
        self, incoming_request: ServiceRequest, machine: MachineConnections, request: httpx.Request, *, may_repeat: bool
    ) -> None:
        self.incoming_request = incoming_request
        self.machine = machine
        self.request = request
        self.may_repeat = may_repeat
        self.has_started = False
        """Whether the response to the client has started."""

    async def run(self) -> None:
        """Send the request and forward the response. Raises ProxyFailed if this fails before the response starts."""
        response = await self._send()
        try:
            if not 200 <= response.status_code < 600:
                raise ProxyFailed(
                    f"{self.incoming_request.description} responded with status {response.status_code}, which is "
                    "not a valid final status: check the service there"
                )
            headers = _build_headers_for_client(response.headers.raw, self.incoming_request.target)
            self.has_started = True
            await self.incoming_request.send(
                {"type": "http.response.start", "status": response.status_code, "headers": headers}
            )
            await forward_response_body(response, self.incoming_request.send)
        except httpx.TransportError as error:
            # Returning before the response is complete makes uvicorn close the client's connection.
            log.warning(
                "data plane connection lost",
                sandbox=self.incoming_request.sandbox.id,
                port=self.incoming_request.target.port,
                reason=str(error),
            )
        finally:
            await response.aclose()

    async def _send(self) -> httpx.Response:
        description = self.incoming_request.description
        self.request.extensions["trace"] = HeadByteCounter().trace
        try:
            return await self._send_once()
        except httpx.ConnectError:
            raise _create_port_closed_error(self.incoming_request) from None
        except httpx.TimeoutException:
            raise ProxyFailed(
                f"{description} did not accept a connection in time: check that the service there is running"
            ) from None
        except httpx.TransportError as error:
            raise ProxyFailed(
                f"{description} closed the connection unexpectedly ({error}): check the log of the service there"
            ) from None

    async def _send_once(self) -> httpx.Response:
        try:
            return await self.machine.transport.handle_async_request(self.request)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            # The service may close an idle connection just as it is reused; in that case it has not responded yet.
            if not self.may_repeat or not self.machine.is_alive():
                raise
        return await self.machine.transport.handle_async_request(self.request)


async def _forward_websocket(incoming_request: ServiceRequest, machine: MachineConnections) -> None:
    tunnel = websocket.Tunnel(incoming_request.receive, incoming_request.send, machine.end_future)
    target = incoming_request.target
    connection_task = asyncio.ensure_future(
        websocket.connect(
            incoming_request.address,
            target.port,
            incoming_request.host,
            incoming_request.path,
            incoming_request.headers[1:],
            incoming_request.scope,
        )
    )
    try:
        service_connection = await tunnel.wait_until_open(connection_task)
    except websocket.HandshakeRefused as refusal:
        response = refusal.response
        # The body is sent as a whole, so its length is new if it arrived in chunks.
        headers = _build_headers_for_client(_encode_headers(response.headers), target, {"content-length"})
        await incoming_request.send(
            {"type": "websocket.http.response.start", "status": response.status_code, "headers": headers}
        )
        await incoming_request.send({"type": "websocket.http.response.body", "body": bytes(response.body)})
        return
    except ConnectionRefusedError:
        raise _create_port_closed_error(incoming_request) from None
    except TimeoutError:
        raise ProxyFailed(
            f"{incoming_request.description} did not complete the WebSocket handshake in time: check the service there"
        ) from None
    except (OSError, InvalidHandshake) as error:
        raise ProxyFailed(
            f"{incoming_request.description} did not accept the WebSocket connection ({error}): check the service there"
        ) from None
    if service_connection is None:
        raise _create_machine_stopped_error(incoming_request)
    assert service_connection.response is not None
    await tunnel.run(
        service_connection,
        _build_headers_for_client(
            _encode_headers(service_connection.response.headers), target, websocket.HANDSHAKE_HEADERS
        ),
    )


def _create_port_closed_error(incoming_request: ServiceRequest) -> ProxyFailed:
    # E2B's clients search the message for "port is not open".
    return ProxyFailed(
        f"nothing is listening on {incoming_request.description}, so the port is not open: start the service there, "
        "and make it listen on all addresses"
    )


def _create_machine_stopped_error(incoming_request: ServiceRequest) -> ProxyFailed:
    return ProxyFailed(
        f"sandbox {incoming_request.sandbox.id} was rolled back, paused or removed during the request: "
        "send the request again"
    )


def _build_headers_for_client(
    raw_headers: Iterable[tuple[bytes, bytes]], target: Target, unwanted_names: Iterable[str] = ()
) -> list[tuple[bytes, bytes]]:
    """Return the service's headers, without connection-specific headers and those in ``unwanted_names``.

    The response to a signed URL also gets headers that isolate it from other pages at the gateway's address.
    """
    headers = Headers(raw=[(name.lower(), value) for name, value in raw_headers])
    dropped_names = _DROPPED_RESPONSE_HEADERS.union(parse_connection_options(headers), unwanted_names)
    if not target.is_named_by_host:
        dropped_names |= _HOST_WIDE_HEADERS
    if target.is_signed:
        dropped_names |= _ISOLATION_HEADERS.keys()
    if "transfer-encoding" in headers:
        # Transfer-Encoding overrides Content-Length (RFC 9112, 6.3).
        dropped_names |= {"content-length"}
    host = target.host.partition(":")[0].rstrip(".").lower()
    isolation_headers = (
        [(name.encode(), value) for name, value in _ISOLATION_HEADERS.items()] if target.is_signed else []
    )
    return isolation_headers + [
        (name, value)
        for name, value in headers.raw
        if lowercase_name(name) not in dropped_names
        and not (name == b"set-cookie" and _is_for_other_hosts(value, host))
    ]


def _is_for_other_hosts(cookie: bytes, host: str) -> bool:
    """Return whether the Domain attribute of a cookie includes other hosts, that is, other sandboxes."""
    return any(
        domain.lstrip(b".").lower() != host.encode() for domain in _COOKIE_DOMAIN_PATTERN.findall(cookie) if domain
    )


def _encode_headers(headers: websockets.datastructures.Headers) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.raw_items()]


def _join_path_and_query(scope: Scope, signed_query: bytes | None) -> bytes:
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope.get("query_string", b"") if signed_query is None else signed_query
    return path + b"?" + query if query else path
