"""What a service manager that asked for it (systemd) is told: the gateway is ready, it stops, its event loop turns."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import socket
from collections.abc import AsyncIterator

_START_EVERY = 10.0
_START_LASTS = 60.0


def notify(state: str) -> None:
    """Send ``state`` to ``NOTIFY_SOCKET``, where there is one."""
    target = os.environ.get("NOTIFY_SOCKET", "")
    if not target:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.setblocking(False)
        channel.connect("\0" + target[1:] if target.startswith("@") else target)
        channel.send(state.encode())


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[None]:
    """Report at half of the watchdog's time that the event loop turns; a loop that hangs is ended by the manager.

    The signal that ends it (SIGABRT) prints where each thread hangs.
    """
    interval = _watchdog_seconds() / 2
    if not interval:
        yield
        return
    faulthandler.enable()
    async with _repeated("WATCHDOG=1", interval):
        yield


@contextlib.asynccontextmanager
async def starting() -> AsyncIterator[None]:
    """A start that takes long, as with very many sandboxes, is not given up as long as the event loop turns."""
    async with _repeated(f"EXTEND_TIMEOUT_USEC={_START_LASTS * 1e6:.0f}", _START_EVERY):
        yield


def _watchdog_seconds() -> float:
    """The time that the manager waits for a sign of life; 0 where it does not watch this process."""
    microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not (microseconds.isascii() and microseconds.isdigit()) or pid not in ("", str(os.getpid())):
        return 0
    return int(microseconds) / 1e6


@contextlib.asynccontextmanager
async def _repeated(state: str, interval: float) -> AsyncIterator[None]:
    async def repeat() -> None:
        while True:
            await asyncio.sleep(interval)
            notify(state)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
