"""Ask the host's name servers for the addresses of domain names."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

import dns.asyncbackend
import dns.asyncquery
import dns.exception
import dns.message
import dns.name
import dns.rcode

from sandbox_gateway.hosts.kvm_xfs.network.dns_messages import read_addresses

_TIMEOUT_SECONDS = 2.0
"""The timeout for each name server."""
_MAX_SERVERS = 3
_MAX_QUERIES = 256
"""Maximum number of queries, across all sandboxes, that wait for a name server. Each has its own socket."""
_MAX_RESPONSE_BYTES = 1232
_ANSWER_RCODES = (dns.rcode.NOERROR, dns.rcode.NXDOMAIN)


@dataclass(frozen=True)
class Answer:
    """The addresses of a name, or the reason why there are none."""

    rcode: dns.rcode.Rcode
    addresses: tuple[ipaddress.IPv4Address, ...] = ()
    ttl: int = 0


class Upstream:
    """The name servers that the gateway asks, in this order. Responses that do not match the query are ignored."""

    def __init__(self, servers: Sequence[str], port: int = 53) -> None:
        self._servers = servers[:_MAX_SERVERS]
        self._port = port
        self._capacity = asyncio.Semaphore(_MAX_QUERIES)

    async def look_up(self, name: dns.name.Name) -> Answer:
        """Return the addresses of ``name``. If no name server answers, the code is SERVFAIL."""
        async with self._capacity:
            for server in self._servers:
                try:
                    answer = await self._ask(server, name)
                except (dns.exception.DNSException, OSError):
                    continue
                if answer.rcode in _ANSWER_RCODES:
                    return answer
        return Answer(dns.rcode.SERVFAIL)

    async def _ask(self, server: str, name: dns.name.Name) -> Answer:
        response = await dns.asyncquery.udp(
            dns.message.make_query(name, "A", use_edns=0, payload=_MAX_RESPONSE_BYTES),
            server,
            timeout=_TIMEOUT_SECONDS,
            port=self._port,
            ignore_unexpected=True,
            ignore_errors=True,
            backend=dns.asyncbackend.get_backend("asyncio"),
        )
        addresses, ttl = read_addresses(response)
        return Answer(response.rcode(), tuple(addresses), ttl)
