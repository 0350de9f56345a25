"""Allocate ports to volumes."""

from __future__ import annotations

import secrets
from collections.abc import Collection

from sandbox_gateway.errors import Busy
from sandbox_gateway.hosts.kvm_xfs.network.addresses import VOLUME_PORTS


class Ports:
    """A pool of ports for volumes. A released port is reused only after all other free ports."""

    def __init__(self, used_ports: Collection[int]) -> None:
        self._used_ports = set(used_ports)
        # Guests may still have old ports in memory. A random start makes their early reuse unlikely after a restart.
        self._next_index = secrets.randbelow(len(VOLUME_PORTS))

    def take(self) -> int:
        """Return an unused port. Raises Busy if all ports are in use."""
        for step in range(len(VOLUME_PORTS)):
            index = (self._next_index + step) % len(VOLUME_PORTS)
            if VOLUME_PORTS[index] not in self._used_ports:
                self._next_index = index + 1
                self._used_ports.add(VOLUME_PORTS[index])
                return VOLUME_PORTS[index]
        raise Busy(f"the limit of {len(VOLUME_PORTS)} volumes on this host has been reached: remove some volumes first")

    def release(self, port: int) -> None:
        self._used_ports.discard(port)
