"""What kernels write between two cells: a thread left behind, a server started in the background.

It is read and dropped, so that nobody blocks on a full pipe. A cell that runs reads for itself, so this thread is
woken once by its output, and told when it is over; by a cell without output it is not woken at all.
"""

from __future__ import annotations

import os
import select
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sandbox_agent.kernel_process import Kernel


class Idle:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels: dict[int, Kernel] = {}
        self._new: list[int] = []
        self._wake = -1

    def watch(self, kernel: Kernel) -> None:
        """Read what it writes from now on, until its next cell; nothing of one that has ended."""
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
