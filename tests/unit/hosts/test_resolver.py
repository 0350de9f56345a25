"""Test the resolver of a slot, with loopback sockets in place of the guest and of the name server."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace

import dns.message
import dns.rcode
import dns.rrset
import pytest

from sandbox_gateway.config import Network
from sandbox_gateway.errors import BackendFailed, Invalid
from sandbox_gateway.hosts.kvm_xfs.network import resolver as resolver_module
from sandbox_gateway.hosts.kvm_xfs.network import slots
from sandbox_gateway.hosts.kvm_xfs.network import upstream as upstream_module
from sandbox_gateway.hosts.kvm_xfs.network.name_policy import NamePolicy
from sandbox_gateway.hosts.kvm_xfs.network.resolver import MAX_OPEN_SECONDS, Resolver
from sandbox_gateway.hosts.kvm_xfs.network.upstream import Answer, Upstream
from sandbox_gateway.records import NetworkPolicy

SUBNET = ipaddress.IPv4Network("10.231.0.0/16")
API_NAME = "api.example.com"


def make_name_policy(*allowed: str) -> NamePolicy:
    return NamePolicy(NetworkPolicy(allow_internet=False, allow_out=[*allowed]), SUBNET)


def bind_socket() -> socket.socket:
    endpoint = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    endpoint.bind(("127.0.0.1", 0))
    endpoint.setblocking(False)
    return endpoint


class FakeUpstream(Upstream):
    """Gives every name the same addresses. While ``ready_event`` is unset, lookups wait."""

    def __init__(self) -> None:
        super().__init__([])
        self.addresses: list[str] = ["1.1.1.1"]
        self.ttl = 300
        self.names: list[str] = []
        self.ready_event = asyncio.Event()
        self.ready_event.set()

    async def look_up(self, name: dns.name.Name) -> Answer:
        self.names.append(str(name))
        await self.ready_event.wait()
        return Answer(dns.rcode.NOERROR, tuple(map(ipaddress.IPv4Address, self.addresses)), self.ttl)


class Slot:
    """A resolver and its guest. ``opened_addresses``: the addresses that the resolver opened, with their seconds."""

    def __init__(self, *allowed: str) -> None:
        self.upstream = FakeUpstream()
        self.opened_addresses: list[dict[str, int]] = []
        self.failure: BackendFailed | None = None
        self._socket = bind_socket()
        self._address = self._socket.getsockname()
        self.resolver = Resolver(self._socket, make_name_policy(*allowed), self.upstream, self._open_addresses)
        self.guest = bind_socket()
        self.guest.connect(self._address)

    async def _open_addresses(self, seconds: Mapping[str, int]) -> None:
        if self.failure:
            raise self.failure
        self.opened_addresses.append(dict(seconds))

    def send(self, name: str, kind: str = "A") -> None:
        self.guest.send(dns.message.make_query(name, kind).to_wire())

    async def receive(self) -> dns.message.Message:
        async with asyncio.timeout(20):
            return dns.message.from_wire(await asyncio.get_running_loop().sock_recv(self.guest, 4096))

    async def send_and_receive(self, name: str, kind: str = "A") -> tuple[dns.rcode.Rcode, list[str], int]:
        """Return the code, the addresses and the TTL of the reply."""
        self.send(name, kind)
        reply = await self.receive()
        records = reply.answer[0] if reply.answer else None
        return reply.rcode(), [each.address for each in records or ()], records.ttl if records else 0


@contextlib.asynccontextmanager
async def running_slot(*allowed: str) -> AsyncIterator[Slot]:
    new_slot = Slot(*(allowed or (API_NAME,)))
    try:
        yield new_slot
    finally:
        new_slot.resolver.close()
        new_slot.guest.close()


async def test_addresses_are_open_before_the_reply() -> None:
    async with running_slot() as s:
        assert await s.send_and_receive("API.example.com.") == (dns.rcode.NOERROR, ["1.1.1.1"], 300)
        assert s.opened_addresses == [{"1.1.1.1": 360}]


async def test_other_names_and_types_are_not_looked_up() -> None:
    async with running_slot(API_NAME, "*.wild.org") as s:
        for name in ("secret-data.evil.net", "example.com", "x.api.example.com", "wild.org"):
            assert await s.send_and_receive(name) == (dns.rcode.REFUSED, [], 0)
        for kind in ("AAAA", "TXT", "HTTPS", "ANY"):
            assert await s.send_and_receive(API_NAME, kind) == (dns.rcode.NOERROR, [], 0)
        assert (s.upstream.names, s.opened_addresses) == ([], [])


async def test_denied_addresses_are_neither_opened_nor_returned() -> None:
    async with running_slot(API_NAME, "10.9.0.0/16") as s:
        s.upstream.addresses = ["169.254.169.254", "168.63.129.16", "10.0.0.1", "10.231.0.6", "127.0.0.1", "10.9.0.1"]
        assert await s.send_and_receive(API_NAME) == (dns.rcode.NOERROR, ["10.9.0.1"], 300)
        s.upstream.addresses = ["169.254.169.254"]
        assert await s.send_and_receive(API_NAME) == (dns.rcode.NOERROR, [], 0)
        assert s.opened_addresses == []


@pytest.mark.parametrize(
    ("ttl", "reply_ttl", "seconds"), [(0, 0, 120), (1, 1, 120), (2**31 - 1, MAX_OPEN_SECONDS, 3660)]
)
async def test_the_time_for_which_an_address_is_open_is_bounded(ttl: int, reply_ttl: int, seconds: int) -> None:
    async with running_slot() as s:
        s.upstream.ttl = ttl
        assert await s.send_and_receive(API_NAME) == (dns.rcode.NOERROR, ["1.1.1.1"], reply_ttl)
        assert s.opened_addresses == [{"1.1.1.1": seconds}]


async def test_an_open_address_is_extended_only_near_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(resolver_module, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    async with running_slot() as s:
        await s.send_and_receive(API_NAME)
        for clock.seconds, reply_ttl in ((1100.0, 230), (1300.0, 30), (1301.0, 300), (1302.0, 300)):
            assert (await s.send_and_receive(API_NAME))[2] == reply_ttl
        assert len(s.opened_addresses) == 2


async def test_the_number_of_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver_module, "MAX_NAME_ADDRESSES", 3)
    async with running_slot() as s:
        s.upstream.addresses = ["1.1.1.1", "1.1.1.2"]
        assert (await s.send_and_receive(API_NAME))[0] == dns.rcode.NOERROR
        s.upstream.addresses = ["1.1.1.3", "1.1.1.4"]
        assert await s.send_and_receive(API_NAME) == (dns.rcode.SERVFAIL, [], 0)
        assert len(s.opened_addresses) == 1


async def test_a_failure_to_open_an_address_is_reported_and_repeated() -> None:
    async with running_slot() as s:
        s.failure = BackendFailed("nft failed")
        assert await s.send_and_receive(API_NAME) == (dns.rcode.SERVFAIL, [], 0)
        s.failure = None
        assert (await s.send_and_receive(API_NAME))[:2] == (dns.rcode.NOERROR, ["1.1.1.1"])


async def test_outstanding_queries_are_bounded_and_other_replies_do_not_wait_for_them() -> None:
    async with running_slot("*.example.com") as s:
        s.upstream.ready_event.clear()
        for number in range(30):
            s.send(f"n{number}.example.com")
        assert (await s.send_and_receive("evil.net"))[0] == dns.rcode.REFUSED
        assert len(s.upstream.names) == 16
        s.upstream.ready_event.set()
        for _ in range(16):
            assert (await s.receive()).rcode() == dns.rcode.NOERROR


async def test_a_lookup_under_an_earlier_policy_opens_nothing() -> None:
    async with running_slot() as s:
        s.upstream.ready_event.clear()
        s.send(API_NAME)
        assert (await s.send_and_receive("evil.net"))[0] == dns.rcode.REFUSED  # After this reply, the lookup has begun.
        async with s.resolver.replacing_policy(make_name_policy("other.example.com")):
            s.upstream.ready_event.set()
        assert (await s.send_and_receive("other.example.com"))[:2] == (dns.rcode.NOERROR, ["1.1.1.1"])
        assert len(s.upstream.names) == 2 and len(s.opened_addresses) == 1
        assert (await s.send_and_receive(API_NAME))[0] == dns.rcode.REFUSED


async def test_addresses_are_allowed_again_under_a_new_policy() -> None:
    async with running_slot() as s:
        for count in (1, 2):
            assert (await s.send_and_receive(API_NAME))[1] == ["1.1.1.1"]
            assert len(s.opened_addresses) == count
            async with s.resolver.replacing_policy(make_name_policy(API_NAME)):
                pass


async def test_a_policy_that_cannot_be_applied_changes_nothing() -> None:
    async with running_slot() as s:
        with pytest.raises(BackendFailed):
            async with s.resolver.replacing_policy(make_name_policy("other.example.com")):
                raise BackendFailed("nft failed")
        assert (await s.send_and_receive(API_NAME))[1] == ["1.1.1.1"]


async def test_invalid_messages_get_no_reply() -> None:
    async with running_slot() as s:
        for data in (b"", b"x", b"\0" * 12, b"\xff" * 512, b"a" * 2000):
            s.guest.send(data)
        assert (await s.send_and_receive(API_NAME))[1] == ["1.1.1.1"]


async def test_no_resolver_remains_for_a_slot_that_is_removed_in_the_meantime(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = slots.SlotPool(Network(dns=["9.9.9.9"]))
    removed_slot = pool._slots[0] = pool._create_slot_record(0)
    endpoint = bind_socket()

    async def run_in_thread(*_: object) -> socket.socket:
        del pool._slots[0]
        return endpoint

    monkeypatch.setattr(slots, "run_in_thread", run_in_thread)
    with pytest.raises(BackendFailed, match="its machine has stopped"):
        await pool.apply(removed_slot, NetworkPolicy(allow_internet=False, allow_out=[API_NAME]))
    assert endpoint.fileno() == -1 and pool._resolvers == {}


async def test_names_need_a_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "find_name_servers", lambda network: [])
    pool = slots.SlotPool(Network())
    with pytest.raises(Invalid, match=r"set \[network\] dns"):
        pool.check(NetworkPolicy(allow_internet=False, allow_out=[API_NAME]))
    pool.check(NetworkPolicy(allow_internet=False, allow_out=["1.1.1.1"]))


# --- the name server ---------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running_name_server(answer: Callable[[dns.message.Message], list[bytes]]) -> AsyncIterator[Upstream]:
    """Serve DNS on a loopback port. ``answer`` returns the datagrams to send for a query."""
    endpoint, loop = bind_socket(), asyncio.get_running_loop()

    def receive() -> None:
        data, sender = endpoint.recvfrom(4096)
        for datagram in answer(dns.message.from_wire(data)):
            endpoint.sendto(datagram, sender)

    loop.add_reader(endpoint, receive)
    try:
        yield Upstream(["127.0.0.1"], endpoint.getsockname()[1])
    finally:
        loop.remove_reader(endpoint)
        endpoint.close()


def make_reply(query: dns.message.Message, *records: str, rcode: dns.rcode.Rcode = dns.rcode.NOERROR) -> bytes:
    reply = dns.message.make_response(query)
    reply.set_rcode(rcode)
    reply.answer = [dns.rrset.from_text(*record.split(" ", 4)) for record in records]
    return reply.to_wire()


async def test_forged_and_malformed_responses_are_ignored() -> None:
    def answer(query: dns.message.Message) -> list[bytes]:
        valid_reply = make_reply(query, f"{API_NAME}. 300 IN A 1.1.1.1")
        reply_with_other_id = bytes([valid_reply[0] ^ 1]) + valid_reply[1:]
        forged_query = dns.message.make_query("other.example.com", "A", id=query.id)
        reply_to_other_question = make_reply(forged_query, f"{API_NAME}. 300 IN A 6.6.6.6")
        return [
            b"",
            b"\xff" * 40,
            valid_reply[:-3],
            query.to_wire(),
            reply_with_other_id,
            reply_to_other_question,
            valid_reply,
        ]

    async with running_name_server(answer) as upstream:
        first_answer = await upstream.look_up(dns.name.from_text(API_NAME))
    assert first_answer == Answer(dns.rcode.NOERROR, (ipaddress.IPv4Address("1.1.1.1"),), 300)


async def test_loops_and_failures_return_servfail_and_missing_names_return_nxdomain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream_module, "_TIMEOUT_SECONDS", 0.1)
    replies: list[Callable[[dns.message.Message], list[bytes]]] = [
        lambda query: [make_reply(query, f"{API_NAME}. 300 IN CNAME {API_NAME}.")],
        lambda query: [make_reply(query, rcode=dns.rcode.SERVFAIL)],
        lambda query: [],
    ]
    for answer in replies:
        async with running_name_server(answer) as upstream:
            assert await upstream.look_up(dns.name.from_text(API_NAME)) == Answer(dns.rcode.SERVFAIL)
    async with running_name_server(lambda query: [make_reply(query, rcode=dns.rcode.NXDOMAIN)]) as upstream:
        assert await upstream.look_up(dns.name.from_text(API_NAME)) == Answer(dns.rcode.NXDOMAIN)
