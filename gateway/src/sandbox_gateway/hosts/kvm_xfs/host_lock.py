"""Lock a gateway's state root and network names for its exclusive use."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from sandbox_gateway.errors import Conflict


class HostLock:
    """Holds the locks on ``root`` and on the network prefix. The kernel releases both when the process exits."""

    def __init__(self, root: Path, prefix: str) -> None:
        self._root = root
        self._prefix = prefix
        self._lock = -1
        self._name_lock: socket.socket | None = None

    def acquire(self) -> None:
        """Acquire both locks. Raises Conflict if another gateway holds either of them."""
        self._lock = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Like the interface names, an abstract socket belongs to the network namespace. Every chroot sees it.
            self._name_lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            self._name_lock.bind(f"\0sandbox-gateway/{self._prefix}")
        except BlockingIOError:
            self.release()
            raise Conflict(
                f"another gateway uses the state root {self._root}: stop it, or choose a different state_root for "
                "this one"
            ) from None
        except OSError:
            self.release()
            raise Conflict(
                f"another gateway on this machine uses the network prefix {self._prefix!r}: choose "
                "a different network.prefix and network.subnet for this one"
            ) from None

    def release(self) -> None:
        if self._name_lock is not None:
            self._name_lock.close()
            self._name_lock = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
