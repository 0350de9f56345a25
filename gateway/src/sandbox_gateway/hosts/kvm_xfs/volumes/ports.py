"""Allocate ports to volumes."""

from __future__ import annotations

import secrets
from collections.abc import Collection

from sandbox_gateway.errors import Busy
from sandbox_gateway.hosts.kvm_xfs.network.addresses import VOLUME_PORTS


class Ports:
    """A pool of ports for volumes. A released port is reused only after all other free ports."""

    def __init__(self, taken: Collection[int]) -> None:
        self._taken = set(taken)
        # Guests may still have old ports in memory. A random start makes their early reuse unlikely after a restart.
        self._next = secrets.randbelow(len(VOLUME_PORTS))

    def take(self) -> int:
        """Return an unused port. Raises Busy if all ports are in use."""
        for step in range(len(VOLUME_PORTS)):
            index = (self._next + step) % len(VOLUME_PORTS)
            if VOLUME_PORTS[index] not in self._taken:
                self._next = index + 1
                self._taken.add(VOLUME_PORTS[index])
                return VOLUME_PORTS[index]
        raise Busy(f"the limit of {len(VOLUME_PORTS)} volumes on this host has been reached: remove some volumes first")

    def release(self, port: int) -> None:
        self._taken.discard(port)
