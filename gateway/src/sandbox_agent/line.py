"""The line to the host: a serial port at whose other end is the host, and nobody else.

It serves one question. A machine that has just come to be must do much for the first time, which is slow where its
processor is emulated; to ask and to answer over the line takes a fraction of what TCP and HTTP take.

    host     ? and 16 bytes    who is there?
    agent    the same          I am, and nobody is let in until I know who
    host     = and JSON        what /identity takes

Each is one read of at most 4096 bytes: whatever moment a fork begins at, the next frame is whole.
"""

from __future__ import annotations

import os
import select
import sys
import time

PATH = "/dev/virtio-ports/sandbox.agent"
ASK = b"?"
FRAME = 4096
TOLD_WITHIN = 5.0
"""Seconds between the agent's answer and what the host has to say."""
_OPENED_WITHIN = 120.0
_OPEN_EVERY = 0.5


class Line:
    """Opened by the first ``read``, which waits for it to appear: the kernel may be finding its devices still."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def read(self, seconds: float | None = None) -> bytes:
        """The next frame; b"" where none comes within ``seconds``, or the host hung up.

        Ends the thread where there is no line.
        """
        if self._fd < 0:
            self._fd = _opened(self._path)
        if seconds is not None and not _readable(self._fd, seconds):
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
            print(f"sandbox-agent: line: {error}", file=sys.stderr)


def _opened(path: str) -> int:
    until = time.monotonic() + _OPENED_WITHIN
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_NOCTTY)
        except FileNotFoundError:
            if time.monotonic() > until:
                sys.exit()
        except OSError as error:
            print(f"sandbox-agent: line: {error}", file=sys.stderr)
            sys.exit()
        time.sleep(_OPEN_EVERY)


def _readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _await_host(fd: int) -> None:
    """Return when the host is there again. Edge-triggered: that it is not would be said over and over."""
    with select.epoll() as epoll:
        epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        while any(event & select.EPOLLHUP for _, event in epoll.poll()):
            pass
