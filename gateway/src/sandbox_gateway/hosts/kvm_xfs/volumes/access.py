"""Control access to volume servers with elements of the host's nftables set, and aliases of sandboxes' addresses."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from sandbox_gateway.config import Network
from sandbox_gateway.hosts.kvm_xfs.network.addresses import ALIASES, host_table
from sandbox_gateway.hosts.kvm_xfs.network.rules import VOLUME_ACCESS, VOLUME_ALIASES, apply_on_host


class VolumeAccess:
    """The pairs (address . port) that the host allows to connect to servers, by volume."""

    def __init__(self, network: Network) -> None:
        self._table = host_table(network)
        self._allowed: dict[str, set[str]] = {}
        self.aliases = Aliases(network)

    def clear(self) -> None:
        """Forget all pairs, because the host's rules were recreated."""
        self._allowed.clear()

    async def allow(self, volume: str, access: set[str]) -> None:
        """Allow additional pairs to connect to a volume."""
        allowed = self._allowed.setdefault(volume, set())
        if new := sorted(access - allowed):
            aliases = [f"{pair} : {self.aliases.of(pair.partition(' ')[0])}" for pair in new]
            # The alias stays when the pair is revoked: an address never gets a different one.
            await apply_on_host(
                f"add element inet {self._table} {VOLUME_ALIASES} {{ {', '.join(aliases)} }}\n"
                f"add element inet {self._table} {VOLUME_ACCESS} {{ {', '.join(new)} }}\n"
            )
            allowed.update(new)

    async def revoke(self, volume: str, keep: set[str]) -> None:
        """Revoke every pair of a volume that is not in ``keep``."""
        allowed = self._allowed.get(volume, set())
        if old := allowed - keep:
            await apply_on_host(f"delete element inet {self._table} {VOLUME_ACCESS} {{ {', '.join(sorted(old))} }}\n")
            allowed -= old
        if not allowed:
            self._allowed.pop(volume, None)


class Aliases:
    """Addresses of sandboxes as servers see them: one alias per address, the same in every gateway of a host.

    A guest cannot compute an address from its alias, because it does not know the host's machine id.
    """

    def __init__(self, network: Network) -> None:
        machine = Path("/etc/machine-id")
        known = machine.read_bytes() if machine.exists() else b""
        digest = hashlib.sha256(known + host_table(network).encode()).digest()
        self._factor = int.from_bytes(digest[:8], "big") | 1  # Odd: no two addresses have the same alias.
        self._offset = int.from_bytes(digest[8:16], "big")

    def of(self, address: str) -> str:
        place = int(ipaddress.IPv4Address(address)) * self._factor + self._offset
        return str(ALIASES[place % ALIASES.num_addresses])

    def of_all(self, clients: Mapping[str, bool]) -> dict[str, bool]:
        return {self.of(address): read_only for address, read_only in clients.items()}
