"""The network of jails: a bridge with an address, and a cable (an epair) from it to each jail.

::

    jail: <prefix>-<n>b ══ <prefix>-<n>a ─ bridge, first address of the subnet ─ host
          n-th address

The bridge's members are private: they reach the host, never each other. What they may reach there, and beyond, is for
pf to say. Every cable is in the interface group ``<prefix>-epair`` from the moment it exists.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass

from sandbox_gateway.errors import BackendFailed
from sandbox_gateway.hosts.jail_zfs.commands import Commands, together

_ABSENT = ("does not exist",)


@dataclass(frozen=True)
class Cable:
    """The names of its ends, the address and the MAC address of the jail's."""

    number: int
    outer: str
    inner: str
    address: str
    mac: str


def parse_inet(text: str) -> list[str]:
    """IPv4 addresses in what ``ifconfig NAME`` prints, as ``address/prefix length``."""
    found = re.findall(r"^\s+inet (\d{1,3}(?:\.\d{1,3}){3}) netmask 0x([0-9a-f]{8})\b", text, re.MULTILINE)
    return [f"{address}/{int(mask, 16).bit_count()}" for address, mask in found]


class Bridge:
    """``name`` connects the addresses of ``subnet``; names of cables begin with ``prefix``."""

    def __init__(self, run: Commands, *, name: str, prefix: str, subnet: str) -> None:
        self._run = run
        self.name = name
        self._prefix = prefix
        self._group = f"{prefix}-epair"
        self.subnet = ipaddress.IPv4Network(subnet)
        self.gateway = str(self.subnet.network_address + 1)
        self.capacity = min(self.subnet.num_addresses - 3, 999_999)
        """Cables are numbered 2 to ``capacity`` + 1."""

    def cable(self, number: int) -> Cable:
        address = self.subnet.network_address + number
        tail = ":".join(f"{byte:02x}" for byte in address.packed)
        name = f"{self._prefix}-{number}"
        return Cable(number, f"{name}a", f"{name}b", str(address), f"02:5b:{tail}")

    async def open(self) -> None:
        """Make the bridge if it is missing. Raises BackendFailed if there is another one of its name."""
        wanted = f"{self.gateway}/{self.subnet.prefixlen}"
        if self.name not in (await self._run("ifconfig", "-l")).split():
            await self._run("ifconfig", "bridge", "create", "name", self.name)
            tail = hashlib.sha256(self.name.encode()).hexdigest()
            await self._run("ifconfig", self.name, "ether", f"58:9c:fc:{tail[:2]}:{tail[2:4]}:{tail[4:6]}")
        having = parse_inet(await self._run("ifconfig", self.name))
        if having and wanted not in having:
            raise BackendFailed(
                f"the bridge {self.name} has the address {having[0]}, not {wanted}: name another in [jail_zfs] bridge, "
                "or set [network] subnet to fit it"
            )
        await self._run("ifconfig", self.name, *([] if having else ["inet", wanted]), "up")

    async def close(self) -> None:
        """Remove the bridge; nothing may be connected to it any more."""
        await self._run.unless("ifconfig", self.name, "destroy", absent=_ABSENT)

    async def plug(self, cable: Cable) -> None:
        """Make a cable, its outer end in the bridge. There is nothing of it on failure."""
        made = (await self._run("ifconfig", "epair", "create", "group", self._group)).strip()
        if not re.fullmatch(r"epair\d+a", made):
            raise BackendFailed(f"`ifconfig epair create` answered {made[:80]!r}, which is no epair")
        try:
            await together(
                self._run("ifconfig", made, "name", cable.outer, "up"),
                self._run("ifconfig", f"{made[:-1]}b", "ether", cable.mac, "name", cable.inner),
            )
            await self._run("ifconfig", self.name, "addm", cable.outer, "private", cable.outer)
        except BaseException:
            await together(self._destroy(made), self._destroy(cable.outer))
            raise

    async def unplug(self, cable: Cable) -> None:
        """Both ends go, wherever they are."""
        await self._destroy(cable.outer)

    async def _destroy(self, interface: str) -> None:
        await self._run.unless("ifconfig", interface, "destroy", absent=_ABSENT)

    async def sweep(self, kept: set[int]) -> list[str]:
        """Remove the cables that are not numbered in ``kept``; returns their names."""
        known = {self.cable(number).outer for number in kept}
        strays = [name for name in (await self._members()) if name not in known]
        for name in strays:
            await self._destroy(name)
        return strays

    async def _members(self) -> list[str]:
        """The outer ends of our cables; `ifconfig -g` fails without a word where the group is empty."""
        return (await self._run("ifconfig", "-g", self._group, silent=True)).split()
