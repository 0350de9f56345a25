"""Measure the floor of a KVM/XFS host: QEMU with the gateway's own command line, but without the gateway.

Files, network slot and sockets are made before the clock starts. Any program that starts this QEMU on these files has
to wait for the remaining time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import select
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_gateway.hosts.addresses import AGENT_PORT
from sandbox_gateway.hosts.kvm_xfs.image import reflink
from sandbox_gateway.hosts.kvm_xfs.image.layout import Instance, Layout
from sandbox_gateway.hosts.kvm_xfs.network.addresses import GUEST_MAC, Slot
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.hosts.kvm_xfs.qemu.command_line import Platform, Shape, arguments
from sandbox_gateway.records import NetworkPolicy, Snapshot
from tests.support import session
from tests.support.live import Live

_CLONE_NEWNET = 0x40000000
_SECONDS = 30.0
_ATTEMPT_EVERY = 0.01
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Times:
    """Milliseconds since just before the process was created."""

    answered: float
    """Until QEMU has answered qmp_capabilities and query-status: its main loop runs."""
    running: float
    """Until the device state is loaded and the guest runs again."""


class RawMachine:
    """One QEMU process without a gateway. Call ``start``, measure, call ``end``; then it can be started again."""

    def __init__(self, files: Instance, shape: Shape, slot: Slot, state: Path) -> None:
        self.files = files
        self.slot = slot
        self._shape = shape
        self._state = state
        self._log = files.run / "qemu.log"
        self._monitor: Monitor | None = None
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the machine is not started"
        return self._process.pid

    def start(self, *, stepwise: bool = False) -> Times:
        """Start QEMU and wait until the guest runs again.

        ``stepwise``: load the state with a command once QEMU has answered, to time the two steps separately.
        """
        with self._running(deferred=stepwise) as (started, address, state):
            self._monitor = monitor = Monitor(address)
            monitor.execute("qmp_capabilities")
            status = monitor.execute("query-status")
            answered = time.perf_counter()
            if stepwise:
                monitor.execute("migrate-incoming", {"uri": f"fd:{state}"})
            while status["status"] != "running":
                monitor.wait_event("RESUME", 0.005)
                status = monitor.execute("query-status")
            running = time.perf_counter()
        return Times((answered - started) * 1000, (running - started) * 1000)

    def idle(self) -> None:
        """Start QEMU without loading a state, so that no guest runs."""
        with self._running(deferred=True) as (_, address, _):
            self._monitor = Monitor(address)
            self._monitor.execute("qmp_capabilities")

    def start_and_ping(self) -> float:
        """Start QEMU and send the agent a message over the serial line.

        Returns the milliseconds until its answer. No QMP commands run meanwhile.
        """
        question = b"?" + uuid.uuid4().bytes
        with self._running(deferred=False) as (started, _, _):
            assert self._line is not None
            self._line.settimeout(_SECONDS)
            self._line.sendall(question)
            heard = b""
            while question not in heard:
                piece = self._line.recv(4096)
                if not piece:
                    raise RuntimeError(f"QEMU ended before its guest answered: {self._output()}")
                heard += piece
            answered = time.perf_counter()
            self._line.sendall(b"={}")
        return (answered - started) * 1000

    @contextlib.contextmanager
    def _running(self, *, deferred: bool) -> Iterator[tuple[float, str, int]]:
        """Start QEMU. Yields the start time, its QMP socket, and QEMU's number for the device state's descriptor."""
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener,
            self._log.open("ab") as output,
            self._state.open("rb") as state,
        ):
            address = f"\0bench-{uuid.uuid4()}"
            listener.bind(address)
            listener.listen(1)
            self._line, theirs = socket.socketpair()
            with theirs:
                fds = [listener.fileno(), theirs.fileno(), state.fileno()]
                argv = arguments(self._shape, self.files, qmp_fd=fds[0], line_fd=fds[1], state_fd=fds[2])
                if deferred:
                    argv[argv.index("-incoming") + 1] = "defer"
                started = self._spawn(argv, fds, output.fileno())
            yield started, address, state.fileno()

    def execute(self, command: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self._monitor is not None, "the machine is not started"
        return self._monitor.execute(command, arguments)

    def pass_descriptor(self, descriptor: int) -> str:
        """Pass an open file to QEMU. Returns QEMU's name for it."""
        assert self._monitor is not None, "the machine is not started"
        return self._monitor.pass_descriptor(descriptor)

    def connect(self) -> None:
        """Return once the guest has accepted a connection to its agent's port."""
        deadline = time.perf_counter() + _SECONDS
        waiting: list[socket.socket] = []
        try:
            while time.perf_counter() < deadline:
                attempt = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
                waiting.append(attempt)
                with contextlib.suppress(BlockingIOError):
                    attempt.connect((self.slot.host_address, AGENT_PORT))
                _, ready, _ = select.select([], waiting[-16:], [], _ATTEMPT_EVERY)
                if any(each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 for each in ready):
                    return
        finally:
            for each in waiting:
                each.close()
        raise RuntimeError(f"the guest did not answer within {_SECONDS:g} s: {self._output()}")

    def end(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(_SECONDS)
            self._process = None
        if self._line is not None:
            self._line.close()
            self._line = None

    def _spawn(self, argv: list[str], pass_fds: list[int], output: int) -> float:
        """Start QEMU in the slot's network namespace. Returns the time just before."""
        started = 0.0

        def inside() -> None:  # run in a thread that ends here, so that no other thread enters that namespace
            nonlocal started
            with self.slot.path.open("rb") as namespace:
                if _libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"setns {self.slot.path}")
            started = time.perf_counter()
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                start_new_session=True,
                cwd="/",
            )

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if self._process is None:
            raise RuntimeError(f"QEMU could not be started in {self.slot.path}")
        return started

    def _output(self) -> str:
        return self._log.read_text(errors="replace").strip()[-500:]


class RawQemu:
    """A pool of raw machines on one snapshot, each with the disk, slot and user that the gateway would give it."""

    def __init__(self, live: Live, platform: Platform, snapshot: Snapshot, directory: Path) -> None:
        self._live = live
        self._platform = platform
        self._snapshot = snapshot
        self._source = Layout(live.config.host.state_root).snapshot(snapshot)
        self._directory = directory
        network = live.config.network.model_copy(update={**session.network(), "pool": 0})
        self._uid_base = live.config.kvm_xfs.uid_base
        self._prefix = network.prefix
        # Create it on the loop's thread, because the pool has asyncio events.
        self._slots: SlotPool = live.call(SlotPool, network, uid_base=self._uid_base)
        self._machines: list[RawMachine] = []

    def __enter__(self) -> RawQemu:
        self._directory.mkdir(mode=0o711)
        self._live.do(self._slots.open(set()))
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self._machines:
            machine.end()
        for machine in self._machines:
            self._live.do(self._slots.release(machine.slot))
        self._live.do(self._slots.destroy())
        _remove(self._directory)

    def machines(self, count: int) -> list[RawMachine]:
        """Return ``count`` machines that are not started. Reuses earlier machines, with fresh disks."""
        while len(self._machines) < count:
            self._machines.append(self._create_machine(len(self._machines)))
        for machine in self._machines[:count]:
            machine.end()
            machine.files.disk.unlink()
            reflink.clone(self._source / "rootfs.img", machine.files.disk)
        return self._machines[:count]

    def start_together(self, count: int, at_once: int) -> float:
        """Start ``count`` machines, ``at_once`` at a time. Returns the milliseconds until all run."""
        machines = self.machines(count)
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda machine: None, machines))  # creates the threads before the clock starts
            started = time.perf_counter()
            list(pool.map(lambda machine: machine.start(), machines))
            return (time.perf_counter() - started) * 1000

    def _create_machine(self, number: int) -> RawMachine:
        slot = self._live.do(self._slots.take(NetworkPolicy()))
        files = Instance(self._directory / str(number))
        files.directory.mkdir(mode=0o711)
        files.run.mkdir(mode=0o700)
        reflink.clone(self._source / "rootfs.img", files.disk)
        for target, name in ((files.kernel, "kernel"), (files.initrd, "initrd"), (files.memory, "memory.img")):
            target.hardlink_to(self._source / name)
        kvm_xfs = self._live.config.kvm_xfs
        shape = Shape(
            label=f"{self._prefix}-{slot.number}-raw",
            qemu=kvm_xfs.qemu,
            platform=self._platform,
            cpus=self._snapshot.resources.cpus,
            memory_mb=self._snapshot.resources.memory_mb,
            guest_mac=GUEST_MAC,
            tap=slot.tap,
            netns=slot.path,
            uid=self._uid_base + slot.number if self._uid_base else 0,
            generation=str(uuid.uuid4()),
        )
        return RawMachine(files, shape, slot, self._source / "device.state")


class Monitor:
    """A minimal QMP client over a plain socket, one command at a time."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(_SECONDS)
        self._socket.connect(address)
        self._data = b""
        self._events: list[str] = []
        self._message()  # the greeting

    def execute(self, command: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        self._socket.sendall(json.dumps({"execute": command, "arguments": arguments or {}}).encode())
        return self._answer(command)

    def pass_descriptor(self, descriptor: int) -> str:
        socket.send_fds(self._socket, [b'{"execute": "add-fd"}'], [descriptor])
        return f"/dev/fdset/{self._answer('add-fd')['fdset-id']}"

    def wait_event(self, name: str, seconds: float) -> None:
        """Return when the event has arrived, or after the timeout."""
        deadline = time.perf_counter() + seconds
        while name not in self._events and (left := deadline - time.perf_counter()) > 0:
            if b"\n" in self._data or select.select([self._socket], [], [], left)[0]:
                self._record_event(self._message())
        self._events.clear()

    def close(self) -> None:
        self._socket.close()

    def _answer(self, command: str) -> dict[str, Any]:
        while True:
            message = self._message()
            if "return" in message:
                found: dict[str, Any] = message["return"]
                return found
            if "error" in message:
                raise RuntimeError(f"QEMU refused {command}: {message['error']}")
            self._record_event(message)

    def _record_event(self, message: dict[str, Any]) -> None:
        if "event" in message:
            self._events.append(message["event"])

    def _message(self) -> dict[str, Any]:
        while b"\n" not in self._data:
            received = self._socket.recv(1 << 16)
            if not received:
                raise RuntimeError("QEMU closed its QMP connection")
            self._data += received
        line, self._data = self._data.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message


def memory_of(pid: int) -> Iterator[tuple[str, int]]:
    """Yield Yield (name, bytes) of each sum in /proc/PID/smaps_rollup: Rss, Pss, Private_Dirty, …"""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        yield name.removesuffix(":"), int(value) * 1024


def _remove(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()
