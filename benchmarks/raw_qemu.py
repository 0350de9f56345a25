"""Measure the floor of a KVM/XFS host: QEMU with the gateway's command line, but without the gateway.

The files, the network slot and the sockets are created before the clock starts. Any program that starts this QEMU on
these files needs at least the measured time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
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

from sandbox_gateway.hosts.connect import AGENT_PORT
from sandbox_gateway.hosts.kvm_xfs.files import reflink
from sandbox_gateway.hosts.kvm_xfs.files.layout import InstanceFiles, Layout
from sandbox_gateway.hosts.kvm_xfs.network.addresses import GUEST_MAC, Slot
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.hosts.kvm_xfs.qemu.command_line import MachineSpec, Platform, build_arguments
from sandbox_gateway.records import NetworkPolicy, Snapshot
from tests.support import session
from tests.support.live import EngineRunner

_CLONE_NEWNET = 0x40000000
_TIMEOUT_SECONDS = 30.0
_BOOT_TIMEOUT_SECONDS = 180.0
_RETRY_SECONDS = 0.01
_BLANK_OPTIONS = ("-object", "-blockdev")
"""The options of the files that a blank machine lacks: its memory, and the two layers of its disk."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Times:
    """When a machine reached two states, in milliseconds since just before its process was created."""

    answer_ms: float
    """QEMU has answered qmp_capabilities and query-status, so its main loop is running."""
    running_ms: float
    """The device state has been loaded and the guest is running again."""


class RawMachine:
    """A QEMU process without a gateway. Call ``start``, measure, then call ``stop``. It can then be started again."""

    def __init__(self, files: InstanceFiles, spec: MachineSpec, slot: Slot, state: Path) -> None:
        self.files = files
        self.slot = slot
        self._spec = spec
        self._state_file = state
        self._log = files.run / "qemu.log"
        self._monitor: Monitor | None = None
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the machine is not started"
        return self._process.pid

    def start(self, *, stepwise: bool = False, as_root: bool = False) -> Times:
        """Start QEMU and wait until the guest runs again.

        ``stepwise``: load the state with a separate command after QEMU has answered, to time both steps separately.
        ``as_root``: do not change the user, for comparison with ``start_blank``.
        """
        with self._starting(defer_load=stepwise, as_root=as_root) as (start_time, address, state):
            self._monitor = monitor = Monitor(address)
            monitor.execute("qmp_capabilities")
            status = monitor.execute("query-status")
            answer_time = time.perf_counter()
            if stepwise:
                monitor.execute("migrate-incoming", {"uri": f"fd:{state}"})
            _wait_until_running(monitor, status)
            resume_time = time.perf_counter()
        return Times((answer_time - start_time) * 1000, (resume_time - start_time) * 1000)

    def start_blank(self) -> None:
        """Start QEMU without memory and disks, and let it wait before it creates the machine.

        QEMU does not change its user, because it would do so before it opens the files of ``load_into_blank``.
        """
        with self._starting(defer_load=True, as_root=True, blank=True) as (_, address, _):
            self._monitor = Monitor(address)
            self._monitor.execute("qmp_capabilities")

    def load_into_blank(self) -> float:
        """Turn a blank machine into this one. Returns the milliseconds until the guest runs."""
        assert self._monitor is not None
        monitor = self._monitor
        arguments = build_arguments(self._spec, self.files, qmp_fd=0, line_fd=0, state_fd=0)
        memory, *disks = (
            _parse_option(arguments[position + 1])
            for position, argument in enumerate(arguments)
            if argument in _BLANK_OPTIONS
        )
        start_time = time.perf_counter()
        monitor.execute("object-add", memory)
        monitor.execute("qom-set", {"path": "/machine", "property": "memory-backend", "value": memory["id"]})
        for disk in disks:
            monitor.execute("blockdev-add", disk)
        monitor.execute("x-exit-preconfig")
        with self._state_file.open("rb") as state:
            monitor.pass_named_descriptor(state.fileno(), "state")
        monitor.execute("migrate-incoming", {"uri": "fd:state"})
        _wait_until_running(monitor, monitor.execute("query-status"))
        return (time.perf_counter() - start_time) * 1000

    def start_as_migration_target(self) -> None:
        """Start QEMU so that it waits for a migration, with a file of its own in which the memory arrives."""
        self.files.memory.unlink()
        self.files.memory.touch()
        os.truncate(self.files.memory, self._spec.memory_mb << 20)
        with self._starting(defer_load=True, hold=True, shares_memory=True) as (_, address, _):
            self._monitor = Monitor(address)
            self._monitor.execute("qmp_capabilities")

    def start_without_guest(self) -> None:
        """Start QEMU without loading a state, so that no guest runs."""
        with self._starting(defer_load=True) as (_, address, _):
            self._monitor = Monitor(address)
            self._monitor.execute("qmp_capabilities")

    def start_and_ping(self, *, boot: bool = False) -> float:
        """Start QEMU and send the agent a message over the serial port. Return the milliseconds until its answer.

        Does not execute QMP commands. ``boot``: boot the guest from its disk instead of loading the device state.
        """
        message = b"?" + uuid.uuid4().bytes
        with self._starting(defer_load=False, boot=boot) as (start_time, _, _):
            assert self._line is not None
            self._line.settimeout(_BOOT_TIMEOUT_SECONDS if boot else _TIMEOUT_SECONDS)
            self._line.sendall(message)
            self._read_until(message)
            answer_time = time.perf_counter()
            self._line.sendall(b"={}")
        return (answer_time - start_time) * 1000

    def boot_until_init(self) -> tuple[float, float]:
        """Boot without an initrd. Return the time until the kernel looks for init, and QEMU's CPU time, both in ms.

        Without the initrd, the kernel has no driver for the disk. It panics, and QEMU exits.
        """
        with self._starting(defer_load=False, boot=True, initrd=False) as (start_time, _, _):
            assert self._process is not None
            pidfd = os.pidfd_open(self._process.pid)
            try:
                has_ended = bool(select.select([pidfd], [], [], _BOOT_TIMEOUT_SECONDS)[0])
            finally:
                os.close(pidfd)
            if not has_ended:
                raise RuntimeError(f"the kernel did not look for init within {_BOOT_TIMEOUT_SECONDS:g} s")
            end_time = time.perf_counter()
            _, status, usage = os.wait4(self._process.pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(status)
        if self._process.returncode != 0:
            raise RuntimeError(f"QEMU failed: {self._read_log_tail()}")
        self._process = None
        return (end_time - start_time) * 1000, (usage.ru_utime + usage.ru_stime) * 1000

    def start_paused(self) -> None:
        """Start QEMU, load the state, and leave the guest paused."""
        with self._starting(defer_load=False, hold=True) as (_, address, _):
            self._monitor = Monitor(address)
            self._monitor.execute("qmp_capabilities")
            while self._monitor.execute("query-status")["status"] == "inmigrate":
                time.sleep(_RETRY_SECONDS)

    def resume_and_ping(self) -> tuple[float, float]:
        """Resume the guest of a paused machine while a message is waiting on its serial port.

        Returns the milliseconds until QEMU has answered, and until the agent has answered.
        """
        assert self._line is not None and self._monitor is not None
        message = b"?" + uuid.uuid4().bytes
        self._line.settimeout(_TIMEOUT_SECONDS)
        self._line.sendall(message)
        start_time = time.perf_counter()
        self._monitor.execute("cont")
        resume_time = time.perf_counter()
        self._read_until(message)
        answer_time = time.perf_counter()
        self._line.sendall(b"={}")
        return (resume_time - start_time) * 1000, (answer_time - start_time) * 1000

    def _read_until(self, message: bytes) -> None:
        assert self._line is not None
        received = b""
        while message not in received:
            chunk = self._line.recv(4096)
            if not chunk:
                raise RuntimeError(f"QEMU exited before its guest answered: {self._read_log_tail()}")
            received += chunk

    @contextlib.contextmanager
    def _starting(
        self,
        *,
        defer_load: bool,
        hold: bool = False,
        boot: bool = False,
        initrd: bool = True,
        as_root: bool = False,
        blank: bool = False,
        shares_memory: bool = False,
    ) -> Iterator[tuple[float, str, int]]:
        """Start QEMU. Yields the start time, the address of the QMP socket, and the descriptor of the device state.

        ``boot``: boot the kernel instead of loading the device state. ``as_root``: do not change the user. ``blank``:
        see ``start_blank``. ``shares_memory``: what the guest writes goes to the memory file.
        """
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener,
            self._log.open("ab") as output,
            self._state_file.open("rb") as state,
        ):
            address = f"\0bench-{uuid.uuid4()}"
            listener.bind(address)
            listener.listen(1)
            self._line, qemu_line = socket.socketpair()
            with qemu_line:
                fds = [listener.fileno(), qemu_line.fileno(), state.fileno()]
                state_fd = None if boot else fds[2]
                argv = build_arguments(
                    self._spec, self.files, qmp_fd=fds[0], line_fd=fds[1], state_fd=state_fd, hold=hold
                )
                if not initrd:
                    _remove_option(argv, "-initrd")
                if defer_load:
                    argv[argv.index("-incoming") + 1] = "defer"
                if as_root and "-runas" in argv:
                    _remove_option(argv, "-runas")
                if shares_memory:
                    argv[argv.index("-object") + 1] = argv[argv.index("-object") + 1].replace("share=off", "share=on")
                if blank:
                    for option in _BLANK_OPTIONS:
                        while option in argv:
                            _remove_option(argv, option)
                    argv[argv.index("-M") + 1] = argv[argv.index("-M") + 1].replace(",memory-backend=mem", "")
                    argv.append("-preconfig")
                start_time = self._spawn_qemu(argv, fds, output.fileno())
            yield start_time, address, state.fileno()

    def execute(self, command: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        assert self._monitor is not None, "the machine is not started"
        return self._monitor.execute(command, arguments)

    def pass_descriptor(self, descriptor: int) -> str:
        """Pass an open file to QEMU. Returns QEMU's name for it."""
        assert self._monitor is not None, "the machine is not started"
        return self._monitor.pass_descriptor(descriptor)

    def pass_named_descriptor(self, descriptor: int, name: str) -> None:
        """Pass an open file to QEMU under a name of our choice."""
        assert self._monitor is not None, "the machine is not started"
        self._monitor.pass_named_descriptor(descriptor, name)

    def wait_until_connected(self) -> None:
        """Wait until the guest accepts a connection to its agent's port. Raises RuntimeError after a timeout."""
        deadline = time.perf_counter() + _TIMEOUT_SECONDS
        attempts: list[socket.socket] = []
        try:
            while time.perf_counter() < deadline:
                attempt = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
                attempts.append(attempt)
                with contextlib.suppress(BlockingIOError):
                    attempt.connect((self.slot.host_address, AGENT_PORT))
                _, ready, _ = select.select([], attempts[-16:], [], _RETRY_SECONDS)
                if any(each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 for each in ready):
                    return
        finally:
            for each in attempts:
                each.close()
        raise RuntimeError(f"the guest did not answer within {_TIMEOUT_SECONDS:g} s: {self._read_log_tail()}")

    def stop(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(_TIMEOUT_SECONDS)
            self._process = None
        if self._line is not None:
            self._line.close()
            self._line = None

    def _spawn_qemu(self, argv: list[str], pass_fds: list[int], output: int) -> float:
        """Start QEMU in the slot's network namespace. Returns the time just before the start."""
        start_time = 0.0

        def start_in_namespace() -> None:  # runs in a new thread, because it changes the thread's namespace
            nonlocal start_time
            with self.slot.path.open("rb") as namespace:
                if _libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"setns {self.slot.path}")
            start_time = time.perf_counter()
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                start_new_session=True,
                cwd="/",
            )

        thread = threading.Thread(target=start_in_namespace)
        thread.start()
        thread.join()
        if self._process is None:
            raise RuntimeError(f"QEMU could not be started in {self.slot.path}")
        return start_time

    def _read_log_tail(self) -> str:
        return self._log.read_text(errors="replace").strip()[-500:]


class RawQemu:
    """A pool of raw machines from one snapshot, each with the disk, slot and user that it would have in a gateway."""

    def __init__(self, live: EngineRunner, platform: Platform, snapshot: Snapshot, directory: Path) -> None:
        self._live = live
        self._platform = platform
        self._snapshot = snapshot
        self._source = Layout(live.config.host.state_root).snapshot(snapshot)
        self._directory = directory
        network = live.config.network.model_copy(update={**session.allocate_network(), "pool": 0})
        self._uid_base = live.config.kvm_xfs.uid_base
        self._prefix = network.prefix
        # Create the pool on the thread of the event loop, because it contains asyncio events.
        self._slots: SlotPool = live.call(SlotPool, network, uid_base=self._uid_base)
        self._machines: list[RawMachine] = []

    def __enter__(self) -> RawQemu:
        self._directory.mkdir(mode=0o711)
        self._live.do(self._slots.open(set()))
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self._machines:
            machine.stop()
        for machine in self._machines:
            self._live.do(self._slots.release(machine.slot))
        self._live.do(self._slots.destroy())
        _remove(self._directory)

    def prepare_machines(self, count: int) -> list[RawMachine]:
        """Return ``count`` machines that are not running. Stops earlier machines and reuses them with new disks."""
        while len(self._machines) < count:
            self._machines.append(self._create_machine(len(self._machines)))
        for machine in self._machines[:count]:
            machine.stop()
            machine.files.disk.unlink()
            reflink.clone(self._source.disk, machine.files.disk)
        return self._machines[:count]

    def start_concurrently(self, count: int, concurrency: int) -> float:
        """Start ``count`` machines, ``concurrency`` at a time. Returns the milliseconds until all are running."""
        machines = self.prepare_machines(count)
        with ThreadPoolExecutor(concurrency) as pool:
            list(pool.map(lambda machine: None, machines))  # create the threads before the clock starts
            start_time = time.perf_counter()
            list(pool.map(lambda machine: machine.start(), machines))
            return (time.perf_counter() - start_time) * 1000

    def _create_machine(self, number: int) -> RawMachine:
        slot = self._live.do(self._slots.take(NetworkPolicy()))
        files = InstanceFiles(self._directory / str(number))
        files.directory.mkdir(mode=0o711)
        files.run.mkdir(mode=0o700)
        reflink.clone(self._source.disk, files.disk)
        files.kernel.hardlink_to(self._source.kernel)
        files.initrd.hardlink_to(self._source.initrd)
        files.memory.hardlink_to(self._source.memory)
        kvm_xfs = self._live.config.kvm_xfs
        spec = MachineSpec(
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
        return RawMachine(files, spec, slot, self._source.device_state)


class Monitor:
    """A minimal QMP client over a plain socket, which executes one command at a time."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(_TIMEOUT_SECONDS)
        self._socket.connect(address)
        self._buffer = b""
        self._events: list[str] = []
        self._read_message()  # the greeting

    def execute(self, command: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        self._socket.sendall(json.dumps({"execute": command, "arguments": arguments or {}}).encode())
        return self._read_answer(command)

    def pass_descriptor(self, descriptor: int) -> str:
        socket.send_fds(self._socket, [b'{"execute": "add-fd"}'], [descriptor])
        return f"/dev/fdset/{self._read_answer('add-fd')['fdset-id']}"

    def pass_named_descriptor(self, descriptor: int, name: str) -> None:
        """Pass an open file to QEMU under a name of our choice."""
        request = {"execute": "getfd", "arguments": {"fdname": name}}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [descriptor])
        self._read_answer("getfd")

    def wait_for_event(self, name: str, seconds: float) -> None:
        """Wait for an event for at most ``seconds``."""
        deadline = time.perf_counter() + seconds
        while name not in self._events and (remaining := deadline - time.perf_counter()) > 0:
            if b"\n" in self._buffer or select.select([self._socket], [], [], remaining)[0]:
                self._record_event(self._read_message())
        self._events.clear()

    def close(self) -> None:
        self._socket.close()

    def _read_answer(self, command: str) -> dict[str, Any]:
        while True:
            message = self._read_message()
            if "return" in message:
                result: dict[str, Any] = message["return"]
                return result
            if "error" in message:
                raise RuntimeError(f"QEMU rejected {command}: {message['error']}")
            self._record_event(message)

    def _record_event(self, message: dict[str, Any]) -> None:
        if "event" in message:
            self._events.append(message["event"])

    def _read_message(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            received = self._socket.recv(1 << 16)
            if not received:
                raise RuntimeError("QEMU closed its QMP connection")
            self._buffer += received
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message


def _wait_until_running(monitor: Monitor, status: dict[str, Any]) -> None:
    while status["status"] != "running":
        monitor.wait_for_event("RESUME", 0.005)
        status = monitor.execute("query-status")


def _remove_option(argv: list[str], option: str) -> None:
    position = argv.index(option)
    del argv[position : position + 2]


def _parse_option(text: str) -> dict[str, Any]:
    """Return the arguments of object-add or blockdev-add that correspond to an option of the command line."""
    arguments: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = item.rpartition("=")
        parsed_value = {"on": True, "off": False}.get(value, value)
        if name == "size":
            parsed_value = int(value.removesuffix("M")) << 20
        *parents, key = (name or "qom-type").split(".")
        target = arguments
        for parent in parents:
            target = target.setdefault(parent, {})
        target[key] = parsed_value
    return arguments


def read_memory_usage(pid: int) -> Iterator[tuple[str, int]]:
    """Yield the name and the size in bytes of each sum in /proc/PID/smaps_rollup: Rss, Pss, Private_Dirty, …"""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        yield name.removesuffix(":"), int(value) * 1024


def _remove(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()
