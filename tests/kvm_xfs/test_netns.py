"""Network slots, with real packets: the guest is a network namespace whose frames pass through the slot's own tap,
carried by a thread in the place of QEMU; "elsewhere" is another namespace behind the host.
"""

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
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sandbox_gateway.config import Network
from sandbox_gateway.errors import BackendFailed, Busy, GatewayError, Invalid
from sandbox_gateway.hosts.addresses import AGENT_PORT, CODE_PORT, name_servers
from sandbox_gateway.hosts.connect import connect
from sandbox_gateway.hosts.kvm_xfs.network import links, namespaces
from sandbox_gateway.hosts.kvm_xfs.network.addresses import (
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    GUEST_MAC,
    VOLUME_PORTS,
    Slot,
    host_table,
    volume_address,
    volume_space,
)
from sandbox_gateway.hosts.kvm_xfs.network.rules import VOLUME_ACCESS
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.records import NetworkPolicy
from tests.support import session

pytestmark = pytest.mark.usefixtures("need_root")

T = TypeVar("T")
OPEN = NetworkPolicy()
CLOSED = NetworkPolicy(allow_internet=False)
METADATA = "100.100.100.200"
METADATA_SERVICES = (METADATA, "169.254.169.254", "168.63.129.16", "192.0.0.192")
"""Metadata services of Alibaba Cloud, most clouds, Azure, and Oracle Cloud."""
NOBODY = 65534
REFUSED = (ConnectionError, OSError)
_libc = ctypes.CDLL(None, use_errno=True)


# --- the world around the slots --------------------------------------------------------------------------------


def run_inside(path: Path, work: Callable[[], T]) -> T:
    """Run ``work`` in the network namespace at ``path``; the sockets and taps that it opens stay in that namespace."""
    result: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            with path.open("rb") as file:
                assert _libc.setns(file.fileno(), 0x40000000) == 0, os.strerror(ctypes.get_errno())
            result.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]


def open_tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    fcntl.ioctl(tap, links._TUNSETIFF, struct.pack("16sH22x", name.encode(), links._IFF_TAP | links._IFF_NO_PI))
    return tap


def run_ip(*argv: str, check: bool = True) -> None:
    subprocess.run(["ip", *argv], check=check, capture_output=True, timeout=20)


class Space:
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
        """Give a longer ``timeout`` where it should: a first packet that is lost is sent again after a second."""
        try:
            self.connect(address, port, timeout=timeout).close()
        except REFUSED:
            return False
        return True

    def end(self) -> None:
        run_ip("netns", "delete", self.name, check=False)


class Guest(Space):
    """A machine on a slot's tap. ``attach`` moves it to another slot without its notice, as a fork does."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot.name.replace("-", "g"))
        self._own = run_inside(self.path, lambda: open_tap("eth0"))
        self.run_ip("link", "set", "eth0", "address", GUEST_MAC, "up")
        self.run_ip("address", "add", f"{GUEST_ADDRESS}/30", "dev", "eth0")
        self.run_ip("route", "add", "default", "via", GATEWAY_ADDRESS)
        self._slot_tap = -1
        self._stop, self._stopped = os.pipe()
        self._thread: threading.Thread | None = None
        self.attach(slot)

    def attach(self, slot: Slot) -> None:
        self._detach()
        self._slot_tap = run_inside(slot.path, lambda: open_tap(slot.tap))
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        other = {self._own: self._slot_tap, self._slot_tap: self._own}
        while True:
            ready, _, _ = select.select([*other, self._stop], [], [])
            if self._stop in ready:
                os.read(self._stop, 1)
                return
            for source in ready:
                with contextlib.suppress(OSError):
                    os.write(other[source], os.read(source, 65536))

    def _detach(self) -> None:
        if self._thread is not None:
            os.write(self._stopped, b"x")
            self._thread.join()
            os.close(self._slot_tap)

    def end(self) -> None:
        self._detach()
        for descriptor in (self._own, self._stop, self._stopped):
            os.close(descriptor)
        super().end()


class OutsideMachine(Space):
    """A machine beyond the host at ``address``, which also receives ``subnet``'s packets to metadata services."""

    def __init__(self, prefix: str, subnet: str) -> None:
        super().__init__(f"{prefix}out")
        block = (int(session.run_id(), 36) * session.LANES + session.LANE) % 16384
        near, self.address = (f"198.18.{block // 64}.{block % 64 * 4 + host}" for host in (1, 2))
        self.host_address = near
        host_end = f"{prefix}o"
        run_ip("link", "add", host_end, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run_ip("address", "add", f"{near}/30", "dev", host_end)
        run_ip("link", "set", host_end, "up")
        self.run_ip("link", "set", "eth0", "up")
        self.run_ip("address", "add", f"{self.address}/30", "dev", "eth0")
        # Its own table: the routes of the machine and of other tests stay unchanged.
        self._rule = ("from", subnet, "lookup", str(1000 + block))
        run_ip("rule", "add", *self._rule)
        for service in METADATA_SERVICES:
            self.run_ip("address", "add", f"{service}/32", "dev", "eth0")
            run_ip("route", "add", f"{service}/32", "via", self.address, "table", str(1000 + block))
        self._link = host_end

    def end(self) -> None:
        run_ip("rule", "delete", *self._rule, check=False)
        run_ip("link", "delete", self._link, check=False)
        super().end()


def listen(port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    server = socket.socket(socket.AF_INET, kind)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("0.0.0.0", port))
    server.settimeout(20)
    if kind is socket.SOCK_STREAM:
        server.listen()
    return server


class World:
    """A pool with its surroundings, removed at the end."""

    def __init__(self, pool: SlotPool, network: Network) -> None:
        self.pool = pool
        self.network = network
        self.prefix = network.prefix
        self._spaces: list[Space] = []
        self._sockets: list[socket.socket] = []

    def guest(self, slot: Slot) -> Guest:
        self._spaces.append(guest := Guest(slot))
        return guest

    def elsewhere(self) -> OutsideMachine:
        self._spaces.append(elsewhere := OutsideMachine(self.prefix, self.network.subnet))
        return elsewhere

    def keep(self, endpoint: socket.socket) -> socket.socket:
        self._sockets.append(endpoint)
        return endpoint

    def end(self) -> None:
        for endpoint in self._sockets:
            endpoint.close()
        for space in self._spaces:
            space.end()


@contextlib.asynccontextmanager
async def world(*, ready: int = 0, **settings: Any) -> AsyncIterator[World]:
    network = Network(**{**session.network(), "pool": ready, **settings})
    pool = SlotPool(network)
    around = World(pool, network)
    await pool.open(set())
    try:
        async with asyncio.timeout(60):
            yield around
    finally:
        around.end()
        await pool.destroy()
        assert traces(network.prefix) == []
        assert not has_address(volume_address(network))


def has_address(address: str) -> bool:
    """Whether this machine has an address."""
    listed = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True, timeout=20).stdout
    return f" {address}/" in listed


def traces(prefix: str) -> list[str]:
    """Names of all objects that slots of ``prefix`` have on the machine."""
    names = [path.name for path in Path("/run/netns").iterdir()]
    names += [path.name for path in Path("/sys/class/net").iterdir()]
    tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True, timeout=20).stdout
    names += [line.split()[-1] for line in tables.splitlines()]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    names += [line.split()[1] for line in mounts if f"/run/netns/{prefix}" in line]
    return [name for name in names if prefix in name]


async def wait_for_ready_slots(pool: SlotPool, count: int) -> None:
    for _ in range(2000):
        if len(pool._ready) >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no slots were made ready")


# --- packets ---------------------------------------------------------------------------------------------------


async def test_the_host_reaches_every_port_of_the_guest() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN)
        guest = w.guest(slot)
        for port in (22, 8000, AGENT_PORT):
            server = w.keep(guest.listen(port))
            client = w.keep(await connect(slot.host_address, port))
            accepted, peer = server.accept()
            client.sendall(b"ping")
            assert w.keep(accepted).recv(4) == b"ping"
            assert peer[0] == GATEWAY_ADDRESS
        server = w.keep(guest.listen(5300, socket.SOCK_DGRAM))
        client = w.keep(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        client.settimeout(20)
        client.sendto(b"ping", (slot.host_address, 5300))
        data, back = server.recvfrom(10)
        server.sendto(data + b"pong", back)
        assert client.recvfrom(10)[0] == b"pingpong"


async def test_only_the_gateway_reaches_agents() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN)
        guest = w.guest(slot)
        for port in (8000, AGENT_PORT, CODE_PORT):
            w.keep(guest.listen(port))
        assert connects_as(NOBODY, slot.host_address, 8000)
        assert not connects_as(NOBODY, slot.host_address, AGENT_PORT)
        assert not connects_as(NOBODY, slot.host_address, CODE_PORT)
        for port in (AGENT_PORT, CODE_PORT):
            assert not connects_as(0, slot.host_address, port), "another service of root's"
            w.keep(await connect(slot.host_address, port))


def connects_as(uid: int, address: str, port: int) -> bool:
    program = f"import socket; socket.create_connection(({address!r}, {port}), 20)"
    return run_python_as(uid, program).returncode == 0


def run_python_as(uid: int, program: str, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    # Debian's interpreter: the one that runs the tests may be readable only by root.
    argv = ["/usr/bin/python3", "-I", "-c", program]
    return subprocess.run(argv, user=uid, group=uid, cwd="/", capture_output=True, timeout=20, **settings)


async def test_the_guest_reaches_the_outside_under_the_hosts_address() -> None:
    async with world() as w:
        guest = w.guest(await w.pool.take(OPEN))
        elsewhere = w.elsewhere()
        server = w.keep(elsewhere.listen(443))
        client = w.keep(guest.connect(elsewhere.address, 443))
        accepted, peer = server.accept()
        w.keep(accepted).sendall(b"hello")
        assert client.recv(5) == b"hello"
        assert peer[0] == elsewhere.host_address
        assert client.getsockname()[0] == GUEST_ADDRESS


async def test_host_services_and_other_sandboxes_are_unreachable() -> None:
    async with world() as w:
        slot, other = await w.pool.take(OPEN), await w.pool.take(NetworkPolicy(allow_out=["0.0.0.0/0"]))
        guest, neighbour = w.guest(slot), w.guest(other)
        elsewhere = w.elsewhere()
        w.keep(listen(48123))
        w.keep(guest.listen(48124))
        w.keep(neighbour.listen(48124))
        assert not guest.can_reach(slot.veth_address, 48123)
        assert not guest.can_reach(GATEWAY_ADDRESS, 48123)
        assert not guest.can_reach(elsewhere.host_address, 48123)
        # Not even a policy that allows everything opens these.
        for sandbox, target in ((guest, other), (neighbour, slot)):
            assert not sandbox.can_reach(target.host_address, 48124)
            assert not sandbox.can_reach(target.veth_address, 48123)
        assert not neighbour.can_reach(elsewhere.host_address, 48123)
        assert not elsewhere.can_reach(slot.host_address, 48124)


@pytest.mark.parametrize(
    ("policy", "reached"),
    [
        (OPEN, True),
        (CLOSED, False),
        (NetworkPolicy(allow_internet=False, allow_out=["198.18.0.0/15"]), True),
        (NetworkPolicy(allow_internet=False, allow_out=["203.0.113.7"]), False),
        (NetworkPolicy(deny_out=["198.18.0.0/15", "198.18.0.0/16"]), False),
        (NetworkPolicy(allow_out=["198.18.0.0/16"], deny_out=["0.0.0.0/0"]), True),
    ],
)
async def test_the_policy_is_enforced(policy: NetworkPolicy, reached: bool) -> None:
    async with world() as w:
        guest = w.guest(await w.pool.take(policy))
        elsewhere = w.elsewhere()
        w.keep(elsewhere.listen(80))
        for _ in range(1 if reached else 8):
            assert guest.can_reach(elsewhere.address, 80, timeout=20 if reached else 0.8) is reached
        if not reached:
            with pytest.raises(OSError, match="No route to host"):
                guest.connect(elsewhere.address, 80)


async def test_a_new_policy_applies_to_open_connections_but_not_to_the_hosts() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN)
        guest = w.guest(slot)
        elsewhere = w.elsewhere()
        server, service = w.keep(elsewhere.listen(80)), w.keep(guest.listen(8000))
        out = w.keep(guest.connect(elsewhere.address, 80))
        far = w.keep(server.accept()[0])
        inwards = w.keep(socket.create_connection((slot.host_address, 8000), 20))
        near = w.keep(service.accept()[0])
        far.settimeout(0.6)

        await w.pool.apply(slot, CLOSED)
        with contextlib.suppress(OSError):
            out.sendall(b"secret")
        with pytest.raises(TimeoutError):
            far.recv(6)
        near.sendall(b"still")
        assert inwards.recv(5) == b"still"

        await w.pool.apply(slot, OPEN)
        far.settimeout(20)
        assert far.recv(6) == b"secret"


async def test_metadata_services_must_be_allowed_by_address() -> None:
    async with world(dns=[METADATA]) as w:
        slot = await w.pool.take(OPEN)
        guest = w.guest(slot)
        elsewhere = w.elsewhere()
        for port in (80, 53):
            w.keep(elsewhere.listen(port))
        assert not guest.can_reach(METADATA, 80)
        assert not guest.can_reach("169.254.169.254", 80)
        assert guest.can_reach(METADATA, 53, timeout=20), "some clouds' name server is at that address"
        await w.pool.apply(slot, NetworkPolicy(allow_out=[METADATA]))
        assert guest.can_reach(METADATA, 80, timeout=20)
        await w.pool.apply(slot, CLOSED)
        assert not guest.can_reach(METADATA, 53)


async def test_only_packets_from_the_guests_own_address_leave() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN)
        guest = w.guest(slot)
        elsewhere = w.elsewhere()
        server = w.keep(elsewhere.listen(5000, socket.SOCK_DGRAM))
        guest.run_ip("address", "add", "10.99.99.99/32", "dev", "eth0")
        guest.run_ip("-6", "address", "add", "fd99::1/64", "dev", "eth0", "nodad")

        def send(source: str) -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.bind((source, 0))
                client.sendto(source.encode(), (elsewhere.address, 5000))

        run_inside(guest.path, lambda: send("10.99.99.99"))
        run_inside(guest.path, lambda: send(GUEST_ADDRESS))
        assert server.recvfrom(20)[0] == GUEST_ADDRESS.encode()
        server.settimeout(0.3)
        with pytest.raises(TimeoutError):
            server.recvfrom(20)
        assert run_inside(slot.path, lambda: ipv6_of(slot.tap)) in ("1", ""), "the slot speaks no IPv6"


def ipv6_of(name: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").read_text().strip()
    return ""


async def test_a_forks_inherited_connections_are_reset() -> None:
    async with world() as w:
        first, second = await w.pool.take(OPEN), await w.pool.take(OPEN)
        guest = w.guest(first)
        elsewhere = w.elsewhere()
        server = w.keep(elsewhere.listen(80))
        client = w.keep(guest.connect(elsewhere.address, 80))
        w.keep(server.accept()[0])
        guest.attach(second)
        start = time.monotonic()
        client.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert time.monotonic() - start < 1
        assert guest.can_reach(elsewhere.address, 80, timeout=20), (
            "and what it opens anew works, with its old ARP cache"
        )


# --- volume servers --------------------------------------------------------------------------------------------


def change_access(network: Network, action: str, slot: Slot, port: int) -> None:
    """``add`` or ``delete``: grant or revoke a sandbox's access to a port of the servers' address."""
    element = f"{action} element inet {host_table(network)} {VOLUME_ACCESS} {{ {slot.host_address} . {port} }}"
    subprocess.run(["nft", element], check=True, timeout=20)


def serve(w: World, port: int) -> socket.socket:
    server = run_inside(volume_space(w.network), lambda: socket.create_server((volume_address(w.network), port)))
    server.settimeout(20)
    return w.keep(server)


@pytest.mark.parametrize("policy", [OPEN, CLOSED])
async def test_a_volume_port_leads_only_permitted_sandboxes_to_the_gateway(policy: NetworkPolicy) -> None:
    async with world() as w:
        slot, other = await w.pool.take(policy), await w.pool.take(OPEN)
        guest, stranger = w.guest(slot), w.guest(other)
        port, next_port = VOLUME_PORTS[-1], VOLUME_PORTS[-1] + 1
        server, _ = serve(w, port), serve(w, next_port)
        change_access(w.network, "add", slot, port)
        client = w.keep(guest.connect(GATEWAY_ADDRESS, port))
        accepted, peer = server.accept()
        w.keep(accepted).sendall(b"hello")
        assert client.recv(5) == b"hello"
        assert peer[0] == slot.host_address
        assert not guest.can_reach(GATEWAY_ADDRESS, next_port)
        assert not stranger.can_reach(GATEWAY_ADDRESS, port)
        # The port is open only at the gateway's address: not at the servers' own address, nor at those of slots.
        for target in (volume_address(w.network), other.veth_address, slot.host_address):
            assert not guest.can_reach(target, port)


async def test_revoked_volume_access_is_cut_off_at_once() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN)
        guest = w.guest(slot)
        server = serve(w, VOLUME_PORTS[0])
        change_access(w.network, "add", slot, VOLUME_PORTS[0])
        client = w.keep(guest.connect(GATEWAY_ADDRESS, VOLUME_PORTS[0]))
        accepted = w.keep(server.accept()[0])
        accepted.settimeout(0.6)
        change_access(w.network, "delete", slot, VOLUME_PORTS[0])
        client.sendall(b"secret")
        with pytest.raises(TimeoutError):
            accepted.recv(6)
        change_access(w.network, "add", slot, VOLUME_PORTS[0])
        accepted.settimeout(20)
        assert accepted.recv(6) == b"secret", "a guest that is let in again goes on"


async def test_a_forks_volume_connection_is_reset_and_made_again() -> None:
    async with world() as w:
        first, second = await w.pool.take(OPEN), await w.pool.take(OPEN)
        guest = w.guest(first)
        server = serve(w, VOLUME_PORTS[0])
        for slot in (first, second):
            change_access(w.network, "add", slot, VOLUME_PORTS[0])
        client = w.keep(guest.connect(GATEWAY_ADDRESS, VOLUME_PORTS[0]))
        w.keep(server.accept()[0])
        guest.attach(second)
        start = time.monotonic()
        client.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert time.monotonic() - start < 1
        w.keep(guest.connect(GATEWAY_ADDRESS, VOLUME_PORTS[0]))
        accepted, peer = server.accept()
        w.keep(accepted)
        assert peer[0] == second.host_address


async def test_nobody_else_reaches_the_volume_servers() -> None:
    async with world() as w:
        elsewhere = w.elsewhere()
        address = volume_address(w.network)
        serve(w, VOLUME_PORTS[0])
        elsewhere.run_ip("route", "add", f"{address}/32", "via", elsewhere.host_address)
        w.keep(listen(48125))
        assert elsewhere.can_reach(elsewhere.host_address, 48125, timeout=20), "the way there is open"
        assert not elsewhere.can_reach(address, VOLUME_PORTS[0])
        assert not connects_as(NOBODY, address, VOLUME_PORTS[0])
        assert not connects_as(0, address, VOLUME_PORTS[0])
        w.keep(await connect(address, VOLUME_PORTS[0]))  # The gateway checks the servers.


# --- slots -----------------------------------------------------------------------------------------------------


async def test_taking_a_ready_slot_is_free() -> None:
    async with world(ready=2) as w:
        await wait_for_ready_slots(w.pool, 2)
        start = time.perf_counter()
        slot = await w.pool.take(OPEN)
        assert time.perf_counter() - start < 0.01
        assert slot.path.exists()
        await wait_for_ready_slots(w.pool, 2)


async def test_the_number_of_a_returned_slot_is_not_reused_at_once() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN)
        await w.pool.release(slot)
        await w.pool.release(slot)
        assert (await w.pool.take(OPEN)).number == slot.number + 1
        for _ in range(300):
            if not slot.path.exists():
                break
            await asyncio.sleep(0.01)
        assert not slot.path.exists()


async def test_exhausted_addresses_are_reported() -> None:
    subnet = session.network()["subnet"].split("/")[0] + "/28"
    async with world(subnet=subnet, ready=1) as w:
        slots = [await w.pool.take(OPEN) for _ in range(2)]
        await wait_for_ready_slots(w.pool, 1)
        slots.append(await w.pool.take(OPEN))
        assert len({slot.number for slot in slots}) == 3
        assert volume_address(w.network) not in {slot.host_address for slot in slots}
        with pytest.raises(Busy, match="all 3 network slots"):
            await w.pool.take(OPEN)
        await w.pool.release(slots[1])
        await wait_for_ready_slots(w.pool, 1)
        assert (await w.pool.take(OPEN)).number == slots[1].number


@pytest.mark.parametrize("bad", ["example.org", "::/0", "10.0.0.0/33", ""])
async def test_an_invalid_policy_is_refused_before_any_work(bad: str) -> None:
    async with world() as w:
        for policy in (NetworkPolicy(allow_out=[bad]), NetworkPolicy(deny_out=[bad])):
            with pytest.raises(Invalid, match="not an IPv4 address or CIDR"):
                await w.pool.take(policy)
        slot = await w.pool.take(OPEN)
        with pytest.raises(Invalid):
            await w.pool.apply(slot, NetworkPolicy(allow_out=[bad]))


async def test_a_cancelled_request_leaves_its_slot_for_the_next() -> None:
    async with world() as w:
        for delay in (0, 0.005, 0.02, 0.03):
            taker = asyncio.ensure_future(w.pool.take(OPEN))
            await asyncio.sleep(delay)
            taker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await taker
        await w.pool.close()


async def test_only_the_slots_user_can_open_its_tap() -> None:
    network = Network(**{**session.network(), "pool": 0})
    pool = SlotPool(network, uid_base=2_000_000)
    await pool.open(set())
    try:
        slot = await pool.take(OPEN)
        assert slot.uid == 2_000_000 + slot.number
        assert run_inside(slot.path, lambda: can_open_tap(slot.uid))
        assert not run_inside(slot.path, lambda: can_open_tap(slot.uid + 1))
    finally:
        await pool.destroy()


def can_open_tap(uid: int) -> bool:
    program = (
        "import fcntl, struct, sys; "
        f"fcntl.ioctl(0, {links._TUNSETIFF}, struct.pack('16sH22x', b'tap0', {links._IFF_TAP | links._IFF_NO_PI}))"
    )
    with Path("/dev/net/tun").open("r+b", buffering=0) as tun:
        return run_python_as(uid, program, stdin=tun).returncode == 0


# --- restarts --------------------------------------------------------------------------------------------------


@pytest.fixture
def network() -> Iterator[Network]:
    chosen = Network(**{**session.network(), "pool": 1})
    yield chosen
    asyncio.run(SlotPool(chosen).destroy())
    assert traces(chosen.prefix) == []


async def crash(pool: SlotPool) -> None:
    """Simulate SIGKILL of a pool's process: only the kernel's state remains."""
    assert pool._refiller is not None
    pool._refiller.cancel()
    await asyncio.wait([pool._refiller])


async def test_a_restarted_gateway_adopts_running_slots_and_removes_the_rest(network: Network) -> None:
    first = SlotPool(network)
    await first.open(set())
    slot, unused = await first.take(CLOSED), await first.take(OPEN)
    guest = Guest(slot)
    server = guest.listen(8000)
    client = socket.create_connection((slot.host_address, 8000), 20)
    accepted = server.accept()[0]
    await crash(first)

    second = SlotPool(network)
    await second.open({slot.number})
    try:
        assert second.adopt(slot.number) == slot
        client.sendall(b"on")
        assert accepted.recv(2) == b"on", "connections go on"
        assert not unused.path.exists()
        with pytest.raises(BackendFailed, match="no longer exists"):
            second.adopt(unused.number)
        taken = await second.take(OPEN)
        assert taken.number != slot.number
        await second.apply(slot, OPEN)
    finally:
        for endpoint in (client, accepted, server):
            endpoint.close()
        guest.end()
    await second.close()
    assert slot.path.exists(), "what is in use outlives the gateway"


async def test_incomplete_slots_are_removed(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway dies after each of the steps of creating a slot."""

    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    async def create_incomplete(number: int, module: Any, patch: str) -> None:
        pool = SlotPool(network)
        slot = pool._slot(number)
        with monkeypatch.context() as patched:
            patched.setattr(module, patch, die)
            with contextlib.suppress(BaseException):
                run_inside(Path("/proc/self/ns/net"), lambda: links.make_slot(slot))

    namespaces.share_run_netns()
    await create_incomplete(0, namespaces, "_mount")
    await create_incomplete(1, namespaces, "set_sysctl")
    await create_incomplete(2, links, "_make_tap")
    await create_incomplete(3, links, "entered")
    await create_incomplete(4, links, "_index")
    whole_but_down = SlotPool(network)._slot(5)
    run_inside(Path("/proc/self/ns/net"), lambda: links.make_slot(whole_but_down))
    assert len([name for name in traces(network.prefix) if "/" not in name]) >= 6
    pool = SlotPool(network.model_copy(update={"pool": 0}))
    await pool.open({0, 1, 2, 3, 4, 5})
    for number in range(6):
        with pytest.raises(GatewayError):
            pool.adopt(number)
    assert not any(f"{network.prefix}-{number}" in name for name in traces(network.prefix) for number in range(6))
    await pool.close()
    assert traces(network.prefix) == []


async def test_an_unopened_pool_leaves_other_rules_alone(network: Network) -> None:
    running = SlotPool(network.model_copy(update={"pool": 0}))
    await running.open(set())
    await SlotPool(network).close()
    assert f"{network.prefix}_sandbox" in traces(network.prefix)
    await running.close()


# --- name servers ----------------------------------------------------------------------------------------------


def test_unreachable_name_servers_are_left_out() -> None:
    servers = name_servers(Network(dns=["9.9.9.9", "127.0.0.53", "fd00::53", "9.9.9.9", "nonsense", "1.1.1.1"]))
    assert servers == ["9.9.9.9", "1.1.1.1"]
