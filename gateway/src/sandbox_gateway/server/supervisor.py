"""Notify the service manager (systemd) that the gateway is ready, stopping, or still alive."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import socket
from collections.abc import AsyncIterator

_EXTENSION_INTERVAL_SECONDS = 10.0
_EXTENSION_SECONDS = 60.0


def notify(state: str) -> None:
    """Send ``state`` to the socket in the environment variable ``NOTIFY_SOCKET``, if it is set."""
    socket_address = os.environ.get("NOTIFY_SOCKET", "")
    if not socket_address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.setblocking(False)
        channel.connect("\0" + socket_address[1:] if socket_address.startswith("@") else socket_address)
        channel.send(state.encode())


@contextlib.asynccontextmanager
async def watchdog_notified() -> AsyncIterator[None]:
    """Inside this context, send keepalives at intervals of half the watchdog timeout.

    If the event loop hangs, the service manager kills the process with SIGABRT. On this signal, the process prints the
    stack of each thread.
    """
    interval = _watchdog_seconds() / 2
    if not interval:
        yield
        return
    faulthandler.enable()
    async with _notify_repeatedly("WATCHDOG=1", interval):
        yield


@contextlib.asynccontextmanager
async def start_timeout_extended() -> AsyncIterator[None]:
    """Inside this context, repeatedly extend the start timeout, because a start with many sandboxes is slow."""
    async with _notify_repeatedly(f"EXTEND_TIMEOUT_USEC={_EXTENSION_SECONDS * 1e6:.0f}", _EXTENSION_INTERVAL_SECONDS):
        yield


def _watchdog_seconds() -> float:
    """Return the service manager's watchdog timeout in seconds, or 0 if it does not watch this process."""
    microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not (microseconds.isascii() and microseconds.isdigit()) or pid not in ("", str(os.getpid())):
        return 0
    return int(microseconds) / 1e6


@contextlib.asynccontextmanager
async def _notify_repeatedly(state: str, interval: float) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            await asyncio.sleep(interval)
            notify(state)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
