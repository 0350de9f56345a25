"""Connections of the gateway to its sandboxes.

Agents obey the host without a token, because on the host nobody but the gateway can connect to them: the firewall lets
only marked connections through (`kvm_xfs/netns`). To mark one takes CAP_NET_ADMIN. So every connection of the gateway
into a sandbox is opened here.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TypeVar

MARK = 0x1078
"""Of the gateway's packets. It has no bit that Kubernetes, Calico, Cilium or Tailscale use in theirs."""

_SO_MARK = getattr(socket, "SO_MARK", None)
"""Linux only."""

_Protocol = TypeVar("_Protocol", bound=asyncio.BaseProtocol)


async def connect(address: str, port: int) -> socket.socket:
    """A connected socket that does not block. ``address``: an IPv4 address, in figures. Raises OSError."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        if _SO_MARK is not None:
            # Without the capability there is no firewall of ours, either.
            with contextlib.suppress(PermissionError):
                made.setsockopt(socket.SOL_SOCKET, _SO_MARK, MARK)
        await asyncio.get_running_loop().sock_connect(made, (address, port))
    except BaseException:
        made.close()
        raise
    return made


async def open_connection(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As asyncio.open_connection."""
    return await asyncio.open_connection(sock=await connect(address, port))


async def create_connection(
    protocol: Callable[[], _Protocol], address: str, port: int
) -> tuple[asyncio.Transport, _Protocol]:
    """As loop.create_connection."""
    return await asyncio.get_running_loop().create_connection(protocol, sock=await connect(address, port))
