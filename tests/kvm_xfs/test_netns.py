"""Test network slots with real packets.

The guest is a network namespace. A thread, instead of QEMU, forwards its frames to and from the slot's tap. An
outside machine is another namespace, whose traffic is routed through the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_gateway.config import Network
from sandbox_gateway.errors import BackendFailed, Busy, GatewayError, Invalid
from sandbox_gateway.hosts.connect import AGENT_PORT, connect
from sandbox_gateway.hosts.kvm_xfs.network import links, namespaces
from sandbox_gateway.hosts.kvm_xfs.network.addresses import (
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    VOLUME_PORTS,
    Slot,
    get_host_table,
    get_volume_address,
    get_volume_namespace,
)
from sandbox_gateway.hosts.kvm_xfs.network.rules import VOLUME_ACCESS
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.hosts.network_policy import find_name_servers
from sandbox_gateway.records import NetworkPolicy
from tests.kvm_xfs.slot_networks import (
    ALIBABA_METADATA_ADDRESS,
    NOBODY_UID,
    OPEN_POLICY,
    Guest,
    World,
    can_connect_as,
    list_slot_objects,
    listen,
    run_inside,
    run_python_as,
    world,
)
from tests.support import session

pytestmark = pytest.mark.usefixtures("requires_root")

CLOSED_POLICY = NetworkPolicy(allow_internet=False)


# --- the environment of the slots --------------------------------------------------------------------------------


async def wait_for_ready_slots(pool: SlotPool, count: int) -> None:
    for _ in range(2000):
        if len(pool._ready_slots) >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the pool has fewer than {count} ready slots")


# --- packets ---------------------------------------------------------------------------------------------------


async def test_the_host_reaches_every_port_of_the_guest() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN_POLICY)
        guest = w.add_guest(slot)
        for port in (22, 8000, AGENT_PORT):
            server = w.close_at_end(guest.listen(port))
            client = w.close_at_end(await connect(slot.host_address, port))
            accepted_socket, peer = server.accept()
            client.sendall(b"ping")
            assert w.close_at_end(accepted_socket).recv(4) == b"ping"
            assert peer[0] == GATEWAY_ADDRESS
        server = w.close_at_end(guest.listen(5300, socket.SOCK_DGRAM))
        client = w.close_at_end(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        client.settimeout(20)
        client.sendto(b"ping", (slot.host_address, 5300))
        data, sender = server.recvfrom(10)
        server.sendto(data + b"pong", sender)
        assert client.recvfrom(10)[0] == b"pingpong"


async def test_the_guest_reaches_outside_machines_from_the_hosts_address() -> None:
    async with world() as w:
        guest = w.add_guest(await w.pool.take(OPEN_POLICY))
        outside_machine = w.add_outside_machine()
        server = w.close_at_end(outside_machine.listen(443))
        client = w.close_at_end(guest.connect(outside_machine.address, 443))
        accepted_socket, peer = server.accept()
        w.close_at_end(accepted_socket).sendall(b"hello")
        assert client.recv(5) == b"hello"
        assert peer[0] == outside_machine.host_address
        assert client.getsockname()[0] == GUEST_ADDRESS


async def test_host_services_and_other_sandboxes_are_unreachable() -> None:
    async with world() as w:
        slot, other_slot = await w.pool.take(OPEN_POLICY), await w.pool.take(NetworkPolicy(allow_out=["0.0.0.0/0"]))
        guest, neighbour = w.add_guest(slot), w.add_guest(other_slot)
        outside_machine = w.add_outside_machine()
        w.close_at_end(listen(48123))
        w.close_at_end(guest.listen(48124))
        w.close_at_end(neighbour.listen(48124))
        assert not guest.can_reach(slot.veth_address, 48123)
        assert not guest.can_reach(GATEWAY_ADDRESS, 48123)
        assert not guest.can_reach(outside_machine.host_address, 48123)
        # Not even a policy that allows everything permits these connections.
        for sandbox, target in ((guest, other_slot), (neighbour, slot)):
            assert not sandbox.can_reach(target.host_address, 48124)
            assert not sandbox.can_reach(target.veth_address, 48123)
        assert not neighbour.can_reach(outside_machine.host_address, 48123)
        assert not outside_machine.can_reach(slot.host_address, 48124)


@pytest.mark.parametrize(
    ("policy", "is_reachable"),
    [
        (OPEN_POLICY, True),
        (CLOSED_POLICY, False),
        (NetworkPolicy(allow_internet=False, allow_out=["198.18.0.0/15"]), True),
        (NetworkPolicy(allow_internet=False, allow_out=["203.0.113.7"]), False),
        (NetworkPolicy(deny_out=["198.18.0.0/15", "198.18.0.0/16"]), False),
        (NetworkPolicy(allow_out=["198.18.0.0/16"], deny_out=["0.0.0.0/0"]), True),
    ],
)
async def test_the_policy_is_enforced(policy: NetworkPolicy, is_reachable: bool) -> None:
    async with world() as w:
        guest = w.add_guest(await w.pool.take(policy))
        outside_machine = w.add_outside_machine()
        w.close_at_end(outside_machine.listen(80))
        for _ in range(1 if is_reachable else 8):
            assert guest.can_reach(outside_machine.address, 80, timeout=20 if is_reachable else 0.8) is is_reachable
        if not is_reachable:
            with pytest.raises(OSError, match="No route to host"):
                guest.connect(outside_machine.address, 80)


async def test_a_new_policy_applies_to_open_connections_except_the_hosts() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN_POLICY)
        guest = w.add_guest(slot)
        outside_machine = w.add_outside_machine()
        server, service = w.close_at_end(outside_machine.listen(80)), w.close_at_end(guest.listen(8000))
        outbound_connection = w.close_at_end(guest.connect(outside_machine.address, 80))
        outside_end = w.close_at_end(server.accept()[0])
        inbound_connection = w.close_at_end(socket.create_connection((slot.host_address, 8000), 20))
        guest_end = w.close_at_end(service.accept()[0])
        outside_end.settimeout(0.6)

        await w.pool.apply(slot, CLOSED_POLICY)
        with contextlib.suppress(OSError):
            outbound_connection.sendall(b"secret")
        with pytest.raises(TimeoutError):
            outside_end.recv(6)
        guest_end.sendall(b"still")
        assert inbound_connection.recv(5) == b"still"

        await w.pool.apply(slot, OPEN_POLICY)
        outside_end.settimeout(20)
        assert outside_end.recv(6) == b"secret"


async def test_metadata_services_are_reachable_only_if_a_policy_lists_them() -> None:
    async with world(dns=[ALIBABA_METADATA_ADDRESS]) as w:
        slot = await w.pool.take(OPEN_POLICY)
        guest = w.add_guest(slot)
        outside_machine = w.add_outside_machine()
        for port in (80, 53):
            w.close_at_end(outside_machine.listen(port))
        assert not guest.can_reach(ALIBABA_METADATA_ADDRESS, 80)
        assert not guest.can_reach("169.254.169.254", 80)
        assert guest.can_reach(ALIBABA_METADATA_ADDRESS, 53, timeout=20), (
            "DNS is blocked at an address that the name servers of some clouds have"
        )
        await w.pool.apply(slot, NetworkPolicy(allow_out=[ALIBABA_METADATA_ADDRESS]))
        assert guest.can_reach(ALIBABA_METADATA_ADDRESS, 80, timeout=20)
        await w.pool.apply(slot, CLOSED_POLICY)
        assert not guest.can_reach(ALIBABA_METADATA_ADDRESS, 53)


async def test_packets_with_a_forged_source_address_are_dropped() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN_POLICY)
        guest = w.add_guest(slot)
        outside_machine = w.add_outside_machine()
        server = w.close_at_end(outside_machine.listen(5000, socket.SOCK_DGRAM))
        guest.run_ip("address", "add", "10.99.99.99/32", "dev", "eth0")
        guest.run_ip("-6", "address", "add", "fd99::1/64", "dev", "eth0", "nodad")

        def send(source: str) -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.bind((source, 0))
                client.sendto(source.encode(), (outside_machine.address, 5000))

        run_inside(guest.path, lambda: send("10.99.99.99"))
        run_inside(guest.path, lambda: send(GUEST_ADDRESS))
        assert server.recvfrom(20)[0] == GUEST_ADDRESS.encode()
        server.settimeout(0.3)
        with pytest.raises(TimeoutError):
            server.recvfrom(20)
        assert run_inside(slot.path, lambda: read_disable_ipv6(slot.tap)) in ("1", ""), "IPv6 is enabled in the slot"


def read_disable_ipv6(name: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").read_text().strip()
    return ""


async def test_connections_that_a_fork_inherited_are_reset() -> None:
    async with world() as w:
        source_slot, fork_slot = await w.pool.take(OPEN_POLICY), await w.pool.take(OPEN_POLICY)
        guest = w.add_guest(source_slot)
        outside_machine = w.add_outside_machine()
        server = w.close_at_end(outside_machine.listen(80))
        client = w.close_at_end(guest.connect(outside_machine.address, 80))
        w.close_at_end(server.accept()[0])
        guest.attach(fork_slot)
        start = time.monotonic()
        client.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert time.monotonic() - start < 1
        assert guest.can_reach(outside_machine.address, 80, timeout=20), "new connections fail with the old ARP cache"


# --- volume servers --------------------------------------------------------------------------------------------


def change_access(network: Network, action: str, slot: Slot, port: int) -> None:
    """Grant (``add``) or revoke (``delete``) a sandbox's access to a port of the volume servers."""
    nft_command = f"{action} element inet {get_host_table(network)} {VOLUME_ACCESS} {{ {slot.host_address} . {port} }}"
    subprocess.run(["nft", nft_command], check=True, timeout=20)


def listen_for_volume(w: World, port: int) -> socket.socket:
    server = run_inside(
        get_volume_namespace(w.network), lambda: socket.create_server((get_volume_address(w.network), port))
    )
    server.settimeout(20)
    return w.close_at_end(server)


@pytest.mark.parametrize("policy", [OPEN_POLICY, CLOSED_POLICY])
async def test_only_permitted_sandboxes_reach_a_volume_port(policy: NetworkPolicy) -> None:
    async with world() as w:
        slot, other_slot = await w.pool.take(policy), await w.pool.take(OPEN_POLICY)
        guest, other_guest = w.add_guest(slot), w.add_guest(other_slot)
        port, next_port = VOLUME_PORTS[-1], VOLUME_PORTS[-1] + 1
        server, _ = listen_for_volume(w, port), listen_for_volume(w, next_port)
        change_access(w.network, "add", slot, port)
        client = w.close_at_end(guest.connect(GATEWAY_ADDRESS, port))
        accepted_socket, peer = server.accept()
        w.close_at_end(accepted_socket).sendall(b"hello")
        assert client.recv(5) == b"hello"
        assert peer[0] == slot.host_address
        assert not guest.can_reach(GATEWAY_ADDRESS, next_port)
        assert not other_guest.can_reach(GATEWAY_ADDRESS, port)
        # The port is open only at the gateway's address, neither at the servers' own address nor at slots' addresses.
        for target in (get_volume_address(w.network), other_slot.veth_address, slot.host_address):
            assert not guest.can_reach(target, port)


async def test_revoking_volume_access_disconnects_the_sandbox_immediately() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN_POLICY)
        guest = w.add_guest(slot)
        server = listen_for_volume(w, VOLUME_PORTS[0])
        change_access(w.network, "add", slot, VOLUME_PORTS[0])
        client = w.close_at_end(guest.connect(GATEWAY_ADDRESS, VOLUME_PORTS[0]))
        accepted_socket = w.close_at_end(server.accept()[0])
        accepted_socket.settimeout(0.6)
        change_access(w.network, "delete", slot, VOLUME_PORTS[0])
        client.sendall(b"secret")
        with pytest.raises(TimeoutError):
            accepted_socket.recv(6)
        change_access(w.network, "add", slot, VOLUME_PORTS[0])
        accepted_socket.settimeout(20)
        assert accepted_socket.recv(6) == b"secret", "the connection does not continue after access is granted again"


async def test_a_fork_reconnects_to_its_volume() -> None:
    async with world() as w:
        source_slot, fork_slot = await w.pool.take(OPEN_POLICY), await w.pool.take(OPEN_POLICY)
        guest = w.add_guest(source_slot)
        server = listen_for_volume(w, VOLUME_PORTS[0])
        for slot in (source_slot, fork_slot):
            change_access(w.network, "add", slot, VOLUME_PORTS[0])
        client = w.close_at_end(guest.connect(GATEWAY_ADDRESS, VOLUME_PORTS[0]))
        w.close_at_end(server.accept()[0])
        guest.attach(fork_slot)
        start = time.monotonic()
        client.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert time.monotonic() - start < 1
        w.close_at_end(guest.connect(GATEWAY_ADDRESS, VOLUME_PORTS[0]))
        accepted_socket, peer = server.accept()
        w.close_at_end(accepted_socket)
        assert peer[0] == fork_slot.host_address


async def test_only_the_gateway_and_sandboxes_reach_volume_servers() -> None:
    async with world() as w:
        outside_machine = w.add_outside_machine()
        address = get_volume_address(w.network)
        listen_for_volume(w, VOLUME_PORTS[0])
        outside_machine.run_ip("route", "add", f"{address}/32", "via", outside_machine.host_address)
        w.close_at_end(listen(48125))
        assert outside_machine.can_reach(outside_machine.host_address, 48125, timeout=20), (
            "the outside machine cannot reach the host at all"
        )
        assert not outside_machine.can_reach(address, VOLUME_PORTS[0])
        assert not can_connect_as(NOBODY_UID, address, VOLUME_PORTS[0])
        assert not can_connect_as(0, address, VOLUME_PORTS[0])
        w.close_at_end(await connect(address, VOLUME_PORTS[0]))  # The gateway queries the servers.


# --- slots -----------------------------------------------------------------------------------------------------


async def test_taking_a_ready_slot_is_fast() -> None:
    async with world(ready_count=2) as w:
        await wait_for_ready_slots(w.pool, 2)
        start = time.perf_counter()
        slot = await w.pool.take(OPEN_POLICY)
        assert time.perf_counter() - start < 0.01
        assert slot.path.exists()
        await wait_for_ready_slots(w.pool, 2)


async def test_the_number_of_a_released_slot_is_not_reused_immediately() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN_POLICY)
        await w.pool.release(slot)
        await w.pool.release(slot)
        assert (await w.pool.take(OPEN_POLICY)).number == slot.number + 1
        for _ in range(300):
            if not slot.path.exists():
                break
            await asyncio.sleep(0.01)
        assert not slot.path.exists()


async def test_take_fails_if_all_addresses_are_in_use() -> None:
    subnet = session.allocate_network()["subnet"].split("/")[0] + "/28"
    async with world(subnet=subnet, ready_count=1) as w:
        slots = [await w.pool.take(OPEN_POLICY) for _ in range(2)]
        await wait_for_ready_slots(w.pool, 1)
        slots.append(await w.pool.take(OPEN_POLICY))
        assert len({slot.number for slot in slots}) == 3
        assert get_volume_address(w.network) not in {slot.host_address for slot in slots}
        with pytest.raises(Busy, match="all 3 network slots"):
            await w.pool.take(OPEN_POLICY)
        await w.pool.release(slots[1])
        await wait_for_ready_slots(w.pool, 1)
        assert (await w.pool.take(OPEN_POLICY)).number == slots[1].number


@pytest.mark.parametrize("invalid_address", ["localhost", "::/0", "10.0.0.0/33", ""])
async def test_an_invalid_policy_is_refused(invalid_address: str) -> None:
    async with world() as w:
        for policy in (NetworkPolicy(allow_out=[invalid_address]), NetworkPolicy(deny_out=[invalid_address])):
            with pytest.raises(Invalid, match="not an IPv4 address or CIDR"):
                await w.pool.take(policy)
        slot = await w.pool.take(OPEN_POLICY)
        with pytest.raises(Invalid):
            await w.pool.apply(slot, NetworkPolicy(allow_out=[invalid_address]))


async def test_a_cancelled_request_leaks_no_slot() -> None:
    async with world() as w:
        for delay in (0, 0.005, 0.02, 0.03):
            request = asyncio.ensure_future(w.pool.take(OPEN_POLICY))
            await asyncio.sleep(delay)
            request.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await request
        await w.pool.close()


async def test_only_the_slots_user_can_open_its_tap() -> None:
    network = Network(**{**session.allocate_network(), "pool": 0})
    pool = SlotPool(network, uid_base=2_000_000)
    await pool.open(set())
    try:
        slot = await pool.take(OPEN_POLICY)
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
    network = Network(**{**session.allocate_network(), "pool": 1})
    yield network
    asyncio.run(SlotPool(network).destroy())
    assert list_slot_objects(network.prefix) == []


async def crash(pool: SlotPool) -> None:
    """Simulate SIGKILL of a pool's process: only the kernel's state remains."""
    assert pool._refiller is not None
    pool._refiller.cancel()
    await asyncio.wait([pool._refiller])


async def test_a_restarted_gateway_adopts_running_slots_and_removes_the_rest(network: Network) -> None:
    first_pool = SlotPool(network)
    await first_pool.open(set())
    slot, unused_slot = await first_pool.take(CLOSED_POLICY), await first_pool.take(OPEN_POLICY)
    guest = Guest(slot)
    server = guest.listen(8000)
    client = socket.create_connection((slot.host_address, 8000), 20)
    accepted_socket = server.accept()[0]
    await crash(first_pool)

    second_pool = SlotPool(network)
    await second_pool.open({slot.number})
    try:
        assert await second_pool.adopt(slot.number, OPEN_POLICY) == slot
        client.sendall(b"on")
        assert accepted_socket.recv(2) == b"on", "an open connection was interrupted"
        assert not unused_slot.path.exists()
        with pytest.raises(BackendFailed, match="no longer exists"):
            await second_pool.adopt(unused_slot.number, OPEN_POLICY)
        new_slot = await second_pool.take(OPEN_POLICY)
        assert new_slot.number != slot.number
        await second_pool.apply(slot, OPEN_POLICY)
    finally:
        for endpoint in (client, accepted_socket, server):
            endpoint.close()
        guest.remove()
    await second_pool.close()
    assert slot.path.exists(), "a slot in use was removed"


async def test_incomplete_slots_are_removed(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a gateway that dies after each step of creating a slot."""

    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    async def create_incomplete_slot(number: int, module: Any, function: str) -> None:
        pool = SlotPool(network)
        slot = pool._create_slot_record(number)
        with monkeypatch.context() as patch:
            patch.setattr(module, function, die)
            with contextlib.suppress(BaseException):
                run_inside(Path("/proc/self/ns/net"), lambda: links.create_slot(slot))

    namespaces.share_run_netns()
    await create_incomplete_slot(0, namespaces, "_mount")
    await create_incomplete_slot(1, namespaces, "set_sysctl")
    await create_incomplete_slot(2, links, "_create_tap")
    await create_incomplete_slot(3, links, "in_namespace")
    await create_incomplete_slot(4, links, "_find_interface_index")
    uncommitted_slot = SlotPool(network)._create_slot_record(5)
    run_inside(Path("/proc/self/ns/net"), lambda: links.create_slot(uncommitted_slot))
    assert len([name for name in list_slot_objects(network.prefix) if "/" not in name]) >= 6
    pool = SlotPool(network.model_copy(update={"pool": 0}))
    await pool.open({0, 1, 2, 3, 4, 5})
    for number in range(6):
        with pytest.raises(GatewayError):
            await pool.adopt(number, OPEN_POLICY)
    assert not any(
        f"{network.prefix}-{number}" in name for name in list_slot_objects(network.prefix) for number in range(6)
    )
    await pool.close()
    assert list_slot_objects(network.prefix) == []


async def test_closing_an_unopened_pool_preserves_other_rules(network: Network) -> None:
    open_pool = SlotPool(network.model_copy(update={"pool": 0}))
    await open_pool.open(set())
    await SlotPool(network).close()
    assert f"{network.prefix}_sandbox" in list_slot_objects(network.prefix)
    await open_pool.close()


# --- name servers ----------------------------------------------------------------------------------------------


def test_name_servers_omits_unreachable_addresses() -> None:
    servers = find_name_servers(Network(dns=["9.9.9.9", "127.0.0.53", "fd00::53", "9.9.9.9", "nonsense", "1.1.1.1"]))
    assert servers == ["9.9.9.9", "1.1.1.1"]
