"""Discard the output of kernels between cells, for example from background threads and servers.

Otherwise the writers would block on a full pipe. A running cell reads its output itself: the cell's first output
wakes this thread once, which then stops watching the pipe until ``watch`` is called again.
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
        self._new: list[int] = []
        self._wake = -1

    def watch(self, kernel: Kernel) -> None:
        """Discard the kernel's output until its next cell. Ignores a kernel that has ended."""
        if kernel.closed:
            return
        with self._lock:
            new = [fd for fd in kernel.outputs if self._kernels.get(fd) is not kernel]
            if not new:
                return
            for fd in new:
                self._kernels[fd] = kernel
            self._new += new
            if self._wake < 0:
                reader, self._wake = os.pipe()
                threading.Thread(target=self._serve, args=(reader,), daemon=True).start()
            os.write(self._wake, b".")

    def _serve(self, reader: int) -> None:
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == reader:
                    os.read(reader, 4096)
                    with self._lock:
                        for new in self._new:
                            poll.register(new, select.POLLIN)
                        self._new = []
                else:
                    self._drain(fd, poll)

    def _drain(self, fd: int, poll: select.poll) -> None:
        with self._lock:
            kernel = self._kernels.get(fd)
            if kernel is None or not kernel.drain(fd):
                poll.unregister(fd)
                self._kernels.pop(fd, None)
