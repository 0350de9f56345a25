"""Root in a virtual machine sends arbitrary frames.

Only packets from the guest's own address leave its network slot, and the slot's address becomes their source. The guest
is a network namespace on the slot's real tap, as in `tests/kvm_xfs/test_netns.py`. The tests observe outgoing frames at
the host's end of the veth pair. Each test ends with a packet that is allowed; once that packet arrives, all earlier
frames have been processed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest

from sandbox_gateway.hosts.connect import AGENT_PORT
from sandbox_gateway.hosts.kvm_xfs.network.addresses import (
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    GUEST_MAC,
    TAP_MAC,
    TAP_NAME,
    VOLUME_PORTS,
    Slot,
    get_volume_address,
)
from sandbox_gateway.records import NetworkPolicy
from tests.kvm_xfs.slot_networks import OPEN_POLICY, Guest, OutsideMachine, run_inside, world

pytestmark = pytest.mark.usefixtures("requires_root")

IPV4, ARP, VLAN, QINQ, IPV6, EAPOL, LLDP = 0x0800, 0x0806, 0x8100, 0x88A8, 0x86DD, 0x888E, 0x88CC
ETH_P_ALL = 3
UDP, TCP, ICMP, IGMP = 17, 6, 1, 2
PORT = 48126
MARK, END_MARK = b"from-a-guest", b"the-last-one"
BROADCAST_MAC, FOREIGN_MAC = "ff:ff:ff:ff:ff:ff", "02:00:5e:00:00:99"


def parse_mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def make_frame(payload: bytes, kind: int = IPV4, *, destination: str = TAP_MAC, source: str = GUEST_MAC) -> bytes:
    return parse_mac(destination) + parse_mac(source) + struct.pack(">H", kind) + payload


def compute_checksum(data: bytes) -> int:
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def make_packet(
    source: str,
    target: str,
    payload: bytes,
    protocol: int = UDP,
    *,
    fragment: int = 0,
    options: bytes = b"",
    id: int = 7,
) -> bytes:
    """Return an IPv4 packet. ``fragment``: the flags and fragment offset, as encoded in the header."""
    header_words = 5 + len(options) // 4
    size = 4 * header_words + len(payload)
    addresses = socket.inet_aton(source) + socket.inet_aton(target)
    header = struct.pack(">BBHHHBBH", 0x40 | header_words, 0, size, id, fragment, 64, protocol, 0) + addresses + options
    return header[:10] + struct.pack(">H", compute_checksum(header)) + header[12:] + payload


def make_udp(source: str, target: str, port: int = PORT, data: bytes = MARK, **packet_options: int) -> bytes:
    return make_packet(source, target, struct.pack(">HHHH", 5000, port, 8 + len(data), 0) + data, **packet_options)  # type: ignore[arg-type]


def make_arp(operation: int, sender: str, sender_mac: str, target: str, target_mac: str = "00:00:00:00:00:00") -> bytes:
    header = struct.pack(">HHBBH", 1, IPV4, 6, 4, operation)
    return header + parse_mac(sender_mac) + socket.inet_aton(sender) + parse_mac(target_mac) + socket.inet_aton(target)


def make_ipv6(source: str, target: str, payload: bytes, protocol: int = UDP) -> bytes:
    header = struct.pack(">IHBB", 6 << 28, len(payload), protocol, 255)
    return header + ipaddress.IPv6Address(source).packed + ipaddress.IPv6Address(target).packed + payload


@dataclass(frozen=True)
class AttackAddresses:
    """The addresses that an attacker may know."""

    slot: Slot
    neighbour: Slot
    outside_address: str
    host_address: str
    volumes_address: str


Attack = Callable[[AttackAddresses], list[bytes]]


def list_source_addresses(addresses: AttackAddresses) -> list[str]:
    slot, neighbour = addresses.slot, addresses.neighbour
    known_addresses = [
        slot.host_address,
        slot.veth_address,
        addresses.outside_address,
        addresses.host_address,
        addresses.volumes_address,
    ]
    special_addresses = [
        "0.0.0.0",
        "255.255.255.255",
        "127.0.0.1",
        "169.254.0.20",
        "169.254.0.23",
        "224.0.0.1",
        "10.99.99.99",
    ]
    return [*known_addresses, *special_addresses, neighbour.host_address, neighbour.veth_address, GATEWAY_ADDRESS]


def list_target_addresses(addresses: AttackAddresses) -> list[str]:
    slot, neighbour = addresses.slot, addresses.neighbour
    network = ipaddress.ip_network(f"{slot.host_address}/30", strict=False)
    return [
        *(
            slot.veth_address,
            neighbour.veth_address,
            neighbour.host_address,
            addresses.host_address,
            addresses.volumes_address,
        ),
        *("127.0.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "239.255.255.250", "169.254.0.23"),
        *(str(network.broadcast_address), str(network.network_address), GATEWAY_ADDRESS, slot.host_address),
    ]


def make_extension_headers() -> bytes:
    """Return three IPv6 extension headers followed by a UDP datagram."""
    padding = struct.pack(">BBBBI", 0, 0, 1, 4, 0)
    return b"\x00" + padding[1:] + b"\x3c" + padding[1:] + bytes([UDP]) + padding[1:] + MARK


ATTACKS: dict[str, Attack] = {
    "another source": lambda p: [
        make_frame(make_udp(source, p.outside_address)) for source in list_source_addresses(p)
    ],
    "another source, to the neighbour": lambda p: [
        make_frame(make_udp(source, p.neighbour.host_address, AGENT_PORT)) for source in list_source_addresses(p)
    ],
    "another target": lambda p: [make_frame(make_udp(GUEST_ADDRESS, target)) for target in list_target_addresses(p)],
    "another target, TCP": lambda p: [
        make_frame(
            make_packet(GUEST_ADDRESS, target, struct.pack(">HHIIHHHH", 5000, port, 1, 0, 0x5002, 9, 0, 0) + MARK, TCP)
        )
        for target in list_target_addresses(p)
        for port in (22, 80, AGENT_PORT, VOLUME_PORTS[0], VOLUME_PORTS[1])
        if target != GATEWAY_ADDRESS
    ],
    "IPv6": lambda p: [
        make_frame(
            make_ipv6(source, target, struct.pack(">HHHH", 5000, PORT, 8 + len(MARK), 0) + MARK),
            IPV6,
            destination=destination,
        )
        for source in ("fe80::1", "::1", "fd99::1", f"::ffff:{GUEST_ADDRESS}", "::")
        for target, destination in (
            ("fe80::2", TAP_MAC),
            ("ff02::1", "33:33:00:00:00:01"),
            (f"::ffff:{p.outside_address}", TAP_MAC),
        )
    ],
    "IPv6 router advertisements": lambda p: [
        make_frame(
            make_ipv6("fe80::1", "ff02::1", b"\x86\x00\x00\x00\x40\x00\x07\x08" + bytes(8) + MARK, 58),
            IPV6,
            destination=BROADCAST_MAC,
        )
    ],
    "IPv6 extension headers": lambda p: [
        make_frame(make_ipv6("fe80::1", "ff02::1", make_extension_headers(), 0), IPV6, destination=BROADCAST_MAC)
    ],
    "IPv4 labelled as IPv6, and vice versa": lambda p: [
        make_frame(make_udp(GUEST_ADDRESS, p.outside_address), IPV6),
        make_frame(make_ipv6("fe80::1", "fe80::2", MARK), IPV4),
    ],
    "VLAN": lambda p: [
        make_frame(struct.pack(">HH", vlan, IPV4) + make_udp("10.99.99.99", target), kind)
        for vlan in (0, 1, 2, 100, 4095)
        for kind in (VLAN, QINQ)
        for target in (p.outside_address, p.neighbour.host_address, p.slot.veth_address)
    ],
    "VLAN in VLAN": lambda p: [
        make_frame(struct.pack(">HHHH", 0, inner, 0, IPV4) + make_udp("10.99.99.99", p.outside_address), outer_type)
        for outer_type in (VLAN, QINQ)
        for inner in (VLAN, QINQ)
    ],
    "IPv6 in a VLAN": lambda p: [make_frame(struct.pack(">HH", 0, IPV6) + make_ipv6("fe80::1", "ff02::1", MARK), VLAN)],
    "ARP": lambda p: [
        make_frame(
            make_arp(operation, claimed_address, sender_mac, requested_address) + MARK,
            ARP,
            destination=destination,
            source=sender_mac,
        )
        for operation in (1, 2, 3, 4)
        for claimed_address in (
            GATEWAY_ADDRESS,
            GUEST_ADDRESS,
            p.slot.veth_address,
            p.neighbour.host_address,
            p.outside_address,
        )
        for requested_address in (GATEWAY_ADDRESS, claimed_address)
        for sender_mac in (GUEST_MAC, FOREIGN_MAC)
        for destination in (TAP_MAC, BROADCAST_MAC)
    ],
    "fragments of another source": lambda p: [
        make_frame(make_udp("10.99.99.99", p.outside_address, fragment=0x2000)),
        make_frame(make_packet("10.99.99.99", p.outside_address, MARK * 2, fragment=2)),
    ],
    "fragments after an allowed first fragment": lambda p: [
        make_frame(make_udp(GUEST_ADDRESS, p.outside_address, data=b"x" * 16, fragment=0x2000, id=9)),
        make_frame(make_packet("10.99.99.99", p.outside_address, MARK * 2, fragment=3, id=9)),
    ],
    "overlapping fragments": lambda p: [
        make_frame(make_udp(GUEST_ADDRESS, p.outside_address, data=b"x" * 24, fragment=0x2000, id=10)),
        make_frame(make_packet(GUEST_ADDRESS, p.outside_address, MARK + bytes(12), fragment=0x2001, id=10)),
        make_frame(make_packet(GUEST_ADDRESS, p.outside_address, MARK + bytes(12), fragment=1, id=10)),
    ],
    "a fragment beyond 64 KiB": lambda p: [
        make_frame(make_packet(GUEST_ADDRESS, p.outside_address, MARK * 100, fragment=0x1FFF))
    ],
    "another sender's MAC": lambda p: [
        make_frame(make_udp("10.99.99.99", p.outside_address), source=source)
        for source in (FOREIGN_MAC, TAP_MAC, BROADCAST_MAC)
    ],
    "to another MAC": lambda p: [
        make_frame(make_udp(GUEST_ADDRESS, p.outside_address), destination=destination)
        for destination in (FOREIGN_MAC, "00:00:00:00:00:00", GUEST_MAC)
    ],
    "DHCP": lambda p: [
        make_frame(
            make_packet("0.0.0.0", target, struct.pack(">HHHH", source_port, port, 8 + len(MARK), 0) + MARK),
            destination=BROADCAST_MAC,
        )
        for source_port, port in ((68, 67), (67, 68))
        for target in ("255.255.255.255", GATEWAY_ADDRESS, p.slot.veth_address)
    ],
    "multicast and broadcast": lambda p: [
        make_frame(make_packet(source, target, MARK, protocol), destination=destination)
        for source in (GUEST_ADDRESS, "10.99.99.99")
        for target, destination in (("224.0.0.1", "01:00:5e:00:00:01"), ("255.255.255.255", BROADCAST_MAC))
        for protocol in (UDP, IGMP, ICMP)
    ],
    "source routes": lambda p: [
        # LSRR and SSRR over the slot, to the neighbour and the host.
        make_frame(
            make_packet(
                GUEST_ADDRESS,
                intermediate_address,
                MARK,
                options=bytes([kind, 7, 4]) + socket.inet_aton(destination) + b"\x00",
            )
        )
        for kind in (0x83, 0x89)
        for intermediate_address in (GATEWAY_ADDRESS, p.slot.veth_address, p.slot.host_address)
        for destination in (p.neighbour.host_address, p.host_address, p.outside_address)
    ],
    "redirects": lambda p: [
        make_frame(
            make_packet(source, GATEWAY_ADDRESS, b"\x05\x01\x00\x00" + socket.inet_aton(GUEST_ADDRESS) + MARK, ICMP)
        )
        for source in (p.slot.veth_address, GUEST_ADDRESS)
    ],
    "packets in packets": lambda p: [
        make_frame(
            make_packet("10.99.99.99", p.outside_address, make_udp(GUEST_ADDRESS, p.neighbour.host_address), protocol)
        )
        for protocol in (4, 41, 47, 50, 115)
    ],
    "invalid headers": lambda p: [
        make_frame(b"\x45"),
        make_frame(b"\x4f" + make_udp(GUEST_ADDRESS, p.outside_address)[1:]),
        make_frame(b"\x41" + make_udp(GUEST_ADDRESS, p.outside_address)[1:]),
        make_frame(
            make_udp(GUEST_ADDRESS, p.outside_address)[:10]
            + b"\x00\x00"
            + make_udp(GUEST_ADDRESS, p.outside_address)[12:]
        ),
        make_frame(make_udp(GUEST_ADDRESS, p.outside_address)[:24]),
        make_frame(b""),
    ],
    "other protocols": lambda p: [
        make_frame(MARK * 5, kind, destination=destination)
        for kind in (EAPOL, LLDP, 0x8863, 0x8864, 0x88E5, 0x0000, 0x05DC, 0xFFFF)
        for destination in (TAP_MAC, BROADCAST_MAC, "01:80:c2:00:00:00", "01:80:c2:00:00:0e")
    ],
}


class Sniffer:
    """Captures frames on an interface of the host or of a namespace. ``incoming``: only incoming frames."""

    def __init__(
        self,
        run_in_namespace: Callable[[Callable[[], socket.socket]], socket.socket],
        name: str,
        *,
        incoming: bool = False,
    ) -> None:
        self._socket = run_in_namespace(lambda: open_sniffer(name))
        self._incoming = incoming

    def read_until(self, end: bytes) -> list[bytes]:
        """Return all frames up to and including the first that contains ``end``."""
        frames: list[bytes] = []
        while not frames or end not in frames[-1]:
            data, address = self._socket.recvfrom(65536)
            if not (self._incoming and address[2] == socket.PACKET_OUTGOING):
                frames.append(data)
        return frames

    def read_pending_frames(self) -> list[bytes]:
        frames = []
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                frames.append(self._socket.recv(65536))
        return frames

    def close(self) -> None:
        self._socket.close()


def open_sniffer(name: str) -> socket.socket:
    # Set the protocol only when binding. Otherwise, the socket would receive frames of all interfaces.
    sniffer_socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    sniffer_socket.bind((name, ETH_P_ALL))
    sniffer_socket.settimeout(15)
    return sniffer_socket


def read_network_state(slot: Slot) -> list[str]:
    """Return a slot's routes, addresses and rules, both in its namespace and on the host.

    Checks that the guest's neighbour entry is permanent and has the guest's MAC address.
    """
    outputs = []
    for command in (("ip", "route"), ("ip", "-6", "route"), ("ip", "-br", "address"), ("nft", "list", "ruleset")):
        for prefix in ((), ("nsenter", f"--net={slot.path}")):
            output = subprocess.run([*prefix, *command], capture_output=True, text=True, check=True, timeout=20).stdout
            # On the host, use only the lines of this slot, because other slots are created and removed.
            lines = [line for line in output.splitlines() if prefix or slot.name in line]
            outputs.append("\n".join(line for line in lines if "counter" not in line))
    neighbour_output = subprocess.run(
        ["nsenter", f"--net={slot.path}", "ip", "neighbour", "show", "dev", TAP_NAME],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout
    guest_entries = [line for line in neighbour_output.splitlines() if line.startswith(f"{GUEST_ADDRESS} ")]
    assert guest_entries
    assert all(GUEST_MAC in line and "PERMANENT" in line for line in guest_entries)
    return outputs


def send_frames(guest: Guest, frames: list[bytes]) -> None:
    def send_all() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw_socket:
            raw_socket.bind(("eth0", 0))
            for frame in frames:
                raw_socket.send(frame.ljust(14, b"\0"))

    run_inside(guest.path, send_all)


@dataclass
class MonitoredSlot:
    addresses: AttackAddresses
    guest: Guest
    host_sniffer: Sniffer
    """At the host's end of the slot's veth pair."""
    machine_sniffer: Sniffer
    """At the interface of the outside machine."""
    neighbour_sniffer: Sniffer
    """At the tap of the neighbour's slot."""

    def check_outgoing_frames(self) -> list[bytes]:
        """Assert that all frames that left the slot are allowed, and return them."""
        send_frames(self.guest, [make_frame(make_udp(GUEST_ADDRESS, self.addresses.outside_address, data=END_MARK))])
        frames = self.host_sniffer.read_until(END_MARK)
        for each in frames:
            (kind,) = struct.unpack(">H", each[12:14])
            # The slot itself sends ARP requests for the MAC address of its neighbour.
            assert kind in (IPV4, ARP), each.hex()
            if kind == IPV4:
                assert socket.inet_ntoa(each[26:30]) == self.addresses.slot.host_address, each.hex()
            if kind == ARP:
                sender_address = socket.inet_ntoa(each[28:32])
                assert sender_address in (self.addresses.slot.host_address, self.addresses.slot.veth_address), (
                    each.hex()
                )
                assert MARK not in each
        machine_frames = self.machine_sniffer.read_until(END_MARK)
        assert not any(MARK in each for each in machine_frames), "a frame reached another machine"
        neighbour_frames = self.neighbour_sniffer.read_pending_frames()
        assert not any(MARK in each for each in neighbour_frames), "a frame reached the neighbour"
        return frames


@contextlib.asynccontextmanager
async def opened_monitored_slot() -> AsyncIterator[MonitoredSlot]:
    async with world() as w:
        slot, neighbour_slot = await w.pool.take(OPEN_POLICY), await w.pool.take(NetworkPolicy(allow_out=["0.0.0.0/0"]))
        guest, _ = w.add_guest(slot), w.add_guest(neighbour_slot)
        outside_machine: OutsideMachine = w.add_outside_machine()
        addresses = AttackAddresses(
            slot, neighbour_slot, outside_machine.address, outside_machine.host_address, get_volume_address(w.network)
        )
        sniffers = (
            Sniffer(lambda make: make(), slot.veth, incoming=True),
            Sniffer(lambda make: run_inside(outside_machine.path, make), "eth0"),
            Sniffer(lambda make: run_inside(neighbour_slot.path, make), TAP_NAME),
        )
        try:
            yield MonitoredSlot(addresses, guest, *sniffers)
        finally:
            for sniffer in sniffers:
                sniffer.close()


@pytest.mark.parametrize("attack", ATTACKS)
async def test_only_the_guests_own_packets_leave_a_slot(attack: str) -> None:
    async with opened_monitored_slot() as monitored_slot:
        send_frames(
            monitored_slot.guest,
            [make_frame(make_udp(GUEST_ADDRESS, monitored_slot.addresses.outside_address, data=END_MARK))],
        )
        monitored_slot.host_sniffer.read_until(END_MARK), monitored_slot.machine_sniffer.read_until(END_MARK)
        state_before = read_network_state(monitored_slot.addresses.slot)
        with listening_everywhere(monitored_slot.addresses) as read_packets:
            await asyncio.to_thread(send_frames, monitored_slot.guest, ATTACKS[attack](monitored_slot.addresses))
            await asyncio.to_thread(monitored_slot.check_outgoing_frames)
            assert read_packets() == [], "a packet reached a service of the host"
        assert read_network_state(monitored_slot.addresses.slot) == state_before


@contextlib.contextmanager
def listening_everywhere(addresses: AttackAddresses) -> Iterator[Callable[[], list[bytes]]]:
    """Open UDP sockets on all addresses of the host, and yield a function that returns the received packets."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for port in (PORT, 67, 68):
            udp_socket = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            udp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            udp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with contextlib.suppress(OSError):
                udp_socket.bind(("0.0.0.0", port))
                udp_socket.setblocking(False)
                sockets.append(udp_socket)

        def read_packets() -> list[bytes]:
            packets = []
            for udp_socket in sockets:
                with contextlib.suppress(BlockingIOError):
                    packets.append(udp_socket.recv(4096))
            return packets

        yield read_packets


async def test_valid_fragments_pass() -> None:
    """Check that the attacks above fail because of what they send, not because their frames are raw or fragmented."""

    async with opened_monitored_slot() as monitored_slot:
        data = os.urandom(8).hex().encode() * 4
        datagram = struct.pack(">HHHH", 5000, PORT, 8 + len(data), 0) + data
        fragments = [
            make_packet(GUEST_ADDRESS, monitored_slot.addresses.outside_address, datagram[:24], fragment=0x2000, id=21),
            make_packet(GUEST_ADDRESS, monitored_slot.addresses.outside_address, datagram[24:], fragment=3, id=21),
        ]
        await asyncio.to_thread(send_frames, monitored_slot.guest, [make_frame(packet) for packet in fragments])
        machine_frames = await asyncio.to_thread(monitored_slot.machine_sniffer.read_until, data[:16])
        assert socket.inet_ntoa(machine_frames[-1][26:30]) == monitored_slot.addresses.host_address
