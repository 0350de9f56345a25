"""Allocate ports to volumes."""

from __future__ import annotations

import secrets
from collections.abc import Collection

from sandbox_gateway.errors import Busy
from sandbox_gateway.hosts.kvm_xfs.network.addresses import VOLUME_PORTS


class Ports:
    """A pool of unused ports for volumes. A returned port is the last to be reused."""

    def __init__(self, taken: Collection[int]) -> None:
        self._taken = set(taken)
        # The memory of guests contains ports: a random start after each restart delays their reuse.
        self._next = secrets.randbelow(len(VOLUME_PORTS))

    def take(self) -> int:
        """Return an unused port. Raises Busy if there is none."""
        for step in range(len(VOLUME_PORTS)):
            place = (self._next + step) % len(VOLUME_PORTS)
            if VOLUME_PORTS[place] not in self._taken:
                self._next = place + 1
                self._taken.add(VOLUME_PORTS[place])
                return VOLUME_PORTS[place]
        raise Busy(f"the limit of {len(VOLUME_PORTS)} volumes on this host is reached: remove some first")

    def release(self, port: int) -> None:
        self._taken.discard(port)
