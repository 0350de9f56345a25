"""Connections to the other gateways of the fleet, over mutual TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import httpx

from sandbox_gateway.errors import Unavailable
from sandbox_gateway.fleet.records import MemberRecord
from sandbox_gateway.fleet.view import FleetView

_CONNECT_SECONDS = 4.0
_ANSWER_SECONDS = 20.0
"""Maximum time for a short request that this gateway sends for itself."""
_PROBE_SECONDS = 5.0
"""How often a host that carries out a request is asked whether it still answers, and how long that may take."""
_MAX_FAILED_PROBES = 2
_MAX_RESPONSE_BYTES = 64 << 20
_SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        # A host that loses its power does not close its connections.
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]

_Address = tuple[str, int]
_Result = TypeVar("_Result")


class HostUnavailable(Unavailable):
    """The gateway of another host does not answer."""


@dataclass(frozen=True)
class Answer:
    """The whole response of another gateway."""

    host: str
    status: int
    headers: httpx.Headers
    body: bytes


@dataclass(frozen=True)
class _Watch:
    task: asyncio.Future[None]
    futures: set[asyncio.Future[None]] = field(default_factory=set)


class Peers:
    def __init__(self, view: FleetView, tls: ssl.SSLContext) -> None:
        self._view = view
        self.tls = tls
        self._transport = httpx.AsyncHTTPTransport(
            verify=tls,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=30),
            socket_options=_SOCKET_OPTIONS,
        )
        self._watches: dict[str, _Watch] = {}
        """The hosts that carry out requests at the moment."""

    async def close(self) -> None:
        await self._transport.aclose()

    def get_member(self, host: str) -> MemberRecord:
        """Return the record of a host's gateway. Raises HostUnavailable if it does not run."""
        member = self._view.members.get(host)
        if member is None:
            raise HostUnavailable(
                f"the object is on host {host!r}, whose gateway does not run at the moment: start it, or try again "
                "later"
            )
        return member

    def split_address(self, host: str) -> _Address:
        name, _, port = self.get_member(host).address.rpartition(":")
        return name.strip("[]"), int(port)

    @contextlib.contextmanager
    def watched(self, host: str) -> Iterator[asyncio.Future[None]]:
        """Yield a future that is done when the gateway of a host has stopped answering.

        A request may take as long as it wants, such as the capture of a large memory. But a gateway that hangs, or a
        host whose network is gone, must not keep its clients waiting. Whether the host is a member does not matter:
        while etcd is away, nothing that runs ends. Raises HostUnavailable if its gateway does not run.
        """
        watch = self._watches.get(host)
        if watch is None:
            address = self.split_address(host)
            watch = self._watches[host] = _Watch(asyncio.ensure_future(self._probe(host, address)))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch.futures.add(future)
        try:
            yield future
        finally:
            watch.futures.discard(future)
            future.cancel()
            if not watch.futures:
                self._watches.pop(host).task.cancel()

    async def _probe(self, host: str, address: _Address) -> None:
        failure_count = 0
        while True:
            await asyncio.sleep(_PROBE_SECONDS)
            try:
                async with asyncio.timeout(_PROBE_SECONDS):
                    async with self._opened_at(host, address, "GET", b"/health", [], None, None):
                        pass
                failure_count = 0
            except (HostUnavailable, TimeoutError):
                failure_count += 1
            if failure_count >= _MAX_FAILED_PROBES:
                for future in [*self._watches[host].futures]:
                    if not future.done():
                        future.set_result(None)

    @contextlib.asynccontextmanager
    async def open(
        self,
        host: str,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: httpx.AsyncByteStream | bytes | None,
        *,
        seconds: float | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Send a request to a host, and yield its response, whose body is read with ``response.stream``.

        ``target``: path and query, as sent by the client. ``seconds``: how long the host may stay silent; None: for as
        long as it wants. Raises HostUnavailable.
        """
        address = self.split_address(host)
        async with self._opened_at(host, address, method, target, headers, body, seconds) as response:
            yield response

    @contextlib.asynccontextmanager
    async def _opened_at(
        self,
        host: str,
        address: _Address,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: httpx.AsyncByteStream | bytes | None,
        seconds: float | None,
    ) -> AsyncIterator[httpx.Response]:
        name, port = address
        if body is None:
            headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
        timeouts = {"connect": _CONNECT_SECONDS, "read": seconds, "write": seconds, "pool": None}
        request = httpx.Request(
            method,
            httpx.URL(scheme="https", host=name, port=port),
            headers=[*headers],
            content=body,
            extensions={"timeout": timeouts, "target": target},
        )
        try:
            response = await self._transport.handle_async_request(request)
        except httpx.TransportError as error:
            raise self.create_error(host, error) from None
        try:
            yield response
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()

    async def request(
        self,
        host: str,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes | None = None,
        *,
        seconds: float | None = _ANSWER_SECONDS,
    ) -> Answer:
        """Send a request to a host, and return its whole response. Raises HostUnavailable.

        ``seconds``: how long the host may stay silent; None: as long as its gateway answers other requests.
        """
        exchange = self._exchange(host, method, target, headers, body, seconds)
        return await (exchange if seconds is not None else self.run_while_answering(host, exchange))

    async def run_while_answering(self, host: str, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of ``work``. If the host's gateway stops answering, cancel it. Raises HostUnavailable."""
        with self.watched(host) as silence:
            task = asyncio.ensure_future(work)
            try:
                tasks: set[asyncio.Future[Any]] = {task, silence}
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    raise self.create_silence_error(host)
                return task.result()
            finally:
                task.cancel()
                await asyncio.wait({task})

    async def _exchange(
        self,
        host: str,
        method: str,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes | None,
        seconds: float | None,
    ) -> Answer:
        try:
            async with self.open(host, method, target, headers, body, seconds=seconds) as response:
                assert isinstance(response.stream, httpx.AsyncByteStream)
                pieces, size = [], 0
                async for piece in response.stream:
                    pieces.append(piece)
                    size += len(piece)
                    if size > _MAX_RESPONSE_BYTES:
                        raise HostUnavailable(
                            f"the response from host {host!r} exceeds {_MAX_RESPONSE_BYTES >> 20} MiB: request less"
                        )
                return Answer(host, response.status_code, response.headers, b"".join(pieces))
        except httpx.TransportError as error:
            raise self.create_error(host, error) from None

    @staticmethod
    def create_silence_error(host: str) -> HostUnavailable:
        return HostUnavailable(
            f"the gateway of host {host!r} no longer answers. It may still complete the request: check the result "
            "before you repeat it"
        )

    def create_error(self, host: str, error: Any) -> HostUnavailable:
        if isinstance(error, httpx.ConnectTimeout | httpx.ReadTimeout | httpx.WriteTimeout):
            reason = "no answer in time"
        else:
            reason = str(error) or type(error).__name__
        return HostUnavailable(f"the gateway of host {host!r} does not answer ({reason}): try again later")
