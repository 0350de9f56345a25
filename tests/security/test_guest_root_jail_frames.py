"""Root in a jail sends arbitrary frames: forged ARP, other MAC addresses, other source addresses.

The jails are connected by the gateway's own code. The frames are sent from the jail's network stack with a packet
socket. Root in a jail cannot open such a socket, but can send such frames by changing its interface's addresses.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox_gateway.config import Config
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails
from sandbox_gateway.hosts.jail_zfs.network.epair import Epair
from sandbox_gateway.hosts.jail_zfs.network.jail_network import JailNetwork
from sandbox_gateway.records import NetworkPolicy
from tests.freebsd_shim.harness import Shim, created_shim, is_supported
from tests.freebsd_shim.test_network import CLIENT_PROGRAM, MAIN_RULES, SERVER_PROGRAM
from tests.security.test_guest_root_frames import (
    ARP,
    BROADCAST_MAC,
    END_MARK,
    IPV4,
    IPV6,
    MARK,
    QINQ,
    UDP,
    VLAN,
    compute_checksum,
    make_arp,
    make_frame,
    make_ipv6,
    make_packet,
    make_udp,
)

PORT = 7000
EXPERIMENTAL = 0x88B5
"""The type of a protocol that hosts do not know."""
ATTACKER_NUMBER, VICTIM_NUMBER = 5, 6
OUTSIDE_ADDRESS, OTHER_OUTSIDE_ADDRESS = "10.214.0.9", "10.214.0.8"
HOST_IPV6, OUTSIDE_IPV6, JAIL_IPV6 = "fd14::1", "fd14::9", "fd13::5"
METADATA_ADDRESSES = ("169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192")
_SEND_PROGRAM = (
    "import socket, sys, time\n"
    "s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind((sys.argv[1], 0))\n"
    "for number, frame in enumerate(sys.argv[3].split(',')):\n"
    "    time.sleep(float(sys.argv[2])); s.send(bytes.fromhex(frame))\n"
    "    if number == 0: print('sent', flush=True)\n"
)
_RECEIVE_PROGRAM = (  # Prints all datagrams, of IPv4 and IPv6, up to the one with END_MARK.
    "import socket\n"
    "s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)\n"
    f"s.bind(('::', {PORT})); s.settimeout(20)\n"
    "print('up', flush=True)\n"
    f"while (data := s.recv(999)) != {END_MARK!r}:\n"
    "    print(data.decode(), flush=True)\n"
)
_SNIFF_PROGRAM = (  # Prints all frames up to the one that contains END_MARK.
    "import socket, sys\n"
    "s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))\n"
    "s.bind((sys.argv[1], 3)); s.settimeout(20)\n"
    "print('up', flush=True)\n"
    f"while {END_MARK!r} not in (frame := s.recv(1999)):\n"
    "    print(frame.hex(), flush=True)\n"
)
_SEND_UDP_PROGRAM = (
    "import socket, sys\n"
    f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto({END_MARK!r}, (sys.argv[1], {PORT}))\n"
)


class ShimRunner(CommandRunner):
    """Runs the gateway's commands in the shim's network namespace."""

    def __init__(self, shim: Shim) -> None:
        super().__init__(shim.environ)
        self._prefix = ("/usr/bin/nsenter", f"--net=/proc/{shim.namespace_pid}/ns/net")

    async def __call__(self, *argv: str, input: str | None = None, silent: bool = False) -> str:
        return await super().__call__(*self._prefix, *argv, input=input, silent=silent)

    async def run_removal(self, *argv: str, absent_messages: tuple[str, ...]) -> bool:
        return await super().run_removal(*self._prefix, *argv, absent_messages=absent_messages)


@dataclass
class JailWorld:
    """A host with jails, and the jail ``out`` on a network behind the host."""

    shim: Shim
    run: ShimRunner
    network: JailNetwork

    @property
    def attacker(self) -> Epair:
        return self.network.bridge.epair(ATTACKER_NUMBER)

    @property
    def victim(self) -> Epair:
        return self.network.bridge.epair(VICTIM_NUMBER)

    def read_mac(self, interface: str) -> str:
        match = re.search(r"ether (\S+)", self.shim.check_ok("ifconfig", interface))
        assert match is not None
        return match[1]

    async def add_jail(self, epair: Epair, policy: NetworkPolicy) -> None:
        name = f"sx{epair.number}"
        self.shim.check_ok("jail", "-c", f"name={name}", f"path={self.shim.root}", "persist", "vnet=new")
        await self.network.connect(name, epair, policy)
        self.shim.check_ok("ifconfig", epair.inner_end, "vnet", name)
        await Jails(self.run).configure_interface(
            name, epair.inner_end, address=epair.address, prefix=24, gateway=self.network.bridge.gateway
        )

    def run_in_stack(self, jail: str, program: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a program with all privileges in the network stack of a jail."""
        jails = json.loads((self.shim.state / "jails.json").read_text())["jails"]
        holder = next(each["holder"] for each in jails if each["name"] == jail)
        return self.shim.start(
            "/usr/bin/nsenter", f"--net=/proc/{holder}/ns/net", "/usr/bin/python3", "-c", program, *arguments
        )

    def start_sending(self, *frames: bytes, interval: float = 0) -> subprocess.Popen[str]:
        """Start sending frames from the attacker's jail, each after ``interval`` seconds."""
        words = [frame.hex() for frame in frames]
        return self.run_in_stack(
            f"sx{ATTACKER_NUMBER}", _SEND_PROGRAM, self.attacker.inner_end, str(interval), ",".join(words)
        )

    def send_frames(self, *frames: bytes, interval: float = 0) -> None:
        _wait_for_lines(self.start_sending(*frames, interval=interval))

    @contextmanager
    def serving(self, jail: str) -> Iterator[None]:
        server = self.shim.start("jexec", jail, "/usr/bin/python3", "-c", SERVER_PROGRAM)
        try:
            assert server.stdout is not None and server.stdout.readline() == "up\n"
            yield
        finally:
            self.shim.check_ok("pkill", "-KILL", "-j", jail)
            server.communicate()

    def is_reachable(self, address: str, jail: str = "") -> bool:
        """Return whether a jail, or the host if ``jail`` is "", can connect to the server at ``address``."""
        prefix = ("jexec", jail) if jail else ()
        return self.shim(*prefix, "/usr/bin/python3", "-c", CLIENT_PROGRAM, address).returncode == 0


def _wait_for_lines(process: subprocess.Popen[str]) -> list[str]:
    """Wait for a program. Returns the lines that it has printed."""
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output.splitlines()


def _wait_for_frames(sniffer: subprocess.Popen[str]) -> list[bytes]:
    return [bytes.fromhex(line) for line in _wait_for_lines(sniffer)]


def _wait_for_sources(sniffer: subprocess.Popen[str]) -> set[str]:
    """Wait for a sniffer, and return the Ethernet sources of the frames."""
    return {frame[6:12].hex(":") for frame in _wait_for_frames(sniffer)}


def _wait_until_up(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[JailWorld]:
    if not is_supported():
        pytest.skip("needs root, util-linux, nftables and /usr/bin/python3")
    with created_shim(tmp_path) as shim:
        shim.check_ok("pfctl", "-q", "-f", "-", input=MAIN_RULES)
        shim.check_ok("sysctl", "net.inet.ip.forwarding=1")
        shim.check_ok("jail", "-c", "name=out", f"path={shim.root}", "persist", "vnet=new")
        host_end = shim.check_ok("ifconfig", "epair", "create", "name", "outa")
        assert host_end == "outa\n"
        shim.check_ok("ifconfig", "epair0b", "name", "outb")
        shim.check_ok("ifconfig", "outb", "vnet", "out")
        for address in (OUTSIDE_ADDRESS, OTHER_OUTSIDE_ADDRESS, *METADATA_ADDRESSES):
            first_address = address.rpartition(".")[0] + ".1"
            if address != OTHER_OUTSIDE_ADDRESS:
                shim.check_ok("ifconfig", "outa", "inet", f"{first_address}/24", "alias")
            shim.check_ok("ifconfig", "-j", "out", "outb", "inet", f"{address}/24", "alias")
        shim.check_ok("sysctl", "net.inet6.ip6.forwarding=1")
        shim.check_ok("ifconfig", "outa", "inet6", f"{HOST_IPV6}/64", "alias")
        shim.check_ok("ifconfig", "-j", "out", "outb", "inet6", f"{OUTSIDE_IPV6}/64", "alias")
        run = ShimRunner(shim)
        config = Config.model_validate(
            {
                "host": {"kind": "jail_zfs", "state_root": str(tmp_path / "state")},
                "jail_zfs": {"dataset": "pool/none", "bridge": "sxbr0", "egress": "outa"},
                "network": {"prefix": "sx", "subnet": "10.213.0.0/24", "dns": ["9.9.9.9"]},
            }
        )
        world = JailWorld(shim, run, JailNetwork(run, config))
        await world.network.open()
        yield world


async def add_both_jails(world: JailWorld, attacker_policy: NetworkPolicy | None = None) -> None:
    await world.add_jail(world.victim, NetworkPolicy())
    await world.add_jail(world.attacker, attacker_policy or NetworkPolicy())


def read_bridge_mac(world: JailWorld) -> str:
    return world.read_mac("sxbr0")


# --- MAC addresses and ARP -----------------------------------------------------------------------------------------


async def test_frames_from_another_jails_mac_address_do_not_divert_its_packets(world: JailWorld) -> None:
    await add_both_jails(world)
    with world.serving(f"sx{VICTIM_NUMBER}"):
        assert world.is_reachable(world.victim.address)
        source, packet = world.victim.mac, make_udp(world.victim.address, OUTSIDE_ADDRESS)
        frames = [
            make_frame(packet, kind, destination=destination, source=source)
            for destination in (read_bridge_mac(world), BROADCAST_MAC, source)
            for kind in (IPV4, EXPERIMENTAL)  # The packet filter may drop a packet before the bridge learns from it.
        ]
        sender = world.start_sending(*frames * 150, interval=0.01)
        assert sender.stdout is not None and sender.stdout.readline() == "sent\n"
        assert world.is_reachable(world.victim.address)
        assert sender.poll() is None, "the attack ended too early"
        sender.kill()
        sender.communicate()


async def test_forged_arp_does_not_change_the_hosts_table(world: JailWorld) -> None:
    await add_both_jails(world)
    gateway = world.network.bridge.gateway
    with world.serving(f"sx{VICTIM_NUMBER}"):
        assert world.is_reachable(world.victim.address)
        frames = [
            make_frame(
                make_arp(operation, world.victim.address, world.attacker.mac, target, target_mac),
                ARP,
                destination=destination,
                source=world.attacker.mac,
            )
            for operation in (1, 2)
            for target, target_mac in ((gateway, read_bridge_mac(world)), (world.victim.address, BROADCAST_MAC))
            for destination in (read_bridge_mac(world), BROADCAST_MAC)
        ]
        # Linux ignores a second change within a second.
        world.send_frames(*frames, interval=0.3)
        assert f" at {world.victim.mac} " in world.shim.check_ok("arp", "-n", world.victim.address)
        assert world.is_reachable(world.victim.address)


async def test_forged_arp_cannot_take_a_silent_jails_address(world: JailWorld) -> None:
    """The host asks nobody for the address of a jail, so nobody can answer first."""
    await add_both_jails(world)
    sniffer = _wait_until_up(world.run_in_stack(f"sx{ATTACKER_NUMBER}", _SNIFF_PROGRAM, world.attacker.inner_end))
    world.is_reachable(world.victim.address)
    world.is_reachable("10.213.0.99")
    world.shim.check_ok("/usr/bin/python3", "-c", _SEND_UDP_PROGRAM, world.attacker.address)
    assert read_bridge_mac(world) not in _wait_for_sources(sniffer)


async def test_forged_senders_do_not_fill_the_hosts_arp_table(world: JailWorld) -> None:
    await add_both_jails(world)
    world.send_frames(
        *(
            make_frame(
                make_arp(1, f"10.213.0.{number}", world.attacker.mac, world.network.bridge.gateway),
                ARP,
                destination=BROADCAST_MAC,
                source=world.attacker.mac,
            )
            for number in range(100, 140)
        )
    )
    lines = world.shim.check_ok("arp", "-n", "-i", "sxbr0", "-a").splitlines()
    assert {line.split()[1] for line in lines} == {
        f"({address})" for address in (world.network.bridge.gateway, world.victim.address, world.attacker.address)
    }


async def test_jails_receive_no_frames_from_each_other(world: JailWorld) -> None:
    await add_both_jails(world)
    sniffer = _wait_until_up(world.run_in_stack(f"sx{VICTIM_NUMBER}", _SNIFF_PROGRAM, world.victim.inner_end))
    packet = make_udp(world.attacker.address, world.victim.address)
    arp = make_arp(2, world.network.bridge.gateway, world.attacker.mac, world.victim.address, world.victim.mac)
    world.send_frames(
        *(
            make_frame(payload, kind, destination=destination, source=source)
            for payload, kind in ((packet, IPV4), (arp, ARP), (packet, IPV6))
            for destination in (world.victim.mac, BROADCAST_MAC, "33:33:00:00:00:01", "02:00:5e:00:00:99")
            for source in (world.attacker.mac, read_bridge_mac(world))
        )
    )
    world.shim.check_ok("/usr/bin/python3", "-c", _SEND_UDP_PROGRAM, world.victim.address)
    sources = _wait_for_sources(sniffer)
    assert world.attacker.mac not in sources and read_bridge_mac(world) not in sources


# --- source addresses and policies ---------------------------------------------------------------------------------

Attack = Callable[[JailWorld], Sequence[bytes]]


def list_ethernet_targets(world: JailWorld) -> list[str]:
    """Return target addresses of frames that the host receives: of the bridge, of its member, and broadcast."""
    return [read_bridge_mac(world), world.read_mac(world.attacker.outer_end), BROADCAST_MAC]


def spoof_source(world: JailWorld) -> list[bytes]:
    return [
        make_frame(make_udp(address, OUTSIDE_ADDRESS, PORT), destination=destination, source=source)
        for address in (world.victim.address, "10.213.0.77", OTHER_OUTSIDE_ADDRESS)
        for destination in list_ethernet_targets(world)
        for source in (world.attacker.mac, world.victim.mac)
    ]


def send_to_forbidden_addresses(world: JailWorld) -> list[bytes]:
    return [
        make_frame(make_udp(world.attacker.address, address, PORT), destination=destination, source=world.attacker.mac)
        for address in (OTHER_OUTSIDE_ADDRESS, world.network.bridge.gateway, "10.214.0.1", *METADATA_ADDRESSES)
        for destination in list_ethernet_targets(world)
    ]


def make_ipv6_udp(target: str) -> bytes:
    """Return an IPv6 packet with a datagram. Unlike with IPv4, hosts require a checksum."""
    datagram = struct.pack(">HHHH", 5000, PORT, 8 + len(MARK), 0) + MARK
    addresses = socket.inet_pton(socket.AF_INET6, JAIL_IPV6) + socket.inet_pton(socket.AF_INET6, target)
    checksum = compute_checksum(addresses + struct.pack(">II", len(datagram), UDP) + datagram)
    return make_ipv6(JAIL_IPV6, target, datagram[:6] + struct.pack(">H", checksum) + datagram[8:])


def send_ipv6(world: JailWorld) -> list[bytes]:
    return [
        make_frame(make_ipv6_udp(address), IPV6, destination=destination, source=world.attacker.mac)
        for address in (HOST_IPV6, OUTSIDE_IPV6)
        for destination in list_ethernet_targets(world)
    ]


def send_tagged_frames(world: JailWorld) -> list[bytes]:
    """Return frames with VLAN tags. Hosts ignore a tag with the number 0."""
    payloads = [(IPV4, make_udp(world.victim.address, OUTSIDE_ADDRESS, PORT))]
    payloads += [
        (IPV4, make_udp(world.attacker.address, address, PORT)) for address in (OTHER_OUTSIDE_ADDRESS, "10.214.0.1")
    ]
    payloads += [(IPV6, make_ipv6_udp(address)) for address in (HOST_IPV6, OUTSIDE_IPV6)]
    return [
        make_frame(struct.pack(">HH", tag, kind) + payload, vlan, destination=destination, source=world.attacker.mac)
        for kind, payload in payloads
        for tag in (0, 1, 4095)
        for vlan in (VLAN, QINQ)
        for destination in list_ethernet_targets(world)
    ]


def send_fragments(world: JailWorld) -> list[bytes]:
    """Send complete packets in two fragments, with the second one first or last, and second fragments alone."""
    frames = []
    datagram = struct.pack(">HHHH", 5000, PORT, 8 + 4 * len(MARK), 0) + MARK * 4
    routes = [(world.victim.address, OUTSIDE_ADDRESS), ("10.213.0.77", OUTSIDE_ADDRESS)]
    routes += [(world.attacker.address, address) for address in (OTHER_OUTSIDE_ADDRESS, "10.214.0.1")]
    ids = itertools.count(1)
    for (source, target), destination in itertools.product(routes, list_ethernet_targets(world)):
        for order in ((0, 1), (1, 0), (1,)):
            id = next(ids)
            fragments = (
                make_packet(source, target, datagram[:32], fragment=0x2000, id=id),
                make_packet(source, target, datagram[32:], fragment=4, id=id),
            )
            frames += [
                make_frame(fragments[number], destination=destination, source=world.attacker.mac) for number in order
            ]
    return frames


@pytest.mark.parametrize(
    "attack", [spoof_source, send_to_forbidden_addresses, send_ipv6, send_tagged_frames, send_fragments]
)
async def test_only_allowed_packets_from_the_jails_own_address_pass(world: JailWorld, attack: Attack) -> None:
    policy = NetworkPolicy(deny_out=[OTHER_OUTSIDE_ADDRESS])
    await add_both_jails(world, policy)
    outside = _wait_until_up(world.run_in_stack("out", _SNIFF_PROGRAM, "outb"))
    host = _wait_until_up(world.shim.start("/usr/bin/python3", "-c", _RECEIVE_PROGRAM))
    world.send_frames(*attack(world))
    last_packet = make_udp(world.attacker.address, OUTSIDE_ADDRESS, PORT, END_MARK)
    world.send_frames(make_frame(last_packet, destination=read_bridge_mac(world), source=world.attacker.mac))
    assert not any(MARK in frame for frame in _wait_for_frames(outside))
    world.shim.check_ok("jexec", "out", "/usr/bin/python3", "-c", _SEND_UDP_PROGRAM, "10.214.0.1")
    assert _wait_for_lines(host) == []


# --- metadata services ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        NetworkPolicy(),
        NetworkPolicy(allow_internet=False, allow_out=["0.0.0.0/0"]),
        NetworkPolicy(allow_out=["0.0.0.0/1", "128.0.0.0/1"]),
    ],
)
async def test_metadata_services_are_unreachable_from_a_jail(world: JailWorld, policy: NetworkPolicy) -> None:
    await world.add_jail(world.attacker, policy)
    jail = f"sx{ATTACKER_NUMBER}"
    with world.serving("out"):
        assert world.is_reachable(OUTSIDE_ADDRESS, jail)
        assert [address for address in METADATA_ADDRESSES if world.is_reachable(address, jail)] == []


async def test_a_jail_reaches_only_the_metadata_service_that_its_policy_lists(world: JailWorld) -> None:
    jail = f"sx{ATTACKER_NUMBER}"
    await world.add_jail(world.attacker, NetworkPolicy())
    with world.serving("out"):
        for listed_address in METADATA_ADDRESSES:
            policy = NetworkPolicy(allow_internet=False, allow_out=["0.0.0.0/0", listed_address])
            await world.network.change_policy(jail, world.attacker, policy)
            assert [address for address in METADATA_ADDRESSES if world.is_reachable(address, jail)] == [listed_address]
