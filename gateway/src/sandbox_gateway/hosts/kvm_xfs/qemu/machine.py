"""Control one QEMU process: send commands to its monitor (QMP), read its log, and detect when it exits."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

from qemu.qmp import ExecuteError, QMPClient, QMPError

from sandbox_gateway.errors import BackendFailed, Timeout
from sandbox_gateway.hosts.base import Load
from sandbox_gateway.hosts.kvm_xfs.bounded_log import (
    clear_append_flag,
    create_log,
    open_for_writing,
    open_process_log,
    read_log,
)
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles
from sandbox_gateway.hosts.kvm_xfs.network.addresses import TAP_NAME
from sandbox_gateway.hosts.kvm_xfs.process_checks import send_signal
from sandbox_gateway.hosts.kvm_xfs.qemu.command_line import MachineSpec, build_arguments
from sandbox_gateway.hosts.kvm_xfs.qemu.processes import start_in_namespace
from sandbox_gateway.hosts.kvm_xfs.qemu.sockets import connect_to_path, listen_on_path
from sandbox_gateway.log import Logger
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

logger = Logger("kvm_xfs")

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
QMP_TIMEOUT_SECONDS = 20.0
_MAX_TAIL_CHARACTERS = 500
_STALLED_STATUS = "io-error"
"""QEMU's name for the state of a machine that it stopped because a write to the disk failed for lack of space."""
_RESTORE_INTERVAL_SECONDS = 0.005
_CONSOLE_LOG_INTERVAL_SECONDS = 0.005
_CONSOLE_LOG_TIMEOUT_SECONDS = 2.0

_MAX_MESSAGE_BYTES = 1 << 20
"""Maximum length of a message from QEMU. Parsing a message blocks the event loop."""


def parse_traffic(interfaces: str) -> tuple[int | None, int | None]:
    """Return the bytes that a guest has received and sent, from the `/proc/PID/net/dev` of its namespace.

    Both are None if the namespace has no tap. The guest receives the bytes that the tap sends.
    """
    for line in interfaces.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == TAP_NAME:
            numbers = counters.split()
            return int(numbers[8]), int(numbers[0])
    return None, None


class Machine:
    """A QEMU process, started by this gateway or by an earlier one."""

    def __init__(
        self,
        pid: int,
        files: InstanceFiles,
        line: socket.socket | None = None,
        log: int = -1,
        console_log: int = -1,
        pidfd: int = -1,
    ) -> None:
        """Start watching a process. ``log``: descriptor of its log; by default, the log is opened.

        ``console_log``: descriptor of the copy of its console, or -1 if there is none. ``pidfd``: required unless the
        process is a child, whose pid cannot be reused. ``forget`` closes all three.
        """
        self.pid = pid
        self.files = files
        self.line = line
        """The gateway's end of the serial line to the agent. None if an earlier gateway started the machine.

        ``forget`` closes it, which the agent notices.
        """
        self.is_held = False
        """Whether the machine has loaded its state and waits for ``cont``."""
        self._log = log
        if log < 0:
            with contextlib.suppress(OSError):
                self._log = open_process_log(pid, files.directory)
        self._final_log = ""
        """The tail of the log, saved when QEMU exits."""
        self._console_log = console_log
        self._final_console = ""
        """The copy of the console, saved when QEMU exits."""
        self._qmp: QMPClient | None = None
        self._qmp_lock = asyncio.Lock()
        self._pidfd = pidfd if pidfd >= 0 else os.pidfd_open(pid)
        self._end_event = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []
        # The end of the machine does not belong to the context of the request that started it.
        contextvars.Context().run(asyncio.get_running_loop().add_reader, self._pidfd, self._on_end)

    @classmethod
    async def spawn(cls, spec: MachineSpec, files: InstanceFiles, *, state: Path | None, hold: bool = False) -> Machine:
        """Start QEMU in its network namespace. QEMU outlives the gateway. Raises BackendFailed on failure.

        If the caller is cancelled, the process is killed. ``hold``: the machine stays stopped until ``cont``.
        """
        spawn_task = asyncio.ensure_future(cls._spawn(spec, files, state, hold))
        try:
            return await finish_despite_cancellation(spawn_task)
        except asyncio.CancelledError:
            if not spawn_task.cancelled() and spawn_task.exception() is None:
                await clean_up(logger, spawn_task.result().kill())
            raise

    @classmethod
    async def _spawn(cls, spec: MachineSpec, files: InstanceFiles, state: Path | None, hold: bool) -> Machine:
        line, qemu_line = socket.socketpair()
        log_fds = [create_log()]
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(qemu_line)
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
                listen_on_path(listener, files.qmp)
                descriptors = {"qmp_fd": listener.fileno(), "line_fd": qemu_line.fileno()}
                if state:
                    descriptors["state_fd"] = stack.enter_context(state.open("rb")).fileno()
                else:
                    log_fds.append(create_log())
                    descriptors["console_fd"] = open_for_writing(log_fds[-1])
                    stack.callback(os.close, descriptors["console_fd"])
                argv = build_arguments(spec, files, **descriptors, hold=hold)
                pid = await asyncio.to_thread(start_in_namespace, spec.netns, argv, [*descriptors.values()], log_fds[0])
            except BaseException:
                line.close()
                for log in log_fds:
                    os.close(log)
                raise
            line.setblocking(False)
            machine = cls(pid, files, line, *log_fds)
            if not state:
                await machine._wait_for_console_log(descriptors["console_fd"])
        return machine

    async def _wait_for_console_log(self, writer: int) -> None:
        """Wait until QEMU has opened the copy of the console. Until then, the guest does not print anything."""
        deadline = time.monotonic() + _CONSOLE_LOG_TIMEOUT_SECONDS
        while not (clear_append_flag(writer) or self.has_ended or time.monotonic() > deadline):  # noqa: ASYNC110
            await asyncio.sleep(_CONSOLE_LOG_INTERVAL_SECONDS)

    def on_end(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    @property
    def has_ended(self) -> bool:
        return self._end_event.is_set()

    async def execute(self, command: str, arguments: dict[str, object] | None = None) -> object:
        """Run a QMP command and return its result. Raises BackendFailed with QEMU's message, or Timeout."""
        try:
            async with asyncio.timeout(QMP_TIMEOUT_SECONDS):
                client = await self._get_client()
                return await client.execute(command, arguments)
        except TimeoutError:
            raise Timeout(f"QEMU did not answer {command} within {QMP_TIMEOUT_SECONDS:g} s") from None
        except ExecuteError as error:
            raise BackendFailed(f"QEMU refused {command}: {error}") from None
        except (QMPError, OSError, EOFError) as error:
            raise BackendFailed(f"QEMU exited during {command}: {error}{self.log_tail()}") from None

    async def is_line_open(self) -> bool:
        """Return whether a process in the machine has opened the serial line."""
        chardevs = cast("list[dict[str, object]]", await self.execute("query-chardev"))
        return any(chardev["label"] == "line" and chardev["frontend-open"] for chardev in chardevs)

    async def wait_until_restored(self) -> None:
        """Wait until a held machine has loaded its state. Raises BackendFailed if QEMU exits first, or TimeoutError."""
        async with asyncio.timeout(QMP_TIMEOUT_SECONDS):
            while await self._query_status() == "inmigrate":  # noqa: ASYNC110 - QEMU sends no event that it can wait for
                await asyncio.sleep(_RESTORE_INTERVAL_SECONDS)
        self.is_held = True

    async def stop(self) -> None:
        await self.execute("stop")

    async def cont(self) -> None:
        await self.execute("cont")
        self.is_held = False

    async def resume_if_stopped(self) -> bool:
        """Resume the machine if it is stopped. Returns whether it was stopped."""
        was_stopped = await self._query_status() in ("paused", _STALLED_STATUS)
        if was_stopped:
            await self.cont()
        return was_stopped

    async def is_stalled(self) -> bool:
        """Return whether QEMU has stopped the machine because the host had no space left for its disk."""
        return await self._query_status() == _STALLED_STATUS

    async def _query_status(self) -> str:
        return cast("dict[str, str]", await self.execute("query-status"))["status"]

    async def save_devices(self, filename: str) -> None:
        """Write the device state (not RAM) of the stopped machine to ``filename``, a name from ``added_fd``."""
        # live=False: QEMU continues to use the disk. With live=True it would release the disk, as for a migration.
        await self.execute("xen-save-devices-state", {"filename": filename, "live": False})

    @contextlib.asynccontextmanager
    async def added_fd(self, descriptor: int) -> AsyncIterator[str]:
        """Pass an open file to QEMU, which may lack permission to open it. Yields the name of the file in QEMU."""
        client = await self._get_client()
        client.send_fd_scm(descriptor)
        fdset_id = cast("dict[str, int]", await self.execute("add-fd"))["fdset-id"]
        try:
            yield f"/dev/fdset/{fdset_id}"
        finally:
            with contextlib.suppress(BackendFailed, Timeout):
                await self.execute("remove-fd", {"fdset-id": fdset_id})

    async def read_console(self) -> str:
        """Return the tail of the guest's serial console.

        If QEMU has exited or does not answer, returns the first output since the machine booted, or "" for a machine
        that resumed from memory.
        """
        if not self.has_ended:
            with contextlib.suppress(BackendFailed, Timeout):
                return str(await self.execute("ringbuf-read", {"device": "console", "size": 16384}))
        return self._final_console if self._console_log < 0 else _read_text(self._console_log)

    def read_memory_bytes(self) -> int:
        """Return the memory use of the process in bytes, with a proportional share of shared pages (PSS)."""
        for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return 0

    def load(self) -> Load | None:
        """Return the load of the process, including QEMU's own work and memory, or None if it has exited."""
        try:
            stat_fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
            resident_pages = int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[1])
            disk_status = self.files.disk.stat()
            # The process runs in the namespace of its slot.
            received_bytes, sent_bytes = parse_traffic(Path(f"/proc/{self.pid}/net/dev").read_text())
        except OSError:
            return None
        started_at = int(stat_fields[19]) / _TICKS_PER_SECOND
        return Load(
            memory_bytes=resident_pages * _PAGE_BYTES,
            disk_bytes=disk_status.st_blocks * 512,
            cpu_seconds=(int(stat_fields[11]) + int(stat_fields[12])) / _TICKS_PER_SECOND,
            running_seconds=time.clock_gettime(time.CLOCK_BOOTTIME) - started_at,
            received_bytes=received_bytes,
            sent_bytes=sent_bytes,
        )

    def log_tail(self) -> str:
        """Return the tail of QEMU's log in parentheses, to append to a sentence, or "" if the log is empty."""
        text = self._final_log if self._log < 0 else _read_tail(self._log)
        return f" ({text})" if text else ""

    async def connect(self) -> None:
        """Connect to the monitor in advance, so that the first command is fast."""
        async with asyncio.timeout(QMP_TIMEOUT_SECONDS):
            await self._get_client()

    async def kill(self, seconds: float = 10) -> None:
        """Kill the process and wait until it has exited. Raises Timeout."""
        if not self.has_ended:
            send_signal(self._pidfd, signal.SIGKILL)
        await self.detach()
        if self.has_ended:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._end_event.wait()
        except TimeoutError:
            raise Timeout(f"QEMU process {self.pid} did not exit within {seconds:g} s of SIGKILL") from None

    async def detach(self) -> None:
        """Close the connection to the monitor. The machine keeps running."""
        client, self._qmp = self._qmp, None
        if client is not None:
            # disconnect() raises the error that ended the connection. A guest that controls QEMU can cause any error.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2):
                    await client.disconnect()

    def forget(self) -> None:
        """Stop watching the process, and save its console and the tail of its log."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._log >= 0:
            self._final_log = _read_tail(self._log)
            os.close(self._log)
            self._log = -1
        if self._console_log >= 0:
            self._final_console = _read_text(self._console_log)
            os.close(self._console_log)
            self._console_log = -1
        if self.line is not None:
            self.line.close()

    async def _get_client(self) -> QMPClient:
        async with self._qmp_lock:
            if self._qmp is None:
                client = QMPClient(self.files.directory.name, readbuflen=_MAX_MESSAGE_BYTES)
                # The client would store every event, and a guest can cause events, for example by setting its clock.
                client.events.event_filter = _reject_event
                try:
                    connection = connect_to_path(self.files.qmp)
                except BlockingIOError:
                    raise Timeout("QEMU does not accept connections: its process is hung") from None
                # connect() accepts a path of at most 107 bytes, or a connected socket.
                await client.connect(connection)
                self._qmp = client
            return self._qmp

    def _on_end(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        self._end_event.set()
        self.forget()
        for callback in self._callbacks:
            callback()


def _read_text(log: int) -> str:
    try:
        return read_log(log)
    except OSError:
        return ""


def _read_tail(log: int) -> str:
    return " ".join(_read_text(log).split())[-_MAX_TAIL_CHARACTERS:]


def _reject_event(event: object) -> bool:
    return False
