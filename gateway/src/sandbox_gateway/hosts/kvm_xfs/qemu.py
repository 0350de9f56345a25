"""One QEMU process: its command line, its monitor (QMP), its end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from qemu.qmp import ExecuteError, QMPClient, QMPError

from sandbox_gateway.command import child_environment
from sandbox_gateway.errors import BackendFailed, Timeout
from sandbox_gateway.hosts.kvm_xfs.bounded_log import create_log, open_log_of, read_log
from sandbox_gateway.hosts.kvm_xfs.layout import Instance
from sandbox_gateway.log import Logger

log = Logger("qemu")

QMP_SECONDS = 20.0
KERNEL_ARGUMENTS = "root=/dev/vda rw rootflags=noatime,noinit_itable console=ttyS0 quiet panic=-1 net.ifnames=0"
TCG_KERNEL_ARGUMENTS = "tsc=reliable"
"""The emulated counter is right. Checked against other clocks, which answer slowly here, it is held for wrong: the
check runs twice a second, and its warnings first of all in each fork."""
LINE = "sandbox.agent"
_TB_SIZE_MB = 64
_TAIL = 500
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Platform:
    """What a machine's device state depends on: it is restored on the same, or not at all."""

    accelerator: str
    cpu_model: str
    machine: str
    qemu_version: str


@dataclass(frozen=True)
class Shape:
    """Everything that decides a machine's command line, besides its files."""

    label: str
    """Names the process: network slot and instance, found again in its command line."""
    qemu: str
    platform: Platform
    cpus: int
    memory_mb: int
    guest_mac: str
    tap: str
    netns: Path
    uid: int
    """The user QEMU runs as once it has opened its files; 0: root."""
    generation: str
    """GUID of this machine generation: another for every fork."""


def arguments(shape: Shape, files: Instance, *, qmp_fd: int, line_fd: int, state_fd: int | None) -> list[str]:
    """The command line. With ``state_fd`` the machine goes on from that device state, without it boots.

    ``line_fd``: a connected socket, QEMU's end of the line to the agent.
    """
    emulated = shape.platform.accelerator == "tcg"
    accelerator = f"tcg,tb-size={_TB_SIZE_MB}" if emulated else "kvm"
    argv = [
        shape.qemu,
        "-name", shape.label,
        "-nodefaults", "-no-user-config", "-display", "none", "-vga", "none", "-no-reboot",
        "-M", f"{shape.platform.machine},memory-backend=mem,suppress-vmdesc=on,usb=off,vmport=off",
        "-accel", accelerator,
        "-cpu", shape.platform.cpu_model,
        "-smp", str(shape.cpus),
        "-m", f"{shape.memory_mb}M",
        "-object", f"memory-backend-file,id=mem,size={shape.memory_mb}M,mem-path={files.memory},share=off,"
                   "dump=off,merge=off",
        "-blockdev", f"driver=file,node-name=disk-file,filename={files.disk},cache.direct=on,aio=threads",
        "-blockdev", "driver=raw,node-name=disk,file=disk-file,cache.direct=on",
        "-device", "virtio-blk-pci,drive=disk,addr=0x3",
        "-netdev", f"tap,id=net,ifname={shape.tap},script=no,downscript=no",
        "-device", f"virtio-net-pci,netdev=net,mac={shape.guest_mac},romfile=,addr=0x4",
        "-device", f"vmgenid,guid={shape.generation}",
        "-chardev", f"socket,id=line,fd={line_fd}",
        "-device", "virtio-serial-pci,max_ports=2,addr=0x5",
        "-device", f"virtserialport,chardev=line,nr=1,name={LINE}",
        "-chardev", "ringbuf,id=console,size=65536", "-serial", "chardev:console",
        "-chardev", f"socket,id=qmp,fd={qmp_fd},server=on,wait=off", "-mon", "chardev=qmp,mode=control",
        "-sandbox", "on,obsolete=deny,spawn=deny,resourcecontrol=deny"
                    + ("" if shape.uid else ",elevateprivileges=deny"),
    ]  # fmt: skip
    if shape.uid:
        argv += ["-runas", f"{shape.uid}:{shape.uid}"]
    if state_fd is None:
        append = f"{KERNEL_ARGUMENTS} {TCG_KERNEL_ARGUMENTS}" if emulated else KERNEL_ARGUMENTS
        return [*argv, "-kernel", str(files.kernel), "-initrd", str(files.initrd), "-append", append]
    # Nobody needs to be told where the machine is now: its addresses, and the tap's, are alike in every slot.
    quiet = ("-global", "migration.send-configuration=off", "-global", "migration.announce-rounds=0")
    return [*argv, *quiet, "-incoming", f"fd:{state_fd}"]


class Machine:
    """A running QEMU, started by us or found running."""

    def __init__(self, pid: int, files: Instance, line: socket.socket | None = None, log: int = -1) -> None:
        """``log``: QEMU's, ours to close; without it, that of the running process."""
        self.pid = pid
        self.files = files
        self.line = line
        """Our end of the line to the agent, held as long as we know the machine: the agent sees when it is let go.
        None for a machine that was found running."""
        self._log = log
        if log < 0:
            with contextlib.suppress(OSError):
                self._log = open_log_of(pid)
        self._final_log = ""
        """What the log held when the machine ended."""
        self._qmp: QMPClient | None = None
        self._qmp_lock = asyncio.Lock()
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    @classmethod
    async def spawn(cls, shape: Shape, files: Instance, *, state: Path | None) -> Machine:
        """Start QEMU in its network namespace; it outlives us. Raises BackendFailed when it cannot be started."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        line, theirs = socket.socketpair()
        output = create_log()
        try:
            with listener, theirs, contextlib.ExitStack() as stack:
                _bind(listener, files.qmp)
                state_fd = stack.enter_context(state.open("rb")).fileno() if state else None
                argv = arguments(shape, files, qmp_fd=listener.fileno(), line_fd=theirs.fileno(), state_fd=state_fd)
                pass_fds = [listener.fileno(), theirs.fileno(), *([] if state_fd is None else [state_fd])]
                pid = await asyncio.to_thread(_popen_in, shape.netns, argv, pass_fds, output)
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
        """One QMP command. Raises BackendFailed with QEMU's words, Timeout after QMP_SECONDS."""
        try:
            async with asyncio.timeout(QMP_SECONDS):
                client = await self._client()
                return await client.execute(command, arguments)
        except TimeoutError:
            raise Timeout(f"QEMU did not answer {command} within {QMP_SECONDS:g} s") from None
        except ExecuteError as error:
            raise BackendFailed(f"QEMU refused {command}: {error}") from None
        except (QMPError, OSError, EOFError) as error:
            raise BackendFailed(f"QEMU went away during {command}: {error}{self.log_tail()}") from None

    async def line_is_open(self) -> bool:
        """Does something in the machine listen to the line?"""
        devices = cast("list[dict[str, object]]", await self.execute("query-chardev"))
        return any(device["label"] == "line" and device["frontend-open"] for device in devices)

    async def stop(self) -> None:
        await self.execute("stop")

    async def cont(self) -> None:
        await self.execute("cont")

    async def go_on(self) -> bool:
        """Let the machine run if it stands still; says whether it did."""
        status = cast("dict[str, str]", await self.execute("query-status"))["status"]
        stands = status in ("paused", "io-error")  # io-error: its disk found no space
        if stands:
            await self.cont()
        return stands

    async def save_devices(self, filename: str) -> None:
        """Write the device state (not RAM) of the stopped machine to ``filename``, a name from ``lent``."""
        # live=False: the disk stays ours; with live=True QEMU would give it up as for a migration.
        await self.execute("xen-save-devices-state", {"filename": filename, "live": False})

    @contextlib.asynccontextmanager
    async def lent(self, descriptor: int) -> AsyncIterator[str]:
        """Lend an open file to QEMU, which need not be allowed to open it; yields the name it has there."""
        client = await self._client()
        client.send_fd_scm(descriptor)
        lent = cast("dict[str, int]", await self.execute("add-fd"))
        try:
            yield f"/dev/fdset/{lent['fdset-id']}"
        finally:
            with contextlib.suppress(BackendFailed, Timeout):
                await self.execute("remove-fd", {"fdset-id": lent["fdset-id"]})

    async def console(self) -> str:
        """The end of what the guest wrote to its serial console."""
        with contextlib.suppress(BackendFailed, Timeout):
            return str(await self.execute("ringbuf-read", {"device": "console", "size": 16384}))
        return ""

    def log_tail(self) -> str:
        """What QEMU wrote to its log, as the end of a sentence."""
        text = self._final_log if self._log < 0 else _tail_of(self._log)
        return f" ({text})" if text else ""

    async def connect(self) -> None:
        """Open the monitor ahead of need."""
        async with asyncio.timeout(QMP_SECONDS):
            await self._client()

    async def kill(self, seconds: float = 10) -> None:
        """End the process for certain; returns when it is gone. Raises Timeout if the kernel does not let go."""
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
        """Close the monitor; the machine goes on."""
        client, self._qmp = self._qmp, None
        if client is not None:
            # A machine that ended has hung up already, which disconnect() reports in one of these ways.
            with contextlib.suppress(QMPError, OSError, EOFError, TimeoutError):
                await asyncio.wait_for(client.disconnect(), 2)

    def forget(self) -> None:
        """Stop watching the process; the tail of its log stays."""
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
                # Its own listener keeps every event for ever, and a guest causes them: by setting its clock, for one.
                client.events.event_filter = _reject
                # connect() takes a path of at most 107 bytes; a socket made here takes one of any length.
                await client.connect(_connected(self.files.qmp))
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


def running(marker: str) -> Iterator[tuple[int, str, Path]]:
    """QEMU processes whose RAM lies under the path ``marker``: (pid, label, memory path)."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            memory = next((word for word in words if f"mem-path={marker}/" in word), None)
            if memory and "-name" in words:
                path = memory.split("mem-path=", 1)[1].split(",", 1)[0]
                yield int(entry.name), words[words.index("-name") + 1], Path(path)


def _popen_in(netns: Path, argv: list[str], pass_fds: list[int], output: int) -> int:
    """Start a process in a network namespace: this thread steps into it, so that no helper process is needed."""
    with _inside(netns):
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                env=child_environment(),
                start_new_session=True,
                cwd="/",
            )
        except FileNotFoundError:
            raise BackendFailed(
                f"{argv[0]} is not installed: install qemu-system-x86, or run the kvm_xfs_host role"
            ) from None
    # The pidfd reaps it: keep subprocess from warning about a child it no longer sees.
    process.returncode = 0
    return process.pid


@contextlib.contextmanager
def _inside(netns: Path) -> Iterator[None]:
    with Path("/proc/thread-self/ns/net").open("rb") as home, netns.open("rb") as target:
        _setns(target.fileno())
        try:
            yield
        finally:
            _setns(home.fileno())


def _setns(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise BackendFailed(f"a network namespace cannot be entered: {os.strerror(ctypes.get_errno())}")


def _bind(listener: socket.socket, path: Path) -> None:
    path.unlink(missing_ok=True)
    with _short(path.parent) as parent:
        listener.bind(f"{parent}/{path.name}")
    path.chmod(0o600)
    listener.listen(4)


def _connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with _short(path.parent) as parent:
            client.connect(f"{parent}/{path.name}")
    except OSError:
        client.close()
        raise
    client.setblocking(False)
    return client


@contextlib.contextmanager
def _short(directory: Path) -> Iterator[str]:
    """A name of a few bytes for a directory: socket addresses end at 107."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
