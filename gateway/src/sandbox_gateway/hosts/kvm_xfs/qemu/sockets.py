"""Use Unix sockets at paths of any length.

The address of a Unix socket is at most 107 bytes long, but paths in the state root may be longer.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def listen_on_path(listener: socket.socket, path: Path) -> None:
    """Make ``listener`` listen at ``path``, accessible only to root."""
    path.unlink(missing_ok=True)
    with _short_path(path.parent) as parent:
        listener.bind(f"{parent}/{path.name}")
    path.chmod(0o600)
    listener.listen(4)


def connect_to_path(path: Path) -> socket.socket:
    """Connect to the socket at ``path`` and return the non-blocking connection. Never waits. Raises OSError.

    Raises BlockingIOError if the queue of connections is full because the server's process is hung.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with _short_path(path.parent) as parent:
            client.connect(f"{parent}/{path.name}")
    except OSError:
        client.close()
        raise
    return client


@contextlib.contextmanager
def _short_path(directory: Path) -> Iterator[str]:
    """Yield a short path to ``directory``, which is valid inside this context."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
