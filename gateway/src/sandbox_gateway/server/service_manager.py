"""Notify the service manager (systemd) that the gateway is ready, stopping, or still alive.

Service managers without such notifications, such as FreeBSD's daemon(8), restart the gateway if it exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import os
import socket
from collections.abc import AsyncIterator, Callable

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
    """Inside this context, tell the watchdog that the event loop is running, at intervals of half its timeout.

    If the event loop hangs, the process prints the stack of each thread and exits, because the service manager sends it
    SIGABRT. If ``WATCHDOG_USEC`` is set but ``NOTIFY_SOCKET`` is not, a thread makes the process exit with status 1.
    """
    seconds = _read_watchdog_seconds()
    if not seconds:
        yield
        return
    if os.environ.get("NOTIFY_SOCKET"):
        faulthandler.enable()
        async with _action_repeated(lambda: notify("WATCHDOG=1"), seconds / 2):
            yield
        return
    # This thread is written in C, so it also runs if a call never releases the GIL.
    restart_timer = functools.partial(faulthandler.dump_traceback_later, seconds, exit=True)
    restart_timer()
    try:
        async with _action_repeated(restart_timer, seconds / 2):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.asynccontextmanager
async def start_timeout_extended() -> AsyncIterator[None]:
    """Inside this context, repeatedly extend the start timeout, because a start with many sandboxes is slow."""
    state = f"EXTEND_TIMEOUT_USEC={_EXTENSION_SECONDS * 1e6:.0f}"
    async with _action_repeated(lambda: notify(state), _EXTENSION_INTERVAL_SECONDS):
        yield


def _read_watchdog_seconds() -> float:
    """Return the watchdog timeout in seconds, or 0 if the service manager does not request a watchdog."""
    microseconds, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not (microseconds.isascii() and microseconds.isdigit()) or pid not in ("", str(os.getpid())):
        return 0
    return int(microseconds) / 1e6


@contextlib.asynccontextmanager
async def _action_repeated(action: Callable[[], None], interval: float) -> AsyncIterator[None]:
    """Inside this context, call ``action`` every ``interval`` seconds."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(interval)
            action()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
