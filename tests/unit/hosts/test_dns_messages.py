"""Test that the resolver parses any bytes from a guest, and that its replies are small."""

from __future__ import annotations

import ipaddress
import itertools

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rrset
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox_gateway.hosts.kvm_xfs.network.dns_messages import (
    MAX_ADDRESSES,
    MAX_MESSAGE_BYTES,
    encode_reply,
    parse_query,
    read_addresses,
)

QUERY = dns.message.make_query("api.example.com", "A").to_wire()
_HEADER = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00"


@given(st.binary(max_size=600) | st.binary(max_size=300).map(lambda data: _HEADER + data))
@example(_HEADER + b"\xc0\x0c\x00\x01\x00\x01")  # The name is a pointer to itself.
@example(_HEADER + b"\xc0\x00\x00\x01\x00\x01")  # The name is a pointer to the header.
@example(_HEADER + b"\x01a\xc0\x0c\x00\x01\x00\x01")  # The name never ends.
@example(_HEADER + b"\x3f" + b"a" * 63 + b"\x00\x00\x01")
def test_arbitrary_bytes_are_parsed_or_ignored(data: bytes) -> None:
    if (query := parse_query(data)) is not None:
        reply = encode_reply(query, dns.rcode.REFUSED)
        assert len(reply) <= MAX_MESSAGE_BYTES
        assert reply[:2] == data[:2] and reply[2] & 0x80


@given(st.integers(0, len(QUERY) - 1), st.integers(0, 255))
def test_a_damaged_query_is_parsed_or_ignored(index: int, byte: int) -> None:
    if (query := parse_query(QUERY[:index] + bytes([byte]) + QUERY[index + 1 :])) is not None:
        encode_reply(query, dns.rcode.NOERROR, [ipaddress.IPv4Address("1.1.1.1")], 60)


def test_unsupported_messages_are_ignored() -> None:
    response = dns.message.make_response(dns.message.from_wire(QUERY)).to_wire()
    update_message = dns.message.make_query("api.example.com", "SOA")
    update_message.set_opcode(dns.opcode.UPDATE)
    query_with_two_questions = dns.message.make_query("a.example.com", "A")
    query_with_two_questions.question += dns.message.make_query("b.example.com", "A").question
    chaos_query = dns.message.make_query("version.bind", "TXT", "CH").to_wire()
    long_query = dns.message.make_query("api.example.com", "A", use_edns=0, pad=1000).to_wire()
    assert len(long_query) > MAX_MESSAGE_BYTES
    for data in (
        b"",
        QUERY[:12],
        response,
        update_message.to_wire(),
        query_with_two_questions.to_wire(),
        chaos_query,
        long_query,
    ):
        assert parse_query(data) is None
    assert parse_query(QUERY) is not None


def test_the_longest_reply_fits() -> None:
    name = dns.name.Name([b"a" * 63] * 3 + [b"a" * 61, b""])
    query = parse_query(dns.message.make_query(name, "A").to_wire())
    assert query is not None and len(name.to_wire()) == 255
    addresses = [ipaddress.IPv4Address(number) for number in range(MAX_ADDRESSES)]
    reply = encode_reply(query, dns.rcode.NOERROR, addresses, 3600)
    assert len(reply) <= MAX_MESSAGE_BYTES
    assert {each.address for each in dns.message.from_wire(reply).answer[0]} == {str(each) for each in addresses}


def make_response(*records: str) -> dns.message.Message:
    """Return a response to a query for api.example.com with ``records``, each "NAME TTL IN TYPE DATA"."""
    response = dns.message.make_response(dns.message.from_wire(QUERY))
    response.answer = [dns.rrset.from_text(*record.split(" ", 4)) for record in records]
    return dns.message.from_wire(response.to_wire())


def read_records(*records: str) -> tuple[list[str], int]:
    addresses, ttl = read_addresses(make_response(*records))
    return [str(address) for address in addresses], ttl


def test_aliases_are_followed_with_the_lowest_ttl() -> None:
    assert read_records(
        "cdn.example.net. 300 IN A 1.1.1.1",
        "Api.example.com. 900 IN CNAME lb.example.net.",
        "lb.example.net. 20 IN CNAME cdn.example.net.",
    ) == (["1.1.1.1"], 20)


def test_records_outside_the_chain_are_ignored() -> None:
    assert read_records("evil.example.net. 300 IN A 6.6.6.6") == ([], 0)
    assert read_records("api.example.com. 300 IN A 1.1.1.1", "evil.example.net. 300 IN A 6.6.6.6") == (["1.1.1.1"], 300)
    assert read_records("api.example.com. 300 IN CNAME lb.example.net.", "x.example.net. 300 IN A 6.6.6.6") == ([], 0)
    assert read_records("api.example.com. 300 IN AAAA ::1", "api.example.com. 300 IN TXT x") == ([], 0)


def test_loops_and_long_chains_of_aliases_are_refused() -> None:
    loop = ("api.example.com. 300 IN CNAME b.example.net.", "b.example.net. 300 IN CNAME api.example.com.")
    names = ["api.example.com.", *(f"n{number}.example.net." for number in range(30))]
    chain = [f"{name} 300 IN CNAME {target}" for name, target in itertools.pairwise(names)]
    chain.append(f"{names[-1]} 300 IN A 1.1.1.1")
    for records in (loop, ["api.example.com. 300 IN CNAME api.example.com."], chain):
        with pytest.raises(dns.exception.DNSException):
            read_addresses(make_response(*records))
