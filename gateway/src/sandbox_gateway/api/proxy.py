"""The data plane: requests to a port inside a sandbox, streamed both ways.

A request belongs to a sandbox when its Host is `{port}-{sandboxID}.{domain}`, or when it carries `E2b-Sandbox-Id`
and `E2b-Sandbox-Port`. It is let through for an API key of scope exec, or for the sandbox's own access token.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import ssl
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sandbox_gateway.api import auth
from sandbox_gateway.api.errors import ClientGone, clip
from sandbox_gateway.api.requests import LONGEST_REF
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import BackendFailed, Conflict, Invalid, NotFound
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox, SandboxState

log = Logger("proxy")

AGENT_PORTS = frozenset({49983})
"""Ports of our own agent: they, and they alone, get the access token."""
CONNECT_SECONDS = 10.0
IDLE_CONNECTIONS = 16
IDLE_SECONDS = 30.0

_ID_HEADER, _PORT_HEADER, _TOKEN_HEADER = "e2b-sandbox-id", "e2b-sandbox-port", "x-access-token"
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


class ProxyFailed(BackendFailed):
    status = 502


@dataclass(frozen=True)
class Target:
    """``ref``: the sandbox; ``port``: 1 to 65535 inside it; ``by_host``: named by the Host header."""

    ref: str
    port: int
    by_host: bool


class Addresses:
    """Tells which requests are for a sandbox."""

    def __init__(self, domain: str) -> None:
        self._host = re.compile(rf"(\d+)-([^.]+)\.{re.escape(domain.lower())}\.?(?::\d+)?")

    def target(self, headers: Headers) -> Target | None:
        """The sandbox a request is for; None: it is for the gateway. Raises Invalid for an impossible port."""
        host = self._host.fullmatch(headers.get("host", "").lower())
        if host:
            return Target(host[2], _port(host[1]), by_host=True)
        if _ID_HEADER in headers and _PORT_HEADER in headers:
            ref = headers[_ID_HEADER]
            if not 0 < len(ref) <= LONGEST_REF:
                raise Invalid(f"E2b-Sandbox-Id: an id or a name, of at most {LONGEST_REF} characters")
            return Target(ref, _port(headers[_PORT_HEADER]), by_host=False)
        return None


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise Invalid(f"a port is a number from 1 to 65535 (got {clip(text, 40)!r})")
    return int(text)


class Pools:
    """Connections to sandboxes, kept for each machine (not sandbox): they end with it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._pools: dict[str, httpx.AsyncHTTPTransport] = {}
        self._watcher: asyncio.Task[None] | None = None

    def of(self, sandbox: Sandbox) -> httpx.AsyncHTTPTransport:
        """The pool of the machine ``sandbox`` is now. The machine inside speaks plain HTTP; TLS is never used."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        pool = self._pools.get(sandbox.instance)
        if pool is None:
            limits = httpx.Limits(
                max_connections=None, max_keepalive_connections=IDLE_CONNECTIONS, keepalive_expiry=IDLE_SECONDS
            )
            pool = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)
            self._pools[sandbox.instance] = pool
        return pool

    async def _watch(self) -> None:
        async for _ in self._engine.events.subscribe():
            await self.drop_ended()

    async def drop_ended(self) -> None:
        """Close the connections to machines that no sandbox runs on any more."""
        running = {one.instance for one in self._engine.sandboxes() if one.state is SandboxState.RUNNING}
        for instance in self._pools.keys() - running:
            await self._drop(instance)

    async def _drop(self, instance: str) -> None:
        pool = self._pools.pop(instance, None)
        if pool is not None:
            await pool.aclose()

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        for instance in list(self._pools):
            await self._drop(instance)


class DataPlane:
    """Takes what is for a sandbox out of the way of the control plane."""

    def __init__(self, app: ASGIApp, engine: Engine, keys: auth.Keys, addresses: Addresses, pools: Pools) -> None:
        self.app = app
        self.engine = engine
        self.keys = keys
        self.addresses = addresses
        self.pools = pools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        target = self.addresses.target(headers) if scope["type"] == "http" else None
        if target is None:
            await self.app(scope, receive, send)
            return
        scope["sandbox_gateway.route"] = "data plane"
        by_key = self._authorised_by_key(scope, headers)
        if not by_key and _TOKEN_HEADER not in headers:
            raise auth.unauthorized(scope, self.keys)
        sandbox = self._find(target, scope, by_key)
        if not by_key and not self._has_token(sandbox, headers):
            raise auth.unauthorized(scope, self.keys)
        sandbox = await self._awake(sandbox)
        address, token = self.engine.endpoint(sandbox.id)
        body = _Body(receive, expected=_has_body(headers))
        request = httpx.Request(
            scope["method"],
            httpx.URL(scheme="http", host=address, port=target.port),
            headers=self._inward(headers, target, token if by_key else ""),
            content=body if _has_body(headers) else None,
            extensions={
                "timeout": {"connect": CONNECT_SECONDS, "read": None, "write": None, "pool": None},
                "target": _target(scope),
            },
        )
        await _unless_gone(self._exchange(request, sandbox, target.port, send), body)

    def _authorised_by_key(self, scope: Scope, headers: Headers) -> bool:
        caller = auth.identify(scope, self.keys)
        if caller is None:
            return False
        if caller.permission < auth.Permission.EXEC and _TOKEN_HEADER in headers:
            return False
        auth.require(caller, auth.Permission.EXEC)
        return True

    def _find(self, target: Target, scope: Scope, by_key: bool) -> Sandbox:
        """Without a key, a sandbox that is not there looks like a wrong token."""
        try:
            return self.engine.sandbox(target.ref)
        except NotFound:
            if by_key:
                raise
            raise auth.unauthorized(scope, self.keys) from None

    def _has_token(self, sandbox: Sandbox, headers: Headers) -> bool:
        token = self.engine.access_token(sandbox)
        return hmac.compare_digest(auth.digest(headers[_TOKEN_HEADER]), auth.digest(token))

    async def _awake(self, sandbox: Sandbox) -> Sandbox:
        """A paused sandbox whose creator asked for it is resumed by a request."""
        if sandbox.state is SandboxState.PAUSED and sandbox.auto_resume:
            try:
                return await self.engine.resume(sandbox.id)
            except Conflict:
                return self.engine.sandbox(sandbox.id)
        return sandbox

    def _inward(self, headers: Headers, target: Target, token: str) -> list[tuple[bytes, bytes]]:
        """The headers for the machine inside: none of the gateway's secrets, none of this connection's."""
        dropped = _HOP_BY_HOP | _named_by_connection(headers) | {"x-api-key", _ID_HEADER, _PORT_HEADER, "expect"}
        if target.port not in AGENT_PORTS or token:
            dropped |= {_TOKEN_HEADER}
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.keys.find(secret.strip()):
            dropped |= {"authorization"}
        if not target.by_host:
            dropped |= {"host"}
        kept = [(name, value) for name, value in headers.raw if _text(name) not in dropped]
        if not target.by_host:
            kept.insert(0, (b"host", f"localhost:{target.port}".encode()))
        if token and target.port in AGENT_PORTS:
            kept.append((_TOKEN_HEADER.encode(), token.encode()))
        return kept

    async def _exchange(self, request: httpx.Request, sandbox: Sandbox, port: int, send: Send) -> None:
        """Send ``request`` and stream back what comes. Raises ProxyFailed while there is still an answer to give."""
        try:
            response = await self.pools.of(sandbox).handle_async_request(request)
        except httpx.ConnectError:
            raise ProxyFailed(
                f"nothing listens on port {port} of sandbox {sandbox.id}: start the service there, on all addresses"
            ) from None
        except httpx.TimeoutException:
            raise ProxyFailed(f"sandbox {sandbox.id} did not accept a connection to port {port} in time") from None
        except httpx.TransportError as error:
            raise ProxyFailed(f"port {port} of sandbox {sandbox.id} broke the connection: {error}") from None
        try:
            await _outward(response, send)
        except httpx.TransportError as error:
            # The answer has begun: returning without its end closes the client's connection, as it should be.
            log.warning("data plane broken", sandbox=sandbox.id, port=port, reason=str(error))
        finally:
            await response.aclose()


class _Body(httpx.AsyncByteStream):
    """The request's body as it comes in; ``expected`` False: there is none."""

    def __init__(self, receive: Receive, *, expected: bool) -> None:
        self.receive = receive
        self.read = asyncio.Event()
        """Set once there is nothing more to read but the client's going."""
        if not expected:
            self.read.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            more = True
            while more:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                more = message.get("more_body", False)
                if chunk := message.get("body", b""):
                    yield chunk
        finally:
            self.read.set()


async def _unless_gone(work: Coroutine[Any, Any, None], body: _Body) -> None:
    """Await ``work``; it is cancelled when the client goes away."""
    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_gone(body))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        worker.result()
    finally:
        watcher.cancel()
        if not worker.done():
            worker.cancel()
            await asyncio.wait({worker})


async def _gone(body: _Body) -> None:
    await body.read.wait()
    while (await body.receive())["type"] != "http.disconnect":
        pass


async def _outward(response: httpx.Response, send: Send) -> None:
    named = _named_by_connection(Headers(raw=response.headers.raw))
    # uvicorn writes a date of its own.
    dropped = _HOP_BY_HOP | named | {"date"}
    headers = [(name.lower(), value) for name, value in response.headers.raw if _text(name) not in dropped]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for chunk in response.stream:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _text(name: bytes) -> str:
    return name.decode("latin-1").lower()


def _named_by_connection(headers: Headers) -> set[str]:
    """Headers that `Connection` declares to be of this connection only."""
    return {word.strip().lower() for value in headers.getlist("connection") for word in value.split(",")}


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _target(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope.get("query_string", b"")
    return path + b"?" + query if query else path
