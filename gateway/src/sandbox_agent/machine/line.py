"""The serial port to the host.

After a fork, the host sends the identity through this port. This takes a fraction of the time of a fork's first TCP
connection and HTTP request, which are slow, especially on an emulated processor.

    host     ? and 16 bytes      a probe: is the agent running?
    agent    the same bytes      yes; from now on, HTTP requests wait until the identity is set
    host     = and JSON          the body of /identity

Each frame is read with a single call, of at most 4096 bytes. The first frame after a fork is therefore complete, no
matter when the machine was captured.
"""

from __future__ import annotations

import os
import select
import sys
import time

SERIAL_PORT_PATH = "/dev/virtio-ports/sandbox.agent"
PROBE = b"?"
MAX_FRAME_BYTES = 4096
REPLY_TIMEOUT_SECONDS = 5.0
"""How long to wait for the identity after answering a probe."""
_OPEN_TIMEOUT_SECONDS = 120.0
_RETRY_INTERVAL_SECONDS = 0.5


class SerialPort:
    """The serial port. The first ``read`` waits until the kernel has detected the port, then opens it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def read(self, seconds: float | None = None) -> bytes:
        """Return the next frame; b"" if none arrives within ``seconds`` or the host hangs up.

        Exits the calling thread if the machine has no serial port.
        """
        if self._fd < 0:
            self._fd = _open_when_present(self._path)
        if seconds is not None and not _is_readable(self._fd, seconds):
            return b""
        try:
            frame = os.read(self._fd, MAX_FRAME_BYTES)
        except OSError:
            frame = b""
        if not frame and seconds is None:
            _await_host(self._fd)
        return frame

    def write(self, frame: bytes) -> None:
        try:
            os.write(self._fd, frame)
        except OSError as error:
            print(f"sandbox-agent: cannot use the serial port to the host: {error}", file=sys.stderr)


def _open_when_present(path: str) -> int:
    deadline = time.monotonic() + _OPEN_TIMEOUT_SECONDS
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_NOCTTY)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                sys.exit()
        except OSError as error:
            print(f"sandbox-agent: cannot use the serial port to the host: {error}", file=sys.stderr)
            sys.exit()
        time.sleep(_RETRY_INTERVAL_SECONDS)


def _is_readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _await_host(fd: int) -> None:
    """Wait until the host reconnects. Uses edge-triggered polling, which reports the hang-up only once."""
    with select.epoll() as epoll:
        epoll.register(fd, select.EPOLLIN | select.EPOLLET)
        while any(event & select.EPOLLHUP for _, event in epoll.poll()):
            pass
