"""An httpx transport to services inside sandboxes, with the gateway's own connections.

httpx has no options for opening connections, limiting the size of response heads or detecting unsolicited responses,
so this module overrides methods.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable

import anyio.abc
import anyio.lowlevel
import httpcore
import httpx
from httpcore._backends.anyio import AnyIOStream

from sandbox_gateway.api.data_plane.heads import CountingStream
from sandbox_gateway.hosts.connect import connect


class Transport(httpx.AsyncHTTPTransport):
    """A transport that opens connections with ``hosts.connect`` and whose streams count the bytes of response heads."""

    def __init__(self, tls: ssl.SSLContext, *, max_idle_connections: int, idle_seconds: float) -> None:
        super().__init__(verify=tls, trust_env=False)
        # httpx has no parameter for the backend, and sets socket options only after connecting.
        self._pool = _Pool(
            ssl_context=tls,
            max_connections=None,
            max_keepalive_connections=max_idle_connections,
            keepalive_expiry=idle_seconds,
            network_backend=_Backend(),
        )


class _Pool(httpcore.AsyncConnectionPool):
    def create_connection(self, origin: httpcore.Origin) -> httpcore.AsyncConnectionInterface:
        return _Connection(origin, keepalive_expiry=self._keepalive_expiry, network_backend=self._network_backend)


class _Connection(httpcore.AsyncHTTPConnection):
    """A connection that is closed instead of reused if the service sent more than one response to a request.

    Otherwise, the second response would be parsed as the response to the next request, which another client may send.
    """

    def has_expired(self) -> bool:
        return super().has_expired() or (self.is_idle() and self._has_unread_data())

    def _has_unread_data(self) -> bool:
        # httpcore has no public attribute for this.
        unread_data, _ = self._connection._h11_state.trailing_data  # type: ignore[union-attr]
        return bool(unread_data)


class _Backend(httpcore.AnyIOBackend):
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                stream = await anyio.abc.SocketStream.from_socket(await connect(host, port))
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        try:
            # The pool leaks a connection if its request is cancelled between this point and its first byte.
            await anyio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            await anyio.aclose_forcefully(stream)
            raise
        # anyio has no option for the size of reads.
        return CountingStream(AnyIOStream(stream), stream._transport)  # type: ignore[attr-defined]
