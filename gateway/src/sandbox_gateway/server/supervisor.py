"""Notify the service manager (systemd) that the gateway is ready, stopping, or still alive."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import socket
from collections.abc import AsyncIterator

_START_INTERVAL = 10.0
_START_EXTENSION = 60.0


def notify(state: str) -> None:
    """Send ``state`` to ``NOTIFY_SOCKET``, if it is set."""
    target = os.environ.get("NOTIFY_SOCKET", "")
    if not target:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.setblocking(False)
        channel.connect("\0" + target[1:] if target.startswith("@") else target)
        channel.send(state.encode())


@contextlib.asynccontextmanager
async def watchdog_notified() -> AsyncIterator[None]:
    """Send a keepalive at half the watchdog's interval. The service manager kills a process whose event loop hangs.

    The signal that it sends (SIGABRT) makes the process print the stack of each thread.
    """
    interval = _watchdog_seconds() / 2
    if not interval:
        yield
        return
    faulthandler.enable()
    async with _notify_repeatedly("WATCHDOG=1", interval):
        yield


@contextlib.asynccontextmanager
async def start_extended() -> AsyncIterator[None]:
    """Extend the start timeout while the event loop is alive, because a start with many sandboxes is slow."""
    async with _notify_repeatedly(f"EXTEND_TIMEOUT_USEC={_START_EXTENSION * 1e6:.0f}", _START_INTERVAL):
        yield


def _watchdog_seconds() -> float:
    """Return the service manager's watchdog timeout in seconds; 0 if it does not watch this process."""
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
