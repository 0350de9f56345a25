"""A bridge on this machine, and a network namespace for each gateway, so that connections between them can be cut."""

from __future__ import annotations

import contextlib
import ipaddress
import subprocess
from collections.abc import Iterator, Sequence
from typing import Literal

from tests.support import session

Direction = Literal["in", "out"]

_RULES = """
table inet faults {
    set in { type ipv4_addr; }
    set out { type ipv4_addr; }
    chain input { type filter hook input priority 0; ip saddr @in drop; }
    chain output { type filter hook output priority 0; ip daddr @out drop; }
}
"""


class Network:
    """The addresses of all others are those of the bridge. Requires root."""

    def __init__(self) -> None:
        settings = session.allocate_network()
        self._prefix = settings["prefix"]
        self._bridge = f"{self._prefix}b"
        self._subnet = ipaddress.ip_network(settings["subnet"])
        self._namespaces: dict[str, str] = {}
        """By the name of a gateway."""
        self._addresses: dict[str, str] = {}

    def create(self, bridge_addresses: int) -> list[str]:
        """Create the bridge, and return its addresses."""
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        addresses = [str(self._subnet[number]) for number in range(1, bridge_addresses + 1)]
        for address in addresses:
            _run("ip", "address", "add", f"{address}/{self._subnet.prefixlen}", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        return addresses

    def add(self, name: str) -> str:
        """Create the namespace of a gateway, and return its address."""
        number = len(self._namespaces)
        namespace = f"{self._prefix}n{number}"
        _run("ip", "netns", "add", namespace)
        self._namespaces[name] = namespace
        outer_link, address = f"{self._prefix}v{number}", str(self._subnet[11 + number])
        _run("ip", "link", "add", outer_link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _run("ip", "link", "set", outer_link, "master", self._bridge, "up")
        _run("ip", "-n", namespace, "address", "add", f"{address}/{self._subnet.prefixlen}", "dev", "eth0")
        for link in ("lo", "eth0"):
            _run("ip", "-n", namespace, "link", "set", link, "up")
        _run("ip", "netns", "exec", namespace, "nft", "-f", "-", text=_RULES)
        self._addresses[name] = address
        return address

    def get_address(self, name: str) -> str:
        return self._addresses[name]

    def get_prefix_command(self, name: str) -> list[str]:
        """Return the words before a command that let it run in the namespace of a gateway, in the same process."""
        return ["ip", "netns", "exec", self._namespaces[name]]

    def cut(self, name: str, addresses: Sequence[str], directions: Sequence[Direction]) -> None:
        """Drop all packets between a gateway and ``addresses``, in the directions as seen from the gateway."""
        self._change(name, "add", addresses, directions)

    def join(self, name: str, addresses: Sequence[str], directions: Sequence[Direction]) -> None:
        """End what ``cut`` did."""
        self._change(name, "delete", addresses, directions)

    def _change(self, name: str, verb: str, addresses: Sequence[str], directions: Sequence[Direction]) -> None:
        elements = ", ".join(addresses)
        commands = "\n".join(f"{verb} element inet faults {each} {{ {elements} }}" for each in directions)
        _run("ip", "netns", "exec", self._namespaces[name], "nft", "-f", "-", text=commands)

    def remove(self) -> None:
        """Remove everything. Links in a namespace, and its tables, end with it."""
        for number, namespace in enumerate(self._namespaces.values()):
            _run("ip", "link", "delete", f"{self._prefix}v{number}", check=False)
            _run("ip", "netns", "delete", namespace, check=False)
        _run("ip", "link", "delete", self._bridge, check=False)


@contextlib.contextmanager
def created_network() -> Iterator[Network]:
    network = Network()
    try:
        yield network
    finally:
        network.remove()


def _run(*argv: str, text: str = "", check: bool = True) -> None:
    result = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert not check or result.returncode == 0, f"{' '.join(argv)}: {result.stderr}"
