"""Answer the DNS queries of a sandbox whose policy allows domain names.

The slot's rules redirect all queries over UDP to a socket of the gateway in the slot's namespace, so that the socket
identifies the sandbox. The resolver looks up only allowed names, so that a sandbox cannot send data to other name
servers in its queries. It opens the addresses in the slot's rules before it replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import dns.message
import dns.rcode
import dns.rdatatype

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.kvm_xfs.network.addresses import GATEWAY_ADDRESS, Slot
from sandbox_gateway.hosts.kvm_xfs.network.dns_messages import (
    MAX_ADDRESSES,
    MAX_MESSAGE_BYTES,
    encode_reply,
    parse_query,
)
from sandbox_gateway.hosts.kvm_xfs.network.name_policy import NamePolicy
from sandbox_gateway.hosts.kvm_xfs.network.namespaces import in_namespace
from sandbox_gateway.hosts.kvm_xfs.network.rules import MAX_NAME_ADDRESSES
from sandbox_gateway.hosts.kvm_xfs.network.upstream import Upstream
from sandbox_gateway.log import Logger

MIN_OPEN_SECONDS, MAX_OPEN_SECONDS = 60, 3600
"""An address stays open for the TTL of its record, within these limits, and a little longer."""
_GRACE_SECONDS = 30
"""The minimum time, in seconds, that an address stays open after the TTL in a reply has expired."""
_MAX_OUTSTANDING_QUERIES = 16
"""Maximum number of a sandbox's queries that wait for an answer. More are dropped, and the guest resends them."""
_RECEIVE_BUFFER_BYTES = 64 << 10

log = Logger("resolver")


def open_socket(slot: Slot) -> socket.socket:
    """Return the socket of a slot's resolver. Call this in a new thread (`namespaces.run_in_thread`)."""
    with in_namespace(slot.path):
        endpoint = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        endpoint.setblocking(False)
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        endpoint.bind((GATEWAY_ADDRESS, 53))
    except BaseException:
        endpoint.close()
        raise
    return endpoint


class Resolver:
    """The resolver of one slot. ``open_addresses`` opens each address in the slot's rules for a given time."""

    def __init__(
        self,
        endpoint: socket.socket,
        policy: NamePolicy,
        upstream: Upstream,
        open_addresses: Callable[[Mapping[str, int]], Awaitable[None]],
    ) -> None:
        self._socket = endpoint
        self._policy = policy
        self._upstream = upstream
        self._open_addresses = open_addresses
        self._expiry_times: dict[ipaddress.IPv4Address, float] = {}
        self._has_failed = False
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(endpoint, self._receive)

    def close(self) -> None:
        """Stop answering, and close the socket."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        for task in self._tasks:
            task.cancel()

    @contextlib.asynccontextmanager
    async def replacing_policy(self, policy: NamePolicy) -> AsyncIterator[None]:
        """Replace the policy, unless the body raises an error. The body applies the new rules, which open no address.

        Meanwhile, the resolver opens no address. Later, it opens none for queries that began under the earlier policy.
        """
        async with self._lock:
            yield
            self._policy = policy
            self._expiry_times.clear()

    # -- queries ------------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Receive one datagram. The kernel limits the rate of datagrams (`rules`)."""
        try:
            data, sender = self._socket.recvfrom(MAX_MESSAGE_BYTES + 1)
        except OSError:
            return
        if (query := parse_query(data)) is None:
            return
        question = query.question[0]
        if not self._policy.allows_name(question.name):
            self._send(encode_reply(query, dns.rcode.REFUSED), sender)
        elif question.rdtype != dns.rdatatype.A:
            self._send(encode_reply(query, dns.rcode.NOERROR), sender)
        elif len(self._tasks) < _MAX_OUTSTANDING_QUERIES:
            task = asyncio.create_task(self._answer(query, sender))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, query: dns.message.Message, sender: Any) -> None:
        policy = self._policy
        answer = await self._upstream.look_up(query.question[0].name)
        addresses = [each for each in answer.addresses if policy.is_open(each) or policy.may_open(each)][:MAX_ADDRESSES]
        async with self._lock:
            if policy is not self._policy:
                return  # The guest repeats its query.
            ttl = await self._open([each for each in addresses if not policy.is_open(each)], answer.ttl)
        if ttl is None:
            self._send(encode_reply(query, dns.rcode.SERVFAIL), sender)
        else:
            self._send(encode_reply(query, answer.rcode, addresses, ttl), sender)

    async def _open(self, addresses: list[ipaddress.IPv4Address], ttl: int) -> int | None:
        """Open addresses of a record with this TTL. Returns the TTL for the reply, or None if they cannot be opened."""
        now = time.monotonic()
        ttl = min(ttl, MAX_OPEN_SECONDS)
        open_seconds = max(ttl, MIN_OPEN_SECONDS) + 2 * _GRACE_SECONDS
        self._expiry_times = {address: end for address, end in self._expiry_times.items() if end > now}
        # Shorten the TTL of addresses that are open, so that most queries do not change the rules.
        new_addresses = [each for each in addresses if self._expiry_times.get(each, now) < now + 2 * _GRACE_SECONDS]
        if len(self._expiry_times.keys() | set(new_addresses)) > MAX_NAME_ADDRESSES:
            return None
        if new_addresses:
            try:
                await self._open_addresses({str(address): open_seconds for address in new_addresses})
            except BackendFailed as error:
                if not self._has_failed:  # A guest could make this happen often.
                    log.warning("the addresses of a domain name could not be opened", reason=error.message)
                    self._has_failed = True
                return None
            self._expiry_times.update(dict.fromkeys(new_addresses, now + open_seconds))
        return min([ttl, *(int(self._expiry_times[each] - now) - _GRACE_SECONDS for each in addresses)])

    def _send(self, data: bytes, receiver: Any) -> None:
        # Drop the reply if the guest does not read, instead of storing it.
        with contextlib.suppress(OSError):
            self._socket.sendto(data, receiver)
