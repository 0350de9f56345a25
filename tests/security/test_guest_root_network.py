"""Root in a sandbox attacks metadata services, the host's connection-tracking table and other sandboxes.

The guest is a network namespace on a real slot (see ``tests.kvm_xfs.test_netns``). Its packets take the same path as
a virtual machine's packets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.network.epair import Bridge
from sandbox_gateway.hosts.jail_zfs.network.pf import build_jail_rules
from sandbox_gateway.hosts.kvm_xfs.network import rules
from sandbox_gateway.hosts.kvm_xfs.network.addresses import GATEWAY_ADDRESS, GUEST_MAC, Slot
from sandbox_gateway.records import NetworkPolicy
from tests.kvm_xfs.slot_networks import (
    ALIBABA_METADATA_ADDRESS,
    METADATA_ADDRESSES,
    OPEN_POLICY,
    Guest,
    open_tap,
    run_inside,
    world,
)

pytestmark = pytest.mark.usefixtures("requires_root")

AZURE_ADDRESS = "168.63.129.16"
ALLOW_ALL_POLICY = NetworkPolicy(allow_internet=False, allow_out=["0.0.0.0/0"])
ALLOW_BOTH_HALVES_POLICY = NetworkPolicy(allow_out=["0.0.0.0/1", "128.0.0.0/1"])
ALLOW_SURROUNDING_NETWORKS_POLICY = NetworkPolicy(
    allow_out=["169.252.0.0/14", "100.100.100.200/31", "168.63.128.0/23", "192.0.0.192/31"]
)


# --- metadata services -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [OPEN_POLICY, ALLOW_ALL_POLICY, ALLOW_BOTH_HALVES_POLICY, ALLOW_SURROUNDING_NETWORKS_POLICY]
)
async def test_metadata_services_are_unreachable_unless_allowed(policy: NetworkPolicy) -> None:
    async with world() as w:
        guest = w.add_guest(await w.pool.take(policy))
        outside_machine = w.add_outside_machine()
        w.close_at_end(outside_machine.listen(80))
        assert guest.can_reach(outside_machine.address, 80, timeout=20), "the outside machine is unreachable"
        assert [service for service in METADATA_ADDRESSES if guest.can_reach(service, 80)] == []


@pytest.mark.parametrize("service", METADATA_ADDRESSES)
async def test_allowing_one_metadata_address_does_not_allow_the_rest(service: str) -> None:
    async with world() as w:
        guest = w.add_guest(await w.pool.take(NetworkPolicy(allow_out=["0.0.0.0/0", service])))
        w.close_at_end(w.add_outside_machine().listen(80))
        assert guest.can_reach(service, 80, timeout=20)
        assert [each for each in METADATA_ADDRESSES if each != service and guest.can_reach(each, 80)] == []


@pytest.mark.parametrize(
    ("policy", "is_reachable"),
    [
        (OPEN_POLICY, True),
        (ALLOW_ALL_POLICY, True),
        (NetworkPolicy(deny_out=["168.63.129.0/24"]), False),
        (NetworkPolicy(allow_internet=False), False),
        (NetworkPolicy(allow_internet=False, allow_out=["10.0.0.0/8"]), False),
    ],
)
async def test_a_name_server_at_a_metadata_address_answers_only_dns(policy: NetworkPolicy, is_reachable: bool) -> None:
    async with world(dns=[AZURE_ADDRESS]) as w:
        guest = w.add_guest(await w.pool.take(policy))
        outside_machine = w.add_outside_machine()
        for port in (80, 53):
            w.close_at_end(outside_machine.listen(port))
        assert guest.can_reach(AZURE_ADDRESS, 53, timeout=20 if is_reachable else 0.8) is is_reachable
        assert not guest.can_reach(ALIBABA_METADATA_ADDRESS, 53)
        assert not guest.can_reach(AZURE_ADDRESS, 80)


@pytest.mark.parametrize(
    "policy", [OPEN_POLICY, ALLOW_ALL_POLICY, ALLOW_BOTH_HALVES_POLICY, ALLOW_SURROUNDING_NETWORKS_POLICY]
)
def test_jail_rules_block_metadata_services_first(policy: NetworkPolicy) -> None:
    bridge = Bridge(CommandRunner(), name="sbxbr", prefix="sbx", subnet="10.231.0.0/16")
    rule_lines = build_jail_rules(bridge, bridge.epair(7), policy, ["9.9.9.9"]).splitlines()
    first_pass_index = next(index for index, rule in enumerate(rule_lines) if rule.startswith("pass in"))
    for network in ("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"):
        assert rule_lines.index(f"block return in quick on sbx-7a inet from 10.231.0.7 to {network}") < first_pass_index


def test_jail_rules_allow_explicitly_listed_metadata_addresses() -> None:
    bridge = Bridge(CommandRunner(), name="sbxbr", prefix="sbx", subnet="10.231.0.0/16")
    policy = NetworkPolicy(allow_out=["0.0.0.0/0", "169.254.170.2"])
    rule_lines = build_jail_rules(bridge, bridge.epair(7), policy, [AZURE_ADDRESS]).splitlines()
    condition = "quick on sbx-7a inet"
    state = "keep state (source-track global, max-src-states 4096)"
    block_index = rule_lines.index(f"block return in {condition} from 10.231.0.7 to 169.254.0.0/16")
    for rule in (
        f"pass in {condition} from 10.231.0.7 to 169.254.170.2/32 {state}",
        f"pass in {condition} proto udp from 10.231.0.7 to {AZURE_ADDRESS}/32 port 53 {state}",
    ):
        assert rule_lines.index(rule) < block_index
    assert rule_lines.index(f"pass in {condition} from 10.231.0.7 to any {state}") > block_index


# --- tables that all namespaces share --------------------------------------------------------------------------

MAX_TEST_CONNECTIONS = 300
BLACK_HOLE_PORT = 9


def run_in_namespace(namespace: Path, *argv: str) -> str:
    """Run a command in a network namespace and return its output."""
    argv = ("nsenter", f"--net={namespace}", *argv)
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout


def count_connections_in_slot(slot: Slot) -> int:
    """Return the number of entries in the connection-tracking table of the slot's namespace."""
    return run_inside(slot.path, lambda: int(Path("/proc/sys/net/netfilter/nf_conntrack_count").read_text()))


def count_connections_on_host(slot: Slot) -> int:
    """Return the number of entries for the slot in the host's connection-tracking table."""
    with Path("/proc/net/nf_conntrack").open() as table:
        return sum(f" src={slot.host_address} " in line for line in table)


def send_datagrams(guest: Guest, address: str, count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        for port in range(10_000, 10_000 + count):
            with contextlib.suppress(OSError):
                client.sendto(b"x", (address, port))
            if port % 200 == 0:
                time.sleep(0.01)  # The queue of a tap holds 500 packets.


def send_pings(guest: Guest, address: str, count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as client:
        for number in range(count):
            echo_request = struct.pack(">BBHHH", 8, 0, 0xFFFF - (8 << 8) - number, number, 0)
            with contextlib.suppress(OSError):
                client.sendto(echo_request, (address, 0))


def send_syns(guest: Guest, address: str, count: int) -> None:
    for _ in range(count):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
            client.setblocking(False)
            with contextlib.suppress(OSError):
                client.connect((address, BLACK_HOLE_PORT))


@pytest.mark.parametrize("target", ["outside", "gateway"])
@pytest.mark.parametrize("flood", [send_datagrams, send_pings, send_syns])
async def test_a_connection_flood_does_not_fill_the_host_tables(
    flood: Callable[[Guest, str, int], None], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "MAX_CONNECTIONS", MAX_TEST_CONNECTIONS, raising=False)

    async with world() as w:
        slot, other_slot = await w.pool.take(OPEN_POLICY), await w.pool.take(OPEN_POLICY)
        guest, neighbour = w.add_guest(slot), w.add_guest(other_slot)
        outside_machine = w.add_outside_machine()
        drop_command = f"add rule ip t i tcp dport {BLACK_HOLE_PORT} drop"
        chain_commands = "add table ip t; add chain ip t i { type filter hook input priority 0; }"
        run_in_namespace(outside_machine.path, "nft", f"{chain_commands}; {drop_command}")
        server = w.close_at_end(outside_machine.listen(80))
        client = w.close_at_end(guest.connect(outside_machine.address, 80))
        accepted_connection = w.close_at_end(server.accept()[0])

        target_address = outside_machine.address if target == "outside" else GATEWAY_ADDRESS
        run_inside(guest.path, lambda: flood(guest, target_address, 5 * MAX_TEST_CONNECTIONS))
        assert count_connections_in_slot(slot) <= MAX_TEST_CONNECTIONS + 10
        assert count_connections_on_host(slot) <= MAX_TEST_CONNECTIONS + 10

        client.sendall(b"on")
        assert accepted_connection.recv(2) == b"on", "existing connections no longer work"
        if count_connections_in_slot(slot) >= MAX_TEST_CONNECTIONS:
            with pytest.raises(OSError, match="No route to host"):
                guest.connect(outside_machine.address, 80)
        assert neighbour.can_reach(outside_machine.address, 80, timeout=20), "another sandbox is affected"


async def test_a_sandbox_has_at_most_4096_connections() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN_POLICY)
        guest = w.add_guest(slot)
        outside_machine = w.add_outside_machine()
        run_inside(guest.path, lambda: send_datagrams(guest, outside_machine.address, 12_000))
        for connection_count in (count_connections_in_slot(slot), count_connections_on_host(slot)):
            assert 2_000 < connection_count <= 4_106


async def test_resets_that_the_host_misses_do_not_raise_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reset that reaches only the slot ends the connection there, but the host would track it for days."""
    monkeypatch.setattr(rules, "MAX_CONNECTIONS", MAX_TEST_CONNECTIONS, raising=False)

    async with world() as w:
        slot = await w.pool.take(OPEN_POLICY)
        run_inside(slot.path, lambda: Path("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close").write_text("0"))
        guest = w.add_guest(slot)
        outside_machine = w.add_outside_machine()
        server = w.close_at_end(outside_machine.listen(80))

        def connect_and_reset() -> None:
            client = socket.create_connection((outside_machine.address, 80), 5)
            client.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()

        refused_count = 0
        for _ in range(2 * MAX_TEST_CONNECTIONS):
            try:
                run_inside(guest.path, connect_and_reset)
                w.close_at_end(server.accept()[0])
            except OSError:
                refused_count += 1
                if refused_count > 20:
                    break
        assert MAX_TEST_CONNECTIONS // 2 < count_connections_on_host(slot) <= MAX_TEST_CONNECTIONS + 10

        await w.pool.release(slot)
        for _ in range(2000):
            if not slot.path.exists() and not count_connections_on_host(slot):
                break
            await asyncio.sleep(0.02)
        assert count_connections_on_host(slot) == 0, "the next sandbox at this address inherits connections"


async def test_forged_senders_do_not_fill_the_neighbour_table() -> None:
    async with world() as w:
        slot = await w.pool.take(OPEN_POLICY)
        tap_fd = run_inside(slot.path, lambda: open_tap(slot.tap))
        try:
            mac = bytes.fromhex(GUEST_MAC.replace(":", ""))
            for number in range(500):
                sender_address = socket.inet_aton(f"10.99.{number >> 8}.{number & 255}")
                arp_request = struct.pack(">HHBBH", 1, 0x800, 6, 4, 1) + mac + sender_address
                arp_request += bytes(6) + socket.inet_aton(GATEWAY_ADDRESS)
                os.write(tap_fd, (b"\xff" * 6 + mac + b"\x08\x06" + arp_request).ljust(60, b"\0"))
            neighbour_table = run_in_namespace(slot.path, "ip", "neigh", "show", "dev", slot.tap)
        finally:
            os.close(tap_fd)
        assert "10.99." not in neighbour_table
