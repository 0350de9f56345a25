"""Run the page tracker, a helper process that makes the kernel track which pages machines write (`injection`).

    python -m sandbox_gateway.hosts.kvm_xfs.memory.tracker [DESCRIPTOR]

The tracker is a separate process because only it needs the privilege to use ptrace. It accepts requests on the
listening Unix socket DESCRIPTOR (default: 3, which systemd passes). If standard input is a pipe, the tracker exits when
the pipe is closed. Each connection carries one request, ``{"pid": …, "areas": [[start, end], …]}`` on one line. The
response is ``{}`` or ``{"error": "…"}``. This module uses only the standard library.
"""

from __future__ import annotations

import json
import os
import select
import socket
import stat
import struct
import sys
from pathlib import Path

from sandbox_gateway.hosts.kvm_xfs.memory.injection import track_writes

_LISTENER_FD = 3
_MAX_REQUEST_BYTES = 1 << 16
_REQUEST_TIMEOUT_SECONDS = 5.0
_PROGRAM_PREFIX = "qemu-system-"


def serve(listener: socket.socket) -> None:
    """Serve requests. If standard input is a pipe, return when it is closed."""
    descriptors = [listener.fileno()]
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        descriptors.append(0)
    while True:
        ready_descriptors, _, _ = select.select(descriptors, [], [])
        if 0 in ready_descriptors:
            return
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_REQUEST_TIMEOUT_SECONDS)
            try:
                _handle_request(connection)
            except OSError:
                continue  # The client hung up or was too slow.


def _handle_request(connection: socket.socket) -> None:
    try:
        _check_peer(connection)
        pid, areas = _read_request(connection)
        pidfd = os.pidfd_open(pid)
        try:
            _check_program(pid)
            track_writes(pid, pidfd, areas)
        finally:
            os.close(pidfd)
        response = {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        response = {"error": (getattr(error, "strerror", None) or str(error))[:200]}
    connection.sendall(json.dumps(response).encode() + b"\n")


def _check_peer(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("=iII"))
    _, uid, _ = struct.unpack("=iII", credentials)
    if uid not in (0, os.geteuid()):
        raise PermissionError(f"user {uid} may not use the page tracker: run the gateway as root")


def _read_request(connection: socket.socket) -> tuple[int, list[tuple[int, int]]]:
    with connection.makefile("rb") as stream:
        request = json.loads(stream.readline(_MAX_REQUEST_BYTES))
    return int(request["pid"]), [(int(start), int(end)) for start, end in request["areas"]]


def _check_program(pid: int) -> None:
    program = Path(f"/proc/{pid}/exe").readlink().name
    if not program.startswith(_PROGRAM_PREFIX):
        raise PermissionError(f"process {pid} runs {program}, not QEMU")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1]) if sys.argv[1:] else _LISTENER_FD))
