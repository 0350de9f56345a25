"""The knowledge of the clients: which objects exist, under which names, and with which data.

A request whose outcome is unknown leaves several possibilities. They are reduced to one when the fleet is quiet.
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field


class Presence(enum.Enum):
    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(eq=False)
class SandboxFact:
    """A sandbox. Only the client that has created it renames and deletes it, and writes to it."""

    owner: str
    names: set[str]
    """Its name; several if it is unknown whether it was renamed."""
    values: set[str]
    """The possible contents of its disk."""
    presence: Presence = Presence.UNKNOWN
    id: str = ""
    """Empty while it is unknown whether it was created."""
    request: int = 0
    """The number of the request that has created it: either all sandboxes of a request exist, or none."""
    host: str = ""
    """The host on which it was to be created."""
    is_settled: bool = True
    """False after a move or a write whose outcome is unknown, and which may not have ended yet."""
    data_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by writes and moves. A write between the capture of a move and the end of the old machine would be lost."""

    @property
    def ref(self) -> str:
        return self.id or min(self.names)


@dataclass(eq=False)
class SnapshotFact:
    """A snapshot, of which several hosts can have a copy with the same name."""

    owner: str
    name: str
    values: set[str]
    copies: dict[str, Presence]
    """By host. A host that is missing has no copy."""

    @property
    def is_usable(self) -> bool:
        return Presence.PRESENT in self.copies.values()


class History:
    """The requests of clients, and the faults, in order."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        self._lines.append(f"{time.monotonic() - self._start:8.3f} s  {line}")

    def format(self, count: int) -> str:
        """Return the last lines."""
        return "\n".join(self._lines[-count:])


class Model:
    def __init__(self, hosts: Iterable[str]) -> None:
        self.hosts = [*hosts]
        self.sandboxes: list[SandboxFact] = []
        self.snapshots: list[SnapshotFact] = []
        self.violations: list[str] = []
        """Problems that were found before the fleet was quiet."""
        self.killed_hosts: set[str] = set()
        """The hosts whose gateways were killed in this batch."""
        self.lost_shares: list[str] = []
        """Shares of forks on several hosts that do not exist, because their hosts were killed after the decision."""
        self.history = History()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def make_number(self) -> int:
        with self._lock:
            return next(self._numbers)

    def add(self, fact: SandboxFact | SnapshotFact) -> None:
        with self._lock:
            if isinstance(fact, SandboxFact):
                self.sandboxes.append(fact)
            else:
                self.snapshots.append(fact)

    def list_sandboxes(self, owner: str = "") -> list[SandboxFact]:
        """Return the sandboxes that certainly exist, of one client or of all."""
        with self._lock:
            facts = [*self.sandboxes]
        return [
            each
            for each in facts
            if each.presence is Presence.PRESENT and each.id and owner in ("", each.owner) and each.is_settled
        ]

    def list_snapshots(self, owner: str = "") -> list[SnapshotFact]:
        """Return the snapshots that certainly exist, of one client or of all."""
        with self._lock:
            facts = [*self.snapshots]
        return [each for each in facts if each.is_usable and owner in ("", each.owner)]

    def report(self, violation: str) -> None:
        self.history.add(f"VIOLATION {violation}")
        self.violations.append(violation)
