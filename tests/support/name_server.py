"""A DNS server in a network namespace, for tests of policies that allow domain names."""

from __future__ import annotations

import socket
import threading

import dns.message
import dns.rrset


class NameServer:
    """Answers the queries that arrive at a UDP socket.

    ``records`` contains the records of each name, "TTL TYPE DATA". ``names`` lists the names in the received queries.
    """

    def __init__(self, endpoint: socket.socket) -> None:
        self.records: dict[str, list[str]] = {}
        self.names: list[str] = []
        self._socket = endpoint
        self._socket.settimeout(0.1)
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closing:
            try:
                data, sender = self._socket.recvfrom(4096)
            except TimeoutError:
                continue
            query = dns.message.from_wire(data)
            name = query.question[0].name.to_text(omit_final_dot=True)
            self.names.append(name)
            reply = dns.message.make_response(query)
            owner = f"{name}."
            for record in self.records.get(name.lower(), []):
                ttl, kind, content = record.split()
                reply.answer.append(dns.rrset.from_text(owner, int(ttl), "IN", kind, content))
                owner = content if kind == "CNAME" else owner
            self._socket.sendto(reply.to_wire(), sender)

    def close(self) -> None:
        self._is_closing = True
        self._thread.join()
        self._socket.close()
