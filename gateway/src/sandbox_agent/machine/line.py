"""The line to the host: a serial port that only the host can reach.

It carries the identity after a fork. A fork's first TCP connection and HTTP request are slow, especially on an emulated
processor; the line takes a fraction of that time.

    host     ? and 16 bytes    is the agent there?
    agent    the same          yes; from now on requests wait until the identity is set
    host     = and JSON        the body of /identity

Each frame is one read of at most 4096 bytes, so the first frame after a fork is complete, whenever the fork happened.
"""

from __future__ import annotations

import os
import select
import sys
import time

PATH = "/dev/virtio-ports/sandbox.agent"
ASK = b"?"
FRAME = 4096
REPLY_SECONDS = 5.0
"""Seconds that the host has to send the identity after the agent's answer."""
_OPEN_SECONDS = 120.0
_RETRY_SECONDS = 0.5


class Line:
    """The port. The first ``read`` waits for it and opens it: the kernel may not have found its devices yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def read(self, seconds: float | None = None) -> bytes:
        """Return the next frame; b"" if none arrives within ``seconds`` or the host hung up.

        Ends the thread if there is no such port.
        """
        if self._fd < 0:
            self._fd = _open_when_present(self._path)
        if seconds is not None and not _is_readable(self._fd, seconds):
            return b""
        try:
            frame = os.read(self._fd, FRAME)
        except OSError:
            frame = b""
        if not frame and seconds is None:
            _await_host(self._fd)
        return frame

    def write(self, frame: bytes) -> None:
        try:
            os.write(self._fd, frame)
        except OSError as error:
            print(f"sandbox-agent: the serial line to the host cannot be used: {error}", file=sys.stderr)


def _open_when_present(path: str) -> int:
    until = time.monotonic() + _OPEN_SECONDS
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_NOCTTY)
        except FileNotFoundError:
            if time.monotonic() > until:
                sys.exit()
        except OSError as error:
            print(f"sandbox-agent: the serial line to the host cannot be used: {error}", file=sys.stderr)
            sys.exit()
        time.sleep(_RETRY_SECONDS)


def _is_readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _await_host(fd: int) -> None:
    """Wait until the host is back. Edge-triggered: level-triggered polling would report the hang-up repeatedly."""
    with select.epoll() as epoll:
        epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        while any(event & select.EPOLLHUP for _, event in epoll.poll()):
            pass
