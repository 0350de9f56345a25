"""The keys in etcd.

Each key below `hosts`, `members`, `objects` and `reservations` belongs to one host, and only this host writes it, with
two exceptions: any gateway can cordon a host, and remove what a host that has gone has left.
"""

from __future__ import annotations


class Keys:
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.fleet = f"{prefix}fleet"
        """The settings that all members must agree on."""
        self.hosts = f"{prefix}hosts/"
        """The hosts that have ever joined."""
        self.members = f"{prefix}members/"
        """The gateways that are running, each under its lease."""
        self.objects = f"{prefix}objects/"
        """The hosts of each name and id."""
        self.reservations = f"{prefix}reservations/"
        """The memory that the starting machines of each host will need."""
        self.decisions = f"{prefix}decisions/"
        """Whether a fork on several hosts is committed."""
        self.moves = f"{prefix}moves/"
        """The moves of sandboxes that are not complete, by the id of the sandbox."""
        self.runs = f"{prefix}runs"
        """The host whose gateway has opened a plan session, or a run that applies a plan, by its path in the API."""

    def host(self, name: str) -> str:
        return f"{self.hosts}{name}"

    def member(self, name: str) -> str:
        return f"{self.members}{name}"

    def holders(self, ref: str) -> str:
        """Return the prefix of the keys of all hosts with an object that has this name or id."""
        return f"{self.objects}{ref}/"

    def object(self, ref: str, host: str) -> str:
        return f"{self.holders(ref)}{host}"

    def reservation(self, host: str) -> str:
        return f"{self.reservations}{host}"

    def move(self, sandbox: str) -> str:
        return f"{self.moves}{sandbox}"

    def run(self, path: str) -> str:
        """``path``: the path of the run, such as ``/plans/ID``."""
        return f"{self.runs}{path}"

    def decision(self, id: str) -> str:
        return f"{self.decisions}{id}"
