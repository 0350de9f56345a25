"""Networks of slots with guests, neighbors and machines outside, in network namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from sandbox_gateway.config import Network
from sandbox_gateway.hosts.kvm_xfs.network import links
from sandbox_gateway.hosts.kvm_xfs.network.addresses import (
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    GUEST_MAC,
    Slot,
    get_volume_address,
)
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.records import NetworkPolicy
from tests.support import session

T = TypeVar("T")


OPEN_POLICY = NetworkPolicy()
ALIBABA_METADATA_ADDRESS = "100.100.100.200"


METADATA_ADDRESSES = (ALIBABA_METADATA_ADDRESS, "169.254.169.254", "168.63.129.16", "192.0.0.192")
"""The addresses of the metadata services of Alibaba Cloud, most other clouds, Azure, and Oracle Cloud."""


NOBODY_UID = 65534
CONNECTION_ERRORS = (ConnectionError, OSError)
_libc = ctypes.CDLL(None, use_errno=True)


def run_inside(path: Path, work: Callable[[], T]) -> T:
    """Run ``work`` in the network namespace at ``path``. Sockets and taps that it opens belong to that namespace."""
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with path.open("rb") as file:
                assert _libc.setns(file.fileno(), 0x40000000) == 0, os.strerror(ctypes.get_errno())
            result.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]


def open_tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, links._TUNSETIFF, struct.pack("16sH22x", name.encode(), links._IFF_TAP | links._IFF_NO_PI))
    return descriptor


def run_ip(*argv: str, check: bool = True) -> None:
    subprocess.run(["ip", *argv], check=check, capture_output=True, timeout=20)


class NetworkNamespace:
    """A network namespace in which tests open sockets."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = Path("/run/netns") / name
        run_ip("netns", "add", name)
        self.run_ip("link", "set", "lo", "up")

    def run_ip(self, *argv: str) -> None:
        run_ip("-n", self.name, *argv)

    def listen(self, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        return run_inside(self.path, lambda: listen(port, kind))

    def connect(self, address: str, port: int, *, timeout: float = 20) -> socket.socket:
        return run_inside(self.path, lambda: socket.create_connection((address, port), timeout))

    def can_reach(self, address: str, port: int, *, timeout: float = 0.8) -> bool:
        """Return whether a connection succeeds.

        If you expect success, pass a longer ``timeout``: a lost first packet is retransmitted only after a second. The
        kernel reports a machine as unreachable after three seconds without an ARP response, so this tries again.
        """
        deadline = time.monotonic() + timeout
        while (remaining_seconds := deadline - time.monotonic()) > 0:
            try:
                self.connect(address, port, timeout=remaining_seconds).close()
                return True
            except CONNECTION_ERRORS:
                time.sleep(0.1)
        return False

    def remove(self) -> None:
        run_ip("netns", "delete", self.name, check=False)


class Guest(NetworkNamespace):
    """A machine on a slot's tap. Like a fork, it does not notice when ``attach`` moves it to another slot."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot.name.replace("-", "g"))
        self._guest_tap = run_inside(self.path, lambda: open_tap("eth0"))
        self.run_ip("link", "set", "eth0", "address", GUEST_MAC, "up")
        self.run_ip("address", "add", f"{GUEST_ADDRESS}/30", "dev", "eth0")
        self.run_ip("route", "add", "default", "via", GATEWAY_ADDRESS)
        self._slot_tap = -1
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread: threading.Thread | None = None
        self.attach(slot)

    def attach(self, slot: Slot) -> None:
        self._detach()
        self._slot_tap = run_inside(slot.path, lambda: open_tap(slot.tap))
        self._thread = threading.Thread(target=self._forward_frames)
        self._thread.start()

    def _forward_frames(self) -> None:
        peers = {self._guest_tap: self._slot_tap, self._slot_tap: self._guest_tap}
        while True:
            ready, _, _ = select.select([*peers, self._stop_reader], [], [])
            if self._stop_reader in ready:
                os.read(self._stop_reader, 1)
                return
            for source in ready:
                with contextlib.suppress(OSError):
                    os.write(peers[source], os.read(source, 65536))

    def _detach(self) -> None:
        if self._thread is not None:
            os.write(self._stop_writer, b"x")
            self._thread.join()
            os.close(self._slot_tap)

    def remove(self) -> None:
        self._detach()
        for descriptor in (self._guest_tap, self._stop_reader, self._stop_writer):
            os.close(descriptor)
        super().remove()


def get_outside_block_number() -> int:
    """Return a number that no concurrent test run uses."""
    return (int(session.get_run_id(), 36) * session.LANE_COUNT + session.LANE) % 16384


def compute_outside_addresses() -> tuple[str, str]:
    """Return the addresses of the host and of the outside machine on the link between them."""
    block_number = get_outside_block_number()
    first, second = (f"198.18.{block_number // 64}.{block_number % 64 * 4 + host}" for host in (1, 2))
    return first, second


class OutsideMachine(NetworkNamespace):
    """A machine outside the host, at ``address``. It also receives packets from ``subnet`` for metadata services."""

    def __init__(self, prefix: str, subnet: str) -> None:
        super().__init__(f"{prefix}out")
        self.host_address, self.address = compute_outside_addresses()
        host_interface = f"{prefix}o"
        run_ip("link", "add", host_interface, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run_ip("address", "add", f"{self.host_address}/30", "dev", host_interface)
        run_ip("link", "set", host_interface, "up")
        self.run_ip("link", "set", "eth0", "up")
        self.run_ip("address", "add", f"{self.address}/30", "dev", "eth0")
        # Use a separate table, so that the routes of this machine and of other tests stay unchanged.
        self._table = str(1000 + get_outside_block_number())
        self._rule = ("from", subnet, "lookup", self._table)
        run_ip("rule", "add", *self._rule)
        self._host_interface = host_interface
        for address in METADATA_ADDRESSES:
            self.add_address(address)

    def add_address(self, address: str) -> None:
        """Receive the packets that slots send to ``address`` as well."""
        self.run_ip("address", "add", f"{address}/32", "dev", "eth0")
        run_ip("route", "add", f"{address}/32", "via", self.address, "table", self._table)

    def remove(self) -> None:
        run_ip("rule", "delete", *self._rule, check=False)
        run_ip("link", "delete", self._host_interface, check=False)
        super().remove()


def listen(port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    server = socket.socket(socket.AF_INET, kind)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("0.0.0.0", port))
    server.settimeout(20)
    if kind is socket.SOCK_STREAM:
        server.listen()
    return server


class World:
    """A slot pool with its guests and outside machines. ``remove`` closes sockets and removes the machines."""

    def __init__(self, pool: SlotPool, network: Network) -> None:
        self.pool = pool
        self.network = network
        self.prefix = network.prefix
        self._namespaces: list[NetworkNamespace] = []
        self._sockets: list[socket.socket] = []

    def add_guest(self, slot: Slot) -> Guest:
        self._namespaces.append(guest := Guest(slot))
        return guest

    def add_outside_machine(self) -> OutsideMachine:
        self._namespaces.append(machine := OutsideMachine(self.prefix, self.network.subnet))
        return machine

    def close_at_end(self, endpoint: socket.socket) -> socket.socket:
        """Register ``endpoint``, so that ``remove`` closes it, and return it."""
        self._sockets.append(endpoint)
        return endpoint

    def remove(self) -> None:
        for endpoint in self._sockets:
            endpoint.close()
        for namespace in self._namespaces:
            namespace.remove()


@contextlib.asynccontextmanager
async def world(*, ready_count: int = 0, **settings: Any) -> AsyncIterator[World]:
    network = Network(**{**session.allocate_network(), "pool": ready_count, **settings})
    pool = SlotPool(network)
    new_world = World(pool, network)
    await pool.open(set())
    try:
        async with asyncio.timeout(60):
            yield new_world
    finally:
        new_world.remove()
        await pool.destroy()
        assert list_slot_objects(network.prefix) == []
        assert not has_address(get_volume_address(network))


def has_address(address: str) -> bool:
    """Return whether a network interface of this machine has ``address``."""
    output = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True, timeout=20).stdout
    return f" {address}/" in output


def list_slot_objects(prefix: str) -> list[str]:
    """Return the names of all objects on this machine that belong to slots whose names start with ``prefix``."""
    names = [path.name for path in Path("/run/netns").iterdir()]
    names += [path.name for path in Path("/sys/class/net").iterdir()]
    command = ["nft", "list", "tables"]
    tables = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    names += [line.split()[-1] for line in tables]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    names += [line.split()[1] for line in mounts if f"/run/netns/{prefix}" in line]
    return [name for name in names if prefix in name]


def can_connect_as(uid: int, address: str, port: int) -> bool:
    program = f"import socket; socket.create_connection(({address!r}, {port}), 20)"
    return run_python_as(uid, program).returncode == 0


def run_python_as(uid: int, program: str, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    # Use Debian's interpreter, because only root may be able to read the one that runs the tests.
    argv = ["/usr/bin/python3", "-I", "-c", program]
    return subprocess.run(argv, user=uid, group=uid, cwd="/", capture_output=True, timeout=20, **settings)
