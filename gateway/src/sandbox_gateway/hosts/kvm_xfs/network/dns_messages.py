"""Parse the DNS queries of guests, and write the replies.

A guest may send any bytes. Queries and replies are limited to the message size of DNS without extensions. Replies
therefore always fit in one datagram, and no guest needs DNS over TCP.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rrset

MAX_MESSAGE_BYTES = 512
MAX_ADDRESSES = 15
"""Maximum number of addresses in a reply. With the longest possible name, they fit in ``MAX_MESSAGE_BYTES``."""
_HEADER_BYTES = 12


def parse_query(data: bytes) -> dns.message.Message | None:
    """Return a standard query with one question of class IN, or None if ``data`` is anything else.

    Only the header and the question are parsed.
    """
    # Check the bits QR and OPCODE and the number of questions first, so that the parser reads nothing else.
    if not _HEADER_BYTES < len(data) <= MAX_MESSAGE_BYTES or data[2] & 0xF8 or data[4:6] != b"\0\1":
        return None
    try:
        query = dns.message.from_wire(data, question_only=True)
    except dns.exception.DNSException:
        return None
    is_valid = len(query.question) == 1 and query.question[0].rdclass == dns.rdataclass.IN
    return query if is_valid else None


def encode_reply(
    query: dns.message.Message,
    rcode: dns.rcode.Rcode,
    addresses: Sequence[ipaddress.IPv4Address] = (),
    ttl: int = 0,
) -> bytes:
    """Return the reply to ``query``. ``addresses``: at most ``MAX_ADDRESSES``."""
    reply = dns.message.make_response(query, recursion_available=True)
    reply.set_rcode(rcode)
    if addresses:
        records = [dns.rdata.from_text("IN", "A", str(address)) for address in addresses]
        reply.answer.append(dns.rrset.from_rdata_list(query.question[0].name, ttl, records))
    return reply.to_wire()


def read_addresses(response: dns.message.Message) -> tuple[list[ipaddress.IPv4Address], int]:
    """Return the IPv4 addresses that a name server's response contains, and for how many seconds they are valid.

    Follows a chain of aliases (CNAME) within the response. Ignores records that do not belong to the chain. Raises
    DNSException for a chain that is too long, such as a loop.
    """
    if not isinstance(response, dns.message.QueryMessage):
        return [], 0
    chain = response.resolve_chaining()
    if chain.answer is None:
        return [], 0
    return [ipaddress.IPv4Address(record.address) for record in chain.answer], chain.minimum_ttl
