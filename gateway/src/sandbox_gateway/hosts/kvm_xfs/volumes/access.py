"""Control which sandboxes can connect to volume servers, and which addresses the servers see."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from sandbox_gateway.config import Network
from sandbox_gateway.hosts.kvm_xfs.network.addresses import ALIAS_NETWORK, get_host_table
from sandbox_gateway.hosts.kvm_xfs.network.rules import VOLUME_ACCESS, VOLUME_ALIASES, apply_on_host


class VolumeAccess:
    """Manages, for each volume, the (sandbox address . server port) pairs for which the host accepts connections."""

    def __init__(self, network: Network, aliases: Aliases) -> None:
        self._table = get_host_table(network)
        self._aliases = aliases
        self._allowed: dict[str, set[str]] = {}

    def clear(self) -> None:
        """Forget all pairs. Call this after the host's rules have been recreated."""
        self._allowed.clear()

    async def allow(self, volume: str, pairs: set[str]) -> None:
        """Allow these (address . port) pairs for a volume, in addition to those already allowed."""
        allowed_pairs = self._allowed.setdefault(volume, set())
        if new_pairs := sorted(pairs - allowed_pairs):
            alias_elements = [f"{pair} : {self._aliases.alias(pair.partition(' ')[0])}" for pair in new_pairs]
            # Revoking a pair does not remove its alias, because an address always has the same alias.
            await apply_on_host(
                f"add element inet {self._table} {VOLUME_ALIASES} {{ {', '.join(alias_elements)} }}\n"
                f"add element inet {self._table} {VOLUME_ACCESS} {{ {', '.join(new_pairs)} }}\n"
            )
            allowed_pairs.update(new_pairs)

    async def revoke(self, volume: str, kept_pairs: set[str]) -> None:
        """Revoke all of a volume's pairs that are not in ``kept_pairs``."""
        allowed_pairs = self._allowed.get(volume, set())
        if revoked_pairs := allowed_pairs - kept_pairs:
            await apply_on_host(
                f"delete element inet {self._table} {VOLUME_ACCESS} {{ {', '.join(sorted(revoked_pairs))} }}\n"
            )
            allowed_pairs -= revoked_pairs
        if not allowed_pairs:
            self._allowed.pop(volume, None)


class Aliases:
    """Translates the addresses of sandboxes to the aliases that servers see instead.

    A guest cannot compute an address from its alias, because it does not know the host's machine id.
    """

    def __init__(self, network: Network) -> None:
        machine_id_file = Path("/etc/machine-id")
        machine_id = machine_id_file.read_bytes() if machine_id_file.exists() else b""
        digest = hashlib.sha256(machine_id + get_host_table(network).encode()).digest()
        self._factor = int.from_bytes(digest[:8], "big") | 1  # An odd factor gives each address a different alias.
        self._offset = int.from_bytes(digest[8:16], "big")

    def alias(self, address: str) -> str:
        index = int(ipaddress.IPv4Address(address)) * self._factor + self._offset
        return str(ALIAS_NETWORK[index % ALIAS_NETWORK.num_addresses])

    def alias_clients(self, clients: Mapping[str, bool]) -> dict[str, bool]:
        return {self.alias(address): read_only for address, read_only in clients.items()}
