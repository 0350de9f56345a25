"""The interface between the engine and a host.

There are two primitives, ``capture`` and ``fork``; the other methods save, find and remove objects. A host manages
machines (by ``Sandbox.instance``) and snapshots (by id); the engine manages names, ordering, locks, undo and policy.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Mount, NetworkPolicy, Sandbox, Snapshot, Volume, VolumeSnapshot

Log = Callable[[str], None]
"""A function that receives one human-readable line of progress."""


@dataclass(frozen=True)
class Abilities:
    """The abilities of a kind of host. Tests and operations check these, never the kind's name."""

    memory: bool
    """Snapshots can include memory; otherwise ``memory: auto`` means none."""
    resize_on_fork: bool
    """A fork with memory may have different cpus, memory and disk than its snapshot."""
    independent_snapshots: bool
    """A snapshot can be removed while sandboxes depend on it; otherwise a rolled-back sandbox keeps its snapshot."""
    prewarm: bool = False
    """A fork with memory can be held at the captured instant, and claimed later by another sandbox."""
    atomic_capture: bool = False
    """A disk capture of a running machine is of one instant: the file system need not be frozen for it."""
    atomic_append: bool = False
    """Appends by several sandboxes to a file of a volume are atomic, and file locks work across sandboxes."""


@dataclass(frozen=True)
class Endpoint:
    """The address of a machine on the host: ``address`` forwards every port to the machine."""

    address: str
    line: socket.socket | None = None
    """A connection to the machine's agent without the network, if the agent listens on it; the host closes it."""
    key: str = ""
    """Key by which the agent recognises the gateway, if the host's address is not sufficient."""


@dataclass(frozen=True)
class Usage:
    """The resources that an instance uses, in bytes: unshared blocks, and memory with its share of shared pages."""

    disk_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class GuestMount:
    """A mount that the machine's agent must make, because the host cannot make it from outside."""

    path: str
    source: str
    type: str
    options: str
    """Options for mount(2), separated by commas, without the flags."""
    read_only: bool


@dataclass(frozen=True)
class VolumeState:
    """The state of a volume on the host."""

    used_bytes: int
    stuck: list[str] = field(default_factory=list)
    """A sentence for each failing unmount. Failing unmounts are retried in the background."""


@dataclass
class Scan:
    """The objects found at start-up."""

    snapshots: list[Snapshot] = field(default_factory=list)
    sandboxes: list[Sandbox] = field(default_factory=list)
    volumes: list[Volume] = field(default_factory=list)
    volume_snapshots: list[VolumeSnapshot] = field(default_factory=list)
    unreadable_sandboxes: list[str] = field(default_factory=list)
    """Paths of the sandboxes whose records cannot be read."""
    alive: set[str] = field(default_factory=set)
    """Instances whose machines still run and were adopted."""
    repaired: list[str] = field(default_factory=list)
    """A sentence for each object that was swept, quarantined or repaired."""


class Host(Protocol):
    kind: str
    abilities: Abilities
    boot_seconds: float
    """How long a booting machine may take to answer."""
    resume_seconds: float
    """How long a machine restored from memory may take to answer."""

    async def open(self) -> None:
        """Check the host and lock it for this gateway. Raises GatewayError with a remedy for each missing part."""

    async def close(self) -> None:
        """Release the host; machines keep running."""

    async def scan(self) -> Scan:
        """Remove uncommitted objects, then return all existing objects and running machines."""

    def guest_digest(self) -> str:
        """Return `guest_digest.digest_guest` for templates of this host. It may read files."""

    async def build_base(self, base: Snapshot, recipe: Recipe, log: Log) -> Snapshot:
        """Create a file system from ``recipe`` and commit it as the (memoryless) snapshot ``base``."""

    async def fork(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool, hold: bool = False) -> None:
        """Start ``sandbox.instance`` from ``snapshot``; fills ``sandbox.host``. The sandbox is not committed until
        ``save``.

        With memory it resumes exactly where it was captured; without, it boots from the disk. Cleans up on failure.
        ``hold``: the machine stands still at the captured instant until it is claimed.
        """

    async def claim(self, fork: Sandbox, sandbox: Sandbox) -> None:
        """Give ``sandbox`` the machine of ``fork``, an uncommitted sandbox, and let the machine continue.

        Sets ``sandbox.instance`` and ``sandbox.host``, and applies the sandbox's network policy. On failure, nothing
        of the machine remains.
        """

    async def boot(self, sandbox: Sandbox) -> None:
        """Boot the stopped instance from its own disk."""

    async def capture(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Sequence[VolumeSnapshot] = ()
    ) -> Snapshot:
        """Capture the running instance as ``snapshot`` and commit it. Returns the record with measurements.

        The machine keeps running in every case. On failure nothing of the snapshot remains. Disk, memory and
        ``volumes`` are captured at one instant. Snapshots of volumes are committed before the snapshot, whose record
        names them; the next scan sweeps those whose snapshot was never committed.
        """

    async def save(self, sandbox: Sandbox) -> None:
        """Commit the sandbox's record. From then on the sandbox exists, with the instance that the record names."""

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        """Replace a committed snapshot's record (a name, ``doomed``, …)."""

    async def stop(self, sandbox: Sandbox) -> None:
        """End the instance's machine and release its network. The disk remains."""

    async def discard(self, sandbox: Sandbox) -> None:
        """End the machine of ``sandbox.instance`` and remove its files. The sandbox's record remains."""

    async def remove(self, sandbox: Sandbox) -> None:
        """Remove the sandbox's record first, then its machine and disk."""

    def files_of(self, snapshot: Snapshot) -> dict[str, str]:
        """Return a snapshot's paths, for display: ``dir``, and ``memory`` and ``vmstate`` if it has such files."""

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Remove a snapshot, atomically."""

    # -- volumes: `Sandbox.mounts` lists a sandbox's mounts; `fork` and `start` mount them, `discard` and `stop` unmount

    async def create_volume(self, volume: Volume, source: VolumeSnapshot | None = None) -> None:
        """Create a volume, empty or from ``source`` (which may be smaller), and commit it; fills ``volume.host``."""

    async def grow_volume(self, volume: Volume, size_mb: int) -> None:
        """Grow a volume to ``size_mb``, even while it is mounted, and commit that; fills ``volume.size_mb``."""

    async def remove_volume(self, volume: Volume) -> None:
        """Remove a volume that no sandbox mounts, and its snapshots, atomically."""

    async def volume_state(self, volume: Volume) -> VolumeState:
        """Return a volume's used bytes and its failing unmounts."""

    async def capture_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        """Snapshot a volume at one instant, and commit the snapshot. Sandboxes that mount it keep running."""

    async def remove_volume_snapshot(self, snapshot: VolumeSnapshot) -> None:
        """Remove a snapshot of a volume. Raises UsedOutside if a user that the engine does not know needs it."""

    async def rollback_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        """Replace the volume's content with the snapshot's, atomically. Sandboxes that mount the volume see the change.

        The volume keeps its current size.
        """

    async def attach(self, sandbox: Sandbox, mount: Mount) -> None:
        """Give the running instance access to a volume. Raises Invalid for a path that cannot be a mount point.

        The agent then mounts the result of ``guest_mounts``.
        """

    async def detach(self, sandbox: Sandbox, mount: Mount) -> None:
        """Unmount a volume, even if the instance uses it. ``sandbox.mounts`` no longer contains it."""

    def guest_mounts(self, sandbox: Sandbox) -> list[GuestMount]:
        """Return the mounts that the agent of the running instance must make for ``sandbox.mounts``, in order."""

    async def has_diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        """Return whether the instance's file system (as written to its disk) has changed since ``head``.

        Raises GatewayError if the instance does not exist.
        """

    async def usage(self, sandbox: Sandbox) -> Usage:
        """Return the instance's usage. Raises GatewayError if it does not exist."""

    async def console(self, sandbox: Sandbox) -> str:
        """Return the tail of the running instance's console."""

    def end_reason(self, sandbox: Sandbox) -> str:
        """Return why the instance's machine is not running, as part of a sentence; "" while it runs."""

    async def apply_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        """Apply ``policy`` to the running instance."""

    def name_servers(self) -> list[str]:
        """Return the addresses of the name servers for sandboxes."""

    def endpoint(self, sandbox: Sandbox) -> Endpoint:
        """Return the endpoint of the running instance."""

    def on_exit(self, callback: Callable[[str], None]) -> None:
        """Set ``callback(instance)``, which is called when a machine ends by itself."""
