"""One QEMU process: its monitor (QMP), its log and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

from qemu.qmp import ExecuteError, QMPClient, QMPError

from sandbox_gateway.errors import BackendFailed, Timeout
from sandbox_gateway.hosts.kvm_xfs.image.layout import Instance
from sandbox_gateway.hosts.kvm_xfs.qemu.bounded_log import create_log, open_log_of, read_log
from sandbox_gateway.hosts.kvm_xfs.qemu.command_line import Shape, arguments
from sandbox_gateway.hosts.kvm_xfs.qemu.processes import start_in
from sandbox_gateway.hosts.kvm_xfs.qemu.sockets import connect_to, listen_at
from sandbox_gateway.log import Logger
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

logger = Logger("kvm_xfs")

QMP_SECONDS = 20.0
_TAIL = 500
_RESTORE_INTERVAL = 0.005


class Machine:
    """A running QEMU, started by this gateway or by an earlier one."""

    def __init__(self, pid: int, files: Instance, line: socket.socket | None = None, log: int = -1) -> None:
        """Watch a process. ``log``: QEMU's log, which ``forget`` closes; default: the running process's log."""
        self.pid = pid
        self.files = files
        self.line = line
        """The gateway's end of the serial line to the agent; ``forget`` closes it, which the agent notices.

        None for a machine that an earlier gateway started.
        """
        self._log = log
        if log < 0:
            with contextlib.suppress(OSError):
                self._log = open_log_of(pid)
        self._final_log = ""
        """The log's tail, kept when the machine ends."""
        self._qmp: QMPClient | None = None
        self._qmp_lock = asyncio.Lock()
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    @classmethod
    async def spawn(cls, shape: Shape, files: Instance, *, state: Path | None, hold: bool = False) -> Machine:
        """Start QEMU in its network namespace. QEMU outlives the gateway. Raises BackendFailed on failure.

        If the caller is cancelled, no process remains. ``hold``: the machine stays stopped until ``cont``.
        """
        work = asyncio.ensure_future(cls._spawn(shape, files, state, hold))
        try:
            return await finish_despite_cancellation(work)
        except asyncio.CancelledError:
            if not work.cancelled() and work.exception() is None:
                await clean_up(logger, work.result().kill())
            raise

    @classmethod
    async def _spawn(cls, shape: Shape, files: Instance, state: Path | None, hold: bool) -> Machine:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        line, theirs = socket.socketpair()
        output = create_log()
        try:
            with listener, theirs, contextlib.ExitStack() as stack:
                listen_at(listener, files.qmp)
                state_fd = stack.enter_context(state.open("rb")).fileno() if state else None
                descriptors = {"qmp_fd": listener.fileno(), "line_fd": theirs.fileno(), "state_fd": state_fd}
                argv = arguments(shape, files, **descriptors, hold=hold)
                pass_fds = [listener.fileno(), theirs.fileno(), *([] if state_fd is None else [state_fd])]
                pid = await asyncio.to_thread(start_in, shape.netns, argv, pass_fds, output)
        except BaseException:
            line.close()
            os.close(output)
            raise
        line.setblocking(False)
        return cls(pid, files, line, output)

    def on_end(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    async def execute(self, command: str, arguments: dict[str, object] | None = None) -> object:
        """Run a QMP command. Raises BackendFailed with QEMU's message, Timeout after QMP_SECONDS."""
        try:
            async with asyncio.timeout(QMP_SECONDS):
                client = await self._client()
                return await client.execute(command, arguments)
        except TimeoutError:
            raise Timeout(f"QEMU did not answer {command} within {QMP_SECONDS:g} s") from None
        except ExecuteError as error:
            raise BackendFailed(f"QEMU refused {command}: {error}") from None
        except (QMPError, OSError, EOFError) as error:
            raise BackendFailed(f"QEMU ended during {command}: {error}{self.log_tail()}") from None

    async def is_line_open(self) -> bool:
        """Return whether a process in the machine listens on the line."""
        devices = cast("list[dict[str, object]]", await self.execute("query-chardev"))
        return any(device["label"] == "line" and device["frontend-open"] for device in devices)

    async def wait_until_restored(self) -> None:
        """Wait until a held machine has loaded its state. Raises BackendFailed if it ends before, or Timeout."""
        async with asyncio.timeout(QMP_SECONDS):
            while cast("dict[str, str]", await self.execute("query-status"))["status"] == "inmigrate":
                await asyncio.sleep(_RESTORE_INTERVAL)

    async def stop(self) -> None:
        await self.execute("stop")

    async def cont(self) -> None:
        await self.execute("cont")

    async def continue_if_stopped(self) -> bool:
        """Resume the machine if it is stopped. Returns whether it was stopped."""
        status = cast("dict[str, str]", await self.execute("query-status"))["status"]
        stopped = status in ("paused", "io-error")  # io-error: no space was left for its disk
        if stopped:
            await self.cont()
        return stopped

    async def save_devices(self, filename: str) -> None:
        """Write the device state (not RAM) of the stopped machine to ``filename``, a name that ``lent`` yields."""
        # live=False: QEMU keeps the disk. With live=True it would release the disk, as for a migration.
        await self.execute("xen-save-devices-state", {"filename": filename, "live": False})

    @contextlib.asynccontextmanager
    async def lent(self, descriptor: int) -> AsyncIterator[str]:
        """Lend an open file to QEMU, which may lack permission to open it. Yields the file's name in QEMU."""
        client = await self._client()
        client.send_fd_scm(descriptor)
        lent = cast("dict[str, int]", await self.execute("add-fd"))
        try:
            yield f"/dev/fdset/{lent['fdset-id']}"
        finally:
            with contextlib.suppress(BackendFailed, Timeout):
                await self.execute("remove-fd", {"fdset-id": lent["fdset-id"]})

    async def console(self) -> str:
        """Return the tail of the guest's serial console."""
        with contextlib.suppress(BackendFailed, Timeout):
            return str(await self.execute("ringbuf-read", {"device": "console", "size": 16384}))
        return ""

    def memory_bytes(self) -> int:
        """Return the memory of the process in bytes, including its share of shared pages."""
        for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return 0

    def log_tail(self) -> str:
        """Return the tail of QEMU's log, as the end of a sentence."""
        text = self._final_log if self._log < 0 else _tail_of(self._log)
        return f" ({text})" if text else ""

    async def connect(self) -> None:
        """Connect to the monitor in advance."""
        async with asyncio.timeout(QMP_SECONDS):
            await self._client()

    async def kill(self, seconds: float = 10) -> None:
        """Kill the process and wait for its end. Raises Timeout if it does not end."""
        await self.detach()
        if self.ended:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            raise Timeout(f"QEMU process {self.pid} did not end within {seconds:g} s of SIGKILL") from None

    async def detach(self) -> None:
        """Close the monitor. The machine keeps running."""
        client, self._qmp = self._qmp, None
        if client is not None:
            # If the machine has ended and closed the connection, disconnect() raises one of these.
            with contextlib.suppress(QMPError, OSError, EOFError, TimeoutError):
                await asyncio.wait_for(client.disconnect(), 2)

    def forget(self) -> None:
        """Stop watching the process. The tail of its log is kept."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._log >= 0:
            self._final_log = _tail_of(self._log)
            os.close(self._log)
            self._log = -1
        if self.line is not None:
            self.line.close()

    async def _client(self) -> QMPClient:
        async with self._qmp_lock:
            if self._qmp is None:
                client = QMPClient(self.files.directory.name)
                # The client would keep every event, and a guest can cause events, for example by setting its clock.
                client.events.event_filter = _reject
                # connect() takes a path of at most 107 bytes, or a connected socket.
                await client.connect(connect_to(self.files.qmp))
                self._qmp = client
            return self._qmp

    def _on_end(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        self._ended.set()
        self.forget()
        for callback in self._callbacks:
            callback()


def _tail_of(log: int) -> str:
    try:
        return " ".join(read_log(log).split())[-_TAIL:]
    except OSError:
        return ""


def _reject(event: object) -> bool:
    return False
