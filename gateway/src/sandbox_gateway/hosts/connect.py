"""Open the gateway's connections to its sandboxes.

On `kvm_xfs`, agents accept requests from the host without a token, because only the gateway can connect to them from
the host: the firewall accepts only marked connections (`kvm_xfs/network/rules`), and marking one requires
CAP_NET_ADMIN. So all connections from the gateway to sandboxes are opened here.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TypeVar

AGENT_PORT, CODE_PORT = 49983, 49999
"""Ports of the agent and of its code interpreter in every sandbox."""

MARK = 0x1078
"""The firewall mark of the gateway's packets. It shares no bits with the marks of Kubernetes, Calico, Cilium and
Tailscale.
"""

_SO_MARK = getattr(socket, "SO_MARK", None)
"""The socket option SO_MARK, or None on systems other than Linux."""

_Protocol = TypeVar("_Protocol", bound=asyncio.BaseProtocol)


async def connect(address: str, port: int) -> socket.socket:
    """Return a connected, non-blocking socket. ``address``: a numeric IPv4 address. Raises OSError on failure."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        if _SO_MARK is not None:
            # A gateway that lacks the capability cannot have set up the firewall either.
            with contextlib.suppress(PermissionError):
                connection.setsockopt(socket.SOL_SOCKET, _SO_MARK, MARK)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException:
        connection.close()
        raise
    return connection


async def open_connection(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and return its streams, like asyncio.open_connection."""
    return await asyncio.open_connection(sock=await connect(address, port))


async def create_connection(
    protocol: Callable[[], _Protocol], address: str, port: int
) -> tuple[asyncio.Transport, _Protocol]:
    """Open a connection for a protocol, like loop.create_connection."""
    return await asyncio.get_running_loop().create_connection(protocol, sock=await connect(address, port))
