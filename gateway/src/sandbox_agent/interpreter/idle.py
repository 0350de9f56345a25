"""Discard the output of kernels between cells, such as the output of background threads and servers.

Otherwise, a full pipe would block the writers. While a cell runs, its own thread reads the output. The first output of
a cell wakes the IdleReader once; it then ignores the pipe until the next call to ``watch``.
"""

from __future__ import annotations

import os
import select
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sandbox_agent.interpreter.kernel_process import Kernel


class IdleReader:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels: dict[int, Kernel] = {}
        self._new_fds: list[int] = []
        self._wake_fd = -1

    def watch(self, kernel: Kernel) -> None:
        """Discard the output of ``kernel`` until its next cell. Does nothing if the kernel has exited."""
        if kernel.is_closed:
            return
        with self._lock:
            new_fds = [fd for fd in kernel.outputs if self._kernels.get(fd) is not kernel]
            if not new_fds:
                return
            for fd in new_fds:
                self._kernels[fd] = kernel
            self._new_fds += new_fds
            if self._wake_fd < 0:
                reader, self._wake_fd = os.pipe()
                threading.Thread(target=self._serve, args=(reader,), daemon=True).start()
            os.write(self._wake_fd, b".")

    def _serve(self, reader: int) -> None:
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == reader:
                    os.read(reader, 4096)
                    with self._lock:
                        for new_fd in self._new_fds:
                            poll.register(new_fd, select.POLLIN)
                        self._new_fds = []
                else:
                    self._drain(fd, poll)

    def _drain(self, fd: int, poll: select.poll) -> None:
        with self._lock:
            kernel = self._kernels.get(fd)
            if kernel is None or not kernel.drain(fd):
                poll.unregister(fd)
                self._kernels.pop(fd, None)
