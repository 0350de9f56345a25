"""Test policies that allow domain names, with real packets (see ``test_netns``)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator

import dns.message
import dns.rcode
import pytest

from sandbox_gateway.hosts.kvm_xfs.network.addresses import Slot
from sandbox_gateway.hosts.kvm_xfs.network.slots import SlotPool
from sandbox_gateway.records import NetworkPolicy
from tests.kvm_xfs.slot_networks import (
    OPEN_POLICY,
    Guest,
    OutsideMachine,
    World,
    compute_outside_addresses,
    run_inside,
    world,
)
from tests.support.name_server import NameServer

pytestmark = pytest.mark.usefixtures("requires_root")

API = "api.example.com"
SERVICE, OTHER_SERVICE = "192.31.196.1", "192.175.48.1"
"""Public addresses of the outside machine. Port 80 accepts connections."""


def make_names_only_policy(*names: str) -> NetworkPolicy:
    return NetworkPolicy(allow_internet=False, allow_out=[*names])


@contextlib.asynccontextmanager
async def world_with_names() -> AsyncIterator[tuple[World, OutsideMachine, NameServer, socket.socket]]:
    """A world whose name server is the outside machine."""
    async with world(dns=[compute_outside_addresses()[1]]) as w:
        machine = w.add_outside_machine()
        for address in (SERVICE, OTHER_SERVICE):
            machine.add_address(address)
        service = w.close_at_end(machine.listen(80))
        server = NameServer(machine.listen(53, socket.SOCK_DGRAM))
        try:
            yield w, machine, server, service
        finally:
            server.close()


async def ask(guest: Guest, name: str, *, server: str = "192.0.2.53") -> tuple[dns.rcode.Rcode, list[str]]:
    """Send a query to a name server. Returns the code and the addresses of the reply."""

    def exchange() -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(20)
            client.connect((server, 53))
            client.send(dns.message.make_query(name, "A").to_wire())
            return client.recv(4096)

    # In a thread, because the resolver runs in this event loop.
    reply = dns.message.from_wire(await asyncio.to_thread(run_inside, guest.path, exchange))
    return reply.rcode(), [record.address for records in reply.answer for record in records]


async def test_a_guest_reaches_only_the_addresses_of_allowed_names() -> None:
    async with world_with_names() as (w, _, server, service):
        server.records[API] = ["300 CNAME cdn.example.net.", f"20 A {SERVICE}"]
        slot = await w.pool.take(OPEN_POLICY)
        guest = w.add_guest(slot)
        # A slot of an older release has neither this chain nor this set.
        run_nft(slot, "delete chain inet sandbox resolver; delete set inet sandbox name_addresses")
        await w.pool.apply(slot, make_names_only_policy(API))
        assert not guest.can_reach(SERVICE, 80)
        assert await ask(guest, API) == (dns.rcode.NOERROR, [SERVICE])
        connection = w.close_at_end(guest.connect(SERVICE, 80))
        outside_end = w.close_at_end(service.accept()[0])
        outside_end.settimeout(20)
        assert not guest.can_reach(OTHER_SERVICE, 80)

        # A new gateway answers queries, and the address is still open.
        await w.pool.close()
        pool = SlotPool(w.network)
        await pool.open({slot.number})
        try:
            await pool.adopt(slot.number, make_names_only_policy(API))
            assert guest.can_reach(SERVICE, 80, timeout=20)
            assert await ask(guest, API) == (dns.rcode.NOERROR, [SERVICE])
            assert await ask(guest, "other.example.com") == (dns.rcode.REFUSED, [])

            # After the timeout, only connections that are open continue.
            run_nft(slot, f"delete element inet sandbox name_addresses {{ {SERVICE} }}")
            assert not guest.can_reach(SERVICE, 80)
            connection.sendall(b"still")
            assert outside_end.recv(5) == b"still"

            # A new policy also applies to them.
            server.records["other.example.com"] = [f"300 A {OTHER_SERVICE}"]
            await pool.apply(slot, make_names_only_policy("*.example.com"))
            outside_end.settimeout(0.6)
            with contextlib.suppress(OSError):
                connection.sendall(b"secret")
            with pytest.raises(TimeoutError):
                outside_end.recv(6)
            assert await ask(guest, "other.example.com") == (dns.rcode.NOERROR, [OTHER_SERVICE])
            assert guest.can_reach(OTHER_SERVICE, 80, timeout=20)

            await pool.apply(slot, make_names_only_policy(API))
            assert not guest.can_reach(OTHER_SERVICE, 80)
            await pool.apply(slot, NetworkPolicy(allow_internet=False))
            with pytest.raises(OSError, match="No route to host"):
                await ask(guest, "other.example.com")
        finally:
            await pool.close()


def run_nft(slot: Slot, commands: str) -> None:
    subprocess.run(["nsenter", f"--net={slot.path}", "nft", commands], check=True, timeout=20)
