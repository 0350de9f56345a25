"""The data plane: requests to a port inside a sandbox, streamed both ways.

A request belongs to a sandbox when its Host is `{port}-{sandboxID}.{domain}`, or when it carries `E2b-Sandbox-Id`
and `E2b-Sandbox-Port`. Who is let through is said in ``access``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import anyio
import httpx
import websockets.datastructures
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from websockets.exceptions import InvalidHandshake

from sandbox_gateway.api import auth, websocket
from sandbox_gateway.api.access import AGENT_PORTS, SECRET_HEADERS, TOKEN_HEADER, Access, NotRunning, inner_token
from sandbox_gateway.api.errors import ClientGone, clip
from sandbox_gateway.api.heads import Head
from sandbox_gateway.api.limits import TooSlow
from sandbox_gateway.api.pools import CONNECT_SECONDS, SMALL_PIECE, Machine, Pools
from sandbox_gateway.api.requests import LONGEST_REF
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import BackendFailed, Conflict, Invalid, NotFound, Unsupported
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox, SandboxState

log = Logger("proxy")

_ID_HEADER, _PORT_HEADER = "e2b-sandbox-id", "e2b-sandbox-port"
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
_NOT_INWARD = _HOP_BY_HOP | SECRET_HEADERS | {_ID_HEADER, _PORT_HEADER, "expect", "host"}
# uvicorn writes a date of its own. `Alt-Svc` names ports of this address, which are not the service's to name.
_NOT_OUTWARD = _HOP_BY_HOP | {"date", "alt-svc"}
# Where the gateway's own address was asked, these would hold for it, and for all sandboxes that are reached so.
_NOT_OURS = frozenset({"set-cookie", "strict-transport-security", "clear-site-data", "public-key-pins"})
_COOKIE_DOMAIN = re.compile(rb";\s*domain\s*=\s*([^;\s]*)", re.IGNORECASE)
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS"})
_TIMEOUTS = {"connect": CONNECT_SECONDS, "read": None, "write": None, "pool": None}


class ProxyFailed(BackendFailed):
    status = 502


class NotPassedOn(Unsupported):
    status = 501


@dataclass(frozen=True)
class Target:
    """``ref``: the sandbox; ``port``: 1 to 65535 inside it; ``host``: as the service inside shall see it; ``by_host``:
    it was named by the Host header."""

    ref: str
    port: int
    host: str
    by_host: bool


class Addresses:
    """Tells which requests are for a sandbox."""

    def __init__(self, domain: str) -> None:
        self._host = re.compile(rf"(\d+)-([^.]+)\.{re.escape(domain.lower())}\.?(?::\d{{1,5}})?")

    def target(self, headers: Headers) -> Target | None:
        """The sandbox a request is for; None: it is for the gateway. Raises Invalid for an impossible port."""
        asked = headers.get("host", "")
        host = self._host.fullmatch(asked.lower())
        if host:
            return Target(host[2], _port(host[1]), asked, by_host=True)
        if _ID_HEADER in headers and _PORT_HEADER in headers:
            ref = headers[_ID_HEADER]
            if not 0 < len(ref) <= LONGEST_REF:
                raise Invalid(f"E2b-Sandbox-Id: an id or a name, of at most {LONGEST_REF} characters")
            port = _port(headers[_PORT_HEADER])
            return Target(ref, port, f"localhost:{port}", by_host=False)
        return None


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise Invalid(f"a port is a number from 1 to 65535 (got {clip(text, 40)!r})")
    return int(text)


@dataclass(frozen=True)
class Errand:
    """One request on its way: from whom it came, and where it goes."""

    scope: Scope
    receive: Receive
    send: Send
    target: Target
    sandbox: Sandbox
    address: str
    path: bytes
    """With its query."""
    headers: list[tuple[bytes, bytes]]
    """For the service inside."""

    @property
    def place(self) -> str:
        return f"port {self.target.port} of sandbox {self.sandbox.id}"


class DataPlane:
    """Takes what is for a sandbox out of the way of the control plane."""

    def __init__(self, app: ASGIApp, engine: Engine, keys: auth.Keys, addresses: Addresses, pools: Pools) -> None:
        self.app = app
        self.engine = engine
        self.keys = keys
        self.addresses = addresses
        self.pools = pools
        self.access = Access(engine, keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        target = self.addresses.target(headers) if scope["type"] in ("http", "websocket") else None
        if target is None:
            if scope["type"] == "websocket":
                raise Unsupported("the gateway itself has no WebSockets; address a port of a sandbox (docs/api.md)")
            await self.app(scope, receive, send)
            return
        scope["sandbox_gateway.route"] = "data plane"
        _proper(scope, headers)
        admission = self.access.admit(scope, headers, target.ref, target.port)
        sandbox = await self._awake(admission.sandbox)
        try:
            address, token = self.engine.endpoint(sandbox.id)
        except (Conflict, NotFound) as error:
            raise NotRunning.because(error) from None
        errand = Errand(
            scope,
            receive,
            send,
            target,
            sandbox,
            address,
            _path(scope, admission.query),
            self._inward(headers, target, token, signed=admission.query is not None),
        )
        with self.pools.use(sandbox) as machine:
            if scope["type"] == "websocket":
                await _websocket(errand, machine)
            else:
                await _http(errand, machine, self.engine.config.server.stalled_seconds, has_body=_has_body(headers))

    async def _awake(self, sandbox: Sandbox) -> Sandbox:
        """A paused sandbox whose creator asked for it is resumed by a request; all that come meanwhile wait for it."""
        if sandbox.state is SandboxState.PAUSED and sandbox.auto_resume:
            try:
                return await self.engine.resume(sandbox.id)
            except Conflict:
                pass
            except NotFound as error:
                raise NotRunning.because(error) from None
        try:
            return self.engine.sandbox(sandbox.id)
        except NotFound:
            raise NotRunning.gone(sandbox.id) from None

    def _inward(self, headers: Headers, target: Target, token: str, *, signed: bool) -> list[tuple[bytes, bytes]]:
        """The headers for the machine inside: none of the gateway's secrets, none of this connection's."""
        dropped = _NOT_INWARD | _named_by_connection(headers)
        # A signed URL is good for the user it names, and for no other.
        if signed or any(self._is_key(value) for value in headers.getlist("authorization")):
            dropped |= {"authorization"}
        kept = [(name, value) for name, value in headers.raw if _text(name) not in dropped]
        kept.insert(0, (b"host", target.host.encode("latin-1")))
        if target.port in AGENT_PORTS:
            kept.append((TOKEN_HEADER.encode(), inner_token(token, target.port).encode()))
        return kept

    def _is_key(self, authorization: str) -> bool:
        scheme, _, secret = authorization.partition(" ")
        return scheme.lower() == "bearer" and self.keys.find(secret.strip()) is not None


def _proper(scope: Scope, headers: Headers) -> None:
    """Raises Invalid or NotPassedOn for what is no request to a service."""
    if scope.get("method") == "CONNECT":
        raise NotPassedOn("CONNECT is not passed on: only requests and WebSockets are")
    if not scope.get("raw_path", b"/").startswith(b"/"):
        raise Invalid("the target of a request is a path: it begins with '/'")
    if scope["type"] == "http" and "upgrade" in _named_by_connection(headers):
        wanted = headers.get("upgrade", "").strip()
        # Who offers HTTP/2 takes an answer of HTTP/1.1, too.
        if wanted and wanted.lower() != "h2c":
            raise NotPassedOn(f"an upgrade to {clip(wanted, 40)!r} is not passed on: only WebSockets are")


async def _http(errand: Errand, machine: Machine, stalled_seconds: float, *, has_body: bool) -> None:
    body = _Body(errand.receive, stalled_seconds, expected=has_body)
    request = httpx.Request(
        errand.scope["method"],
        httpx.URL(scheme="http", host=errand.address, port=errand.target.port),
        headers=errand.headers,
        content=body if has_body else None,
        extensions={"timeout": _TIMEOUTS, "target": errand.path},
    )
    exchange = _Exchange(errand, machine, request, may_repeat=not has_body and request.method in _REPEATABLE)
    if await _unless_gone(exchange.run(), body, machine):
        return
    if not exchange.begun:
        raise _ended(errand)
    # Returning without the answer's end closes the client's connection, as it should be.
    log.info("data plane ended", sandbox=errand.sandbox.id, port=errand.target.port)


class _Exchange:
    """A request, and the answer to it as it comes."""

    def __init__(self, errand: Errand, machine: Machine, request: httpx.Request, *, may_repeat: bool) -> None:
        self.errand = errand
        self.machine = machine
        self.request = request
        self.may_repeat = may_repeat
        self.begun = False
        """Has the answer begun?"""

    async def run(self) -> None:
        """Raises ProxyFailed while there is still an answer to give."""
        response = await self._sent()
        try:
            if not 200 <= response.status_code < 600:
                raise ProxyFailed(
                    f"{self.errand.place} answered with status {response.status_code}, which is no answer"
                )
            headers = _outward(response.headers.raw, self.errand.target)
            self.begun = True
            await self.errand.send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            assert isinstance(response.stream, httpx.AsyncByteStream)
            async for chunk in response.stream:
                await self.errand.send({"type": "http.response.body", "body": chunk, "more_body": True})
                if len(chunk) < SMALL_PIECE:
                    await asyncio.sleep(0)
            await self.errand.send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.TransportError as error:
            # Returning without the answer's end closes the client's connection, as it should be.
            log.warning(
                "data plane broken", sandbox=self.errand.sandbox.id, port=self.errand.target.port, reason=str(error)
            )
        finally:
            await response.aclose()

    async def _sent(self) -> httpx.Response:
        place = self.errand.place
        self.request.extensions["trace"] = Head().trace
        try:
            return await self._once()
        except httpx.ConnectError:
            raise _closed(self.errand) from None
        except httpx.TimeoutException:
            raise ProxyFailed(f"{place} did not accept a connection in time") from None
        except httpx.TransportError as error:
            raise ProxyFailed(f"{place} broke the connection: {error}") from None

    async def _once(self) -> httpx.Response:
        try:
            return await self.machine.transport.handle_async_request(self.request)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            # The service may close a connection that was idle just as it is used again. Nothing was answered.
            if not self.may_repeat or not self.machine.lives():
                raise
        return await self.machine.transport.handle_async_request(self.request)


class _Body(httpx.AsyncByteStream):
    """The request's body as it comes in; ``expected`` False: there is none. Raises TooSlow when it stands still for
    ``seconds``."""

    def __init__(self, receive: Receive, seconds: float, *, expected: bool) -> None:
        self.receive = receive
        self.seconds = seconds
        self.read = asyncio.Event()
        """Set once there is nothing more to read but the client's going."""
        if not expected:
            self.read.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            more = True
            while more:
                message = await self._piece()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                more = message.get("more_body", False)
                if chunk := message.get("body", b""):
                    yield chunk
        finally:
            self.read.set()

    async def _piece(self) -> Message:
        try:
            async with asyncio.timeout(self.seconds):
                return await self.receive()
        except TimeoutError:
            raise TooSlow.stalled(self.seconds) from None


async def _unless_gone(work: Coroutine[Any, Any, None], body: _Body, machine: Machine) -> bool:
    """Await ``work``; it is cancelled when the client goes away (ClientGone), or the machine ends (False)."""
    scope = anyio.CancelScope()

    async def within() -> None:
        # From a scope's end the pool of connections shields what it clears up, from a task's it does not.
        with scope:
            await work

    worker, watcher = asyncio.ensure_future(within()), asyncio.ensure_future(_gone(body))
    try:
        await asyncio.wait({worker, watcher, machine.gone}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
            return True
        if machine.gone.done():
            return False
        raise ClientGone
    finally:
        watcher.cancel()
        if not worker.done():
            scope.cancel()
            await asyncio.wait({worker})


async def _gone(body: _Body) -> None:
    await body.read.wait()
    while (await body.receive())["type"] != "http.disconnect":
        pass


async def _websocket(errand: Errand, machine: Machine) -> None:
    tunnel = websocket.Tunnel(errand.receive, errand.send, machine)
    target = errand.target
    opening = asyncio.ensure_future(
        websocket.connect(errand.address, target.port, target.host, errand.path, errand.headers[1:], errand.scope)
    )
    try:
        inside = await tunnel.opened(opening)
    except websocket.Refused as refusal:
        response = refusal.response
        # The body is whole: it has another length where it came in chunks.
        headers = _outward(_raw(response.headers), target, {"content-length"})
        await errand.send({"type": "websocket.http.response.start", "status": response.status_code, "headers": headers})
        await errand.send({"type": "websocket.http.response.body", "body": bytes(response.body)})
        return
    except ConnectionRefusedError:
        raise _closed(errand) from None
    except TimeoutError:
        raise ProxyFailed(f"{errand.place} did not answer a WebSocket in time") from None
    except (OSError, InvalidHandshake) as error:
        raise ProxyFailed(f"{errand.place} does not speak WebSocket there: {error}") from None
    if inside is None:
        raise _ended(errand)
    assert inside.response is not None
    await tunnel.run(inside, _outward(_raw(inside.response.headers), target, websocket.OWN_HEADERS))


def _closed(errand: Errand) -> ProxyFailed:
    # E2B's clients look for "port is not open".
    return ProxyFailed(
        f"nothing listens on {errand.place}, the port is not open: start the service there, on all addresses"
    )


def _ended(errand: Errand) -> ProxyFailed:
    return ProxyFailed(f"sandbox {errand.sandbox.id} was rolled back, paused or ended during the request")


def _outward(raw: Iterable[tuple[bytes, bytes]], target: Target, more: Iterable[str] = ()) -> list[tuple[bytes, bytes]]:
    """The headers of the service inside, for the client; ``more`` are dropped, too."""
    headers = Headers(raw=[(name.lower(), value) for name, value in raw])
    dropped = _NOT_OUTWARD.union(_named_by_connection(headers), more)
    if not target.by_host:
        dropped |= _NOT_OURS
    if "transfer-encoding" in headers:
        # Of two lengths this is the one that holds.
        dropped |= {"content-length"}
    host = target.host.partition(":")[0].rstrip(".").lower()
    return [
        (name, value)
        for name, value in headers.raw
        if _text(name) not in dropped and not (name == b"set-cookie" and _too_wide(value, host))
    ]


def _too_wide(cookie: bytes, host: str) -> bool:
    """Is it for other sandboxes, too?"""
    return any(domain.lstrip(b".").lower() != host.encode() for domain in _COOKIE_DOMAIN.findall(cookie) if domain)


def _raw(headers: websockets.datastructures.Headers) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.raw_items()]


def _text(name: bytes) -> str:
    return name.decode("latin-1").lower()


def _named_by_connection(headers: Headers) -> set[str]:
    """Headers that `Connection` declares to be of this connection only."""
    return {word.strip().lower() for value in headers.getlist("connection") for word in value.split(",")}


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _path(scope: Scope, signed: bytes | None) -> bytes:
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    query: bytes = scope.get("query_string", b"") if signed is None else signed
    return path + b"?" + query if query else path
