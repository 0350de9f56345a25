"""What the engine needs of a host.

Two primitives, ``capture`` and ``fork``; what is around them records, finds again and removes. A host knows
machines (by ``Sandbox.instance``) and snapshots (by id); names, order, locks, undo and policy are the engine's.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Mount, NetworkPolicy, Sandbox, Snapshot, Volume, VolumeSnapshot

Log = Callable[[str], None]
"""Takes one line of progress for a person to read."""


@dataclass(frozen=True)
class Abilities:
    """What this kind of host can do; suites and verbs ask here, never for the kind's name."""

    memory: bool
    """Snapshots hold live memory; without it, ``memory: auto`` means none."""
    resize_on_fork: bool
    """A fork may have other cpus, memory and disk than its snapshot without being started afresh."""
    independent_snapshots: bool
    """A snapshot can be removed while sandboxes stand on it; without it, a rolled-back sandbox holds its snapshot."""
    atomic_capture: bool = False
    """A disk captured without memory is of one instant while its machine runs on: nothing has to be frozen for it."""
    atomic_append: bool = False
    """Sandboxes that append to one file of a volume at once lose nothing, and locks hold between them."""


@dataclass(frozen=True)
class Endpoint:
    """Where a machine's ports are reached from the host: ``address`` forwards every port to the machine."""

    address: str
    line: socket.socket | None = None
    """To the machine's agent alone, without a network, where the agent is known to listen; closed by the host."""
    key: str = ""
    """By which the agent knows the gateway, where the host's address does not tell."""


@dataclass(frozen=True)
class Usage:
    """What an instance costs the host, in bytes: blocks no one else shares, memory with shared pages in proportion."""

    disk_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class GuestMount:
    """What a machine's agent must mount itself, because the host cannot do it from outside."""

    path: str
    source: str
    type: str
    options: str
    """As mount(2) takes them, with commas; without the flags."""
    read_only: bool


@dataclass(frozen=True)
class VolumeState:
    """How a volume fares on the host."""

    used_bytes: int
    stuck: list[str] = field(default_factory=list)
    """A sentence for each unmount that does not succeed and is tried again in the background."""


@dataclass
class Scan:
    """What was found at start-up."""

    snapshots: list[Snapshot] = field(default_factory=list)
    sandboxes: list[Sandbox] = field(default_factory=list)
    volumes: list[Volume] = field(default_factory=list)
    volume_snapshots: list[VolumeSnapshot] = field(default_factory=list)
    unreadable_sandboxes: list[str] = field(default_factory=list)
    """Where the sandboxes are whose records cannot be read."""
    alive: set[str] = field(default_factory=set)
    """Instances whose machine still runs; adopted."""
    repaired: list[str] = field(default_factory=list)
    """A sentence for each thing that was swept, quarantined or mended."""


class Host(Protocol):
    kind: str
    abilities: Abilities
    boot_seconds: float
    """How long a machine that boots may take to answer."""
    resume_seconds: float
    """How long a machine that goes on from its memory may take to answer."""

    async def open(self) -> None:
        """Check the host, take it for this gateway alone. Raises GatewayError with how to mend what is missing."""

    async def close(self) -> None:
        """Let go of the host; machines go on."""

    async def scan(self) -> Scan:
        """Sweep what was never committed, then say what there is and what still runs."""

    async def build_base(self, base: Snapshot, recipe: Recipe, log: Log) -> Snapshot:
        """Make a file system from ``recipe`` and commit it as the (memoryless) snapshot ``base``."""

    async def fork(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool) -> None:
        """Start ``sandbox.instance`` from ``snapshot``; fills ``sandbox.host``. Not committed until ``save``.

        With memory it goes on mid-instruction; without, it boots from the disk. Undoes itself on failure.
        """

    async def start(self, sandbox: Sandbox) -> None:
        """Boot the stopped instance from its own disk."""

    async def capture(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Sequence[VolumeSnapshot] = ()
    ) -> Snapshot:
        """Record the running instance as ``snapshot`` and commit it; returns it with what was measured.

        The machine goes on in every case; on failure nothing of the snapshot remains. With memory, disk and memory
        are of one instant; so are ``volumes``, which are captured in the same pause and committed before the
        snapshot, whose record names them: those of a snapshot that was never committed are swept by the next scan.
        """

    async def save(self, sandbox: Sandbox) -> None:
        """Commit the sandbox's record: from here on it exists, with the instance it names."""

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        """Write a committed snapshot's record anew (a name, ``doomed``, …)."""

    async def stop(self, sandbox: Sandbox) -> None:
        """End the instance's machine and give back its network; its disk stays."""

    async def discard(self, instance: Sandbox) -> None:
        """End the machine of ``sandbox.instance`` and remove all it had; the sandbox's record stays."""

    async def remove(self, sandbox: Sandbox) -> None:
        """The sandbox's record goes first, then its machine and disk."""

    def places(self, snapshot: Snapshot) -> dict[str, str]:
        """Where it is kept, for people: ``dir``, and ``memory`` and ``vmstate`` where it has such files."""

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Remove a snapshot; at once, or not at all."""

    # -- volumes: `Sandbox.mounts` says what a sandbox mounts; `fork` and `start` mount it, `discard` and `stop` undo it

    async def create_volume(self, volume: Volume, source: VolumeSnapshot | None = None) -> None:
        """Make a volume, empty or as ``source`` (which may be smaller), and commit it; fills ``volume.host``."""

    async def grow_volume(self, volume: Volume, size_mb: int) -> None:
        """Let it hold ``size_mb`` while it is mounted, and commit that; fills ``volume.size_mb``."""

    async def remove_volume(self, volume: Volume) -> None:
        """Remove it and the snapshots of it; nobody mounts it. At once, or not at all."""

    async def volume_state(self, volume: Volume) -> VolumeState:
        """What is in it, and what does not let go of it."""

    async def capture_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        """Record the volume as it is at one instant, and commit that. Who mounts it goes on."""

    async def remove_volume_snapshot(self, snapshot: VolumeSnapshot) -> None:
        """Remove a snapshot of a volume; raises InUse where snapshots are not
        independent and something was made from it."""

    async def rollback_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        """Let the volume be what the snapshot holds: whole, or not at all. Who mounts it sees the old files anew.

        It stays as large as it has become since.
        """

    async def attach(self, sandbox: Sandbox, mount: Mount) -> None:
        """Let the running instance have a volume. On a path that cannot be mounted on: Invalid, nothing is changed.

        What it must then mount itself is in ``guest_mounts``.
        """

    async def detach(self, sandbox: Sandbox, mount: Mount) -> None:
        """Take it away again, whatever the instance does with it; ``sandbox.mounts`` lacks it already."""

    def guest_mounts(self, sandbox: Sandbox) -> list[GuestMount]:
        """What the agent of the running instance is to have mounted, in this order, for ``sandbox.mounts``."""

    async def diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        """Has the instance's file system (as written through to its disk) changed since ``head``?

        Raises GatewayError for an instance that is gone.
        """

    async def usage(self, sandbox: Sandbox) -> Usage:
        """What the instance costs. Raises GatewayError for one that is gone."""

    async def console(self, sandbox: Sandbox) -> str:
        """The end of what the running instance wrote to its console."""

    def ended(self, sandbox: Sandbox) -> str:
        """Why the instance's machine does not run, as the middle of a sentence; empty while it runs."""

    async def apply_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        """Make ``policy`` hold for the running instance."""

    def name_servers(self) -> list[str]:
        """Addresses of the name servers that sandboxes here may ask."""

    def endpoint(self, sandbox: Sandbox) -> Endpoint:
        """Where the running instance is reached."""

    def on_exit(self, callback: Callable[[str], None]) -> None:
        """``callback(instance)`` is called when a machine ends that nobody here ended."""
