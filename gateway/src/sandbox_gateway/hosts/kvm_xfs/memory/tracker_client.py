"""Send requests to the page tracker (`tracker`)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sandbox_gateway.command import build_child_environment
from sandbox_gateway.hosts.kvm_xfs.memory import tracker
from sandbox_gateway.hosts.kvm_xfs.memory.ram import Area

_REQUEST_TIMEOUT_SECONDS = 10.0
_EXIT_TIMEOUT_SECONDS = 5.0
_MAX_RESPONSE_BYTES = 4096


class TrackerClient:
    """Sends requests to the page tracker at the socket ``path``. Without a path, ``open`` starts a tracker itself."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._child: subprocess.Popen[bytes] | None = None
        self._own_socket: int | None = None

    def open(self) -> None:
        """Start a tracker as a child process, unless the administrator runs one.

        The socket of this child has no path, only a descriptor, so a killed gateway leaves no file.
        """
        if self._path is not None:
            return
        with (
            tempfile.TemporaryDirectory(prefix="grove-tracker-") as directory,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ):
            path = Path(directory, "socket")
            listener.bind(str(path))
            listener.listen()
            self._own_socket = os.open(path, os.O_PATH | os.O_CLOEXEC)
            self._path = Path(f"/proc/self/fd/{self._own_socket}")
            self._child = _start(listener)

    def close(self) -> None:
        if self._child is not None:
            assert self._child.stdin is not None
            self._child.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_EXIT_TIMEOUT_SECONDS)
            if self._child.poll() is None:
                self._child.kill()
                self._child.wait(_EXIT_TIMEOUT_SECONDS)
            self._child = None
        if self._own_socket is not None:
            os.close(self._own_socket)
            self._own_socket = self._path = None

    def track(self, pid: int, areas: Sequence[Area]) -> None:
        """Make the kernel track the writes of a machine's process to ``areas``. Raises OSError with the reason."""
        request = {"pid": pid, "areas": [(area.start, area.end) for area in areas]}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_REQUEST_TIMEOUT_SECONDS)
            connection.connect(str(self._path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as stream:
                response_line = stream.readline(_MAX_RESPONSE_BYTES)
        try:
            error = json.loads(response_line).get("error")
        except ValueError:
            error = "it closed the connection without a response"
        if error:
            raise OSError(f"the page tracker failed: {error}")


def _start(listener: socket.socket) -> subprocess.Popen[bytes]:
    """Start a tracker that accepts requests on ``listener``."""
    return subprocess.Popen(
        [sys.executable, "-m", tracker.__name__, str(listener.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
        env=build_child_environment(),
        cwd="/",
        start_new_session=True,
    )
