"""Manage a bridge with an address, and an epair from it to each jail.

::

    jail: <prefix>-<n>b ══ <prefix>-<n>a ─ bridge, first address of the subnet ─ host
          n-th address

The members of the bridge are private: they can reach the host, but not each other. pf controls access to the host and
to other networks. Every epair is created in the interface group ``<prefix>-epair``.

Root in a jail may send frames with any MAC address and forge ARP. Therefore, neither the bridge nor the host learns
addresses: the gateway binds the MAC address of each jail to its bridge member, and its IP address to its MAC address.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs.commands import CommandRunner
from sandbox_gateway.tasks import finish_despite_cancellation, wait_for_all

_ABSENT_MESSAGES = ("does not exist",)
_NO_ARP_ENTRY_MESSAGES = ("No such file or directory", "cannot locate")


@dataclass(frozen=True)
class Epair:
    """A pair of connected network interfaces. ``address`` and ``mac`` belong to ``inner_end``, the end in the jail."""

    number: int
    outer_end: str
    inner_end: str
    address: str
    mac: str


def parse_inet(text: str) -> list[str]:
    """Return the IPv4 addresses in the output of ``ifconfig NAME``, in the form ``ADDRESS/PREFIX_LENGTH``."""
    matches = re.findall(r"^\s+inet (\d{1,3}(?:\.\d{1,3}){3}) netmask 0x([0-9a-f]{8})\b", text, re.MULTILINE)
    return [f"{address}/{int(mask, 16).bit_count()}" for address, mask in matches]


def _derive_mac(address: ipaddress.IPv4Address) -> str:
    return ":".join(["02:5b", *(f"{byte:02x}" for byte in address.packed)])


def parse_arp(text: str) -> dict[str, str]:
    """Return the MAC addresses in the output of ``arp -n -a``, by IPv4 address."""
    return dict(re.findall(r"^\S+ \((\d{1,3}(?:\.\d{1,3}){3})\) at ([0-9a-f:]{17}) ", text, re.MULTILINE))


class Bridge:
    """Manages the bridge ``name`` of the network ``subnet``, and its epairs, whose names begin with ``prefix``."""

    def __init__(self, run: CommandRunner, *, name: str, prefix: str, subnet: str) -> None:
        self._run = run
        self.name = name
        self._prefix = prefix
        self._group = f"{prefix}-epair"
        self.subnet = ipaddress.IPv4Network(subnet)
        self.gateway = str(self.subnet.network_address + 1)
        self.capacity = min(self.subnet.num_addresses - 3, 999_999)
        """Epairs have the numbers 2 to ``capacity`` + 1."""

    def epair(self, number: int) -> Epair:
        address = self.subnet.network_address + number
        name = f"{self._prefix}-{number}"
        return Epair(number, f"{name}a", f"{name}b", str(address), _derive_mac(address))

    async def open(self) -> None:
        """Create the bridge if it is missing, and bring it up. Raises BackendFailed if it has a different address."""
        expected_address = f"{self.gateway}/{self.subnet.prefixlen}"
        if self.name not in (await self._run("ifconfig", "-l")).split():
            await self._run("ifconfig", "bridge", "create", "name", self.name)
            digest = hashlib.sha256(self.name.encode()).hexdigest()
            await self._run("ifconfig", self.name, "ether", f"58:9c:fc:{digest[:2]}:{digest[2:4]}:{digest[4:6]}")
        addresses = parse_inet(await self._run("ifconfig", self.name))
        if addresses and expected_address not in addresses:
            raise BackendFailed(
                f"the bridge {self.name} has the address {addresses[0]}, not {expected_address}: "
                "set [jail_zfs] bridge to a different bridge, or change [network] subnet to match"
            )
        # staticarp: the host answers ARP requests, but packets never make it add or change an entry.
        await self._run("ifconfig", self.name, *([] if addresses else ["inet", expected_address]), "staticarp", "up")

    async def close(self) -> None:
        """Remove the bridge. Call this only when the bridge has no members."""
        await self._run.run_removal("ifconfig", self.name, "destroy", absent_messages=_ABSENT_MESSAGES)

    async def create(self, epair: Epair) -> None:
        """Create an epair and add its outer end to the bridge. A failed call leaves nothing behind."""
        name = (await self._run("ifconfig", "epair", "create", "group", self._group)).strip()
        if not re.fullmatch(r"epair\d+a", name):
            raise BackendFailed(f"`ifconfig epair create` printed {name[:80]!r}, not the name of an epair")
        try:
            await finish_despite_cancellation(
                wait_for_all(
                    self._run("ifconfig", name, "name", epair.outer_end, "up"),
                    self._run("ifconfig", f"{name[:-1]}b", "ether", epair.mac, "name", epair.inner_end),
                )
            )
            await self._connect(epair, is_member=False)
        except BaseException:
            await finish_despite_cancellation(wait_for_all(self._destroy(name), self.destroy(epair)))
            raise

    async def restore(self, epair: Epair) -> bool:
        """Connect the epair of a jail that an earlier gateway process started. Returns False if it does not exist."""
        if epair.outer_end not in await self._list_outer_ends():
            return False
        await self._connect(epair, is_member=f"\tmember: {epair.outer_end} " in await self._run("ifconfig", self.name))
        return True

    async def _connect(self, epair: Epair, *, is_member: bool) -> None:
        outer_end = epair.outer_end
        # -learn, -discover and static: the member gets exactly the frames for the jail's MAC address.
        flags = ("private", outer_end, "-learn", outer_end, "-discover", outer_end, "static", outer_end, epair.mac)
        await self._run("ifconfig", self.name, *(() if is_member else ("addm", outer_end)), *flags)
        await self._run("arp", "-S", epair.address, epair.mac)

    async def destroy(self, epair: Epair) -> None:
        """Destroy both ends of an epair, even if the inner end is in a jail, and the ARP entry of the jail."""
        await self._destroy(epair.outer_end)  # Its static address in the bridge is removed with it.
        await self._delete_arp_entry(epair.address)

    async def _delete_arp_entry(self, address: str) -> None:
        await self._run.run_removal("arp", "-d", address, absent_messages=_NO_ARP_ENTRY_MESSAGES)

    async def _destroy(self, interface: str) -> None:
        await self._run.run_removal("ifconfig", interface, "destroy", absent_messages=_ABSENT_MESSAGES)

    async def sweep(self, in_use: set[int]) -> list[str]:
        """Remove the epairs and ARP entries whose numbers are not in ``in_use``. Returns a description of each."""
        known_names = {self.epair(number).outer_end for number in in_use}
        stray_names = [name for name in (await self._list_outer_ends()) if name not in known_names]
        for name in stray_names:
            await self._destroy(name)
        arp_entries = parse_arp(await self._run("arp", "-n", "-i", self.name, "-a"))
        known_addresses = {self.epair(number).address for number in in_use}
        # Only the gateway's entries have the MAC address that the gateway derives from the IP address.
        stray_addresses = [
            address
            for address, mac in arp_entries.items()
            if mac == _derive_mac(ipaddress.IPv4Address(address)) and address not in known_addresses
        ]
        for address in stray_addresses:
            await self._delete_arp_entry(address)
        return [
            *(f"the epair {name}" for name in stray_names),
            *(f"the ARP entry of {address}" for address in stray_addresses),
        ]

    async def _list_outer_ends(self) -> list[str]:
        """Return the outer ends of this gateway's epairs. `ifconfig -g` fails without a message if there are none."""
        return (await self._run("ifconfig", "-g", self._group, silent=True)).split()
