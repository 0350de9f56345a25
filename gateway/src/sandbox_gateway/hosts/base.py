"""Define the interface between the engine and a host.

A host manages machines (keyed by ``Sandbox.instance``) and snapshots (keyed by id). The engine manages names, ordering,
locks, undo and policy.

There are two primitives: ``fork`` starts a machine from a snapshot, and ``capture`` takes a snapshot of a running
machine. The other methods of ``Host``, by section:

* the host: lock it and scan it at start-up; describe its platform, space and problems; resume stalled machines.
* templates: check a recipe, and create a file system from it, which becomes a snapshot (``build_base``).
* sandboxes: boot and stop machines, claim forks that were started earlier; save and remove sandboxes.
* snapshots: save and remove them; export them, and create one from an export (``begin_import``).
* volumes: create, change, capture, export, import and remove them. ``Sandbox.mounts`` lists the mounts of a sandbox:
  ``fork`` and ``boot`` mount them, ``discard`` and ``stop`` unmount them. ``attach`` and ``detach`` add and remove one
  while the machine runs.
* network: check and apply policies; find the address of a machine.
* state of sandboxes: compare them with a snapshot, measure them, and explain why their machines are not running.

The classes of both host kinds have the same sections, in the same order.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import Mount, NetworkPolicy, Sandbox, Snapshot, Volume, VolumeSnapshot

Log = Callable[[str], None]
"""A function that receives one human-readable line of progress."""


@dataclass(frozen=True)
class Abilities:
    """The optional features of a kind of host. Operations and tests check these instead of the name of the kind."""

    memory: bool
    """Snapshots can include memory. If they cannot, ``memory: auto`` captures no memory."""
    resize_on_fork: bool
    """A fork may differ from its snapshot in CPUs, memory size and disk size even if it restores the memory.

    Without memory, forks may always differ, so this has no effect on a host whose snapshots include no memory.
    """
    independent_snapshots: bool
    """Snapshots can be removed while sandboxes depend on them. Otherwise a rolled-back sandbox keeps its snapshot."""
    prewarm: bool = False
    """A fork with memory can be held at the point of the capture, and claimed later by a different sandbox."""
    atomic_capture: bool = False
    """A disk capture of a running machine is a point-in-time copy, without freezing the file system."""
    can_stall: bool = False
    """The host stops a machine that writes while its disk has no space left, until the machine is resumed."""
    atomic_append: bool = False
    """Appends by several sandboxes to a file of a volume are atomic, and file locks work across sandboxes."""
    transfer: bool = False
    """Snapshots can be exported to files and imported from them."""
    incremental_transfer: bool = False
    """A file can contain only what differs from another snapshot."""
    any_transfer_base: bool = False
    """That can be any snapshot. Otherwise it must be one of ``Host.find_export_bases``."""


@dataclass(frozen=True)
class Endpoint:
    """The address at which the host can reach a machine: connections to any port of ``address`` reach the machine."""

    address: str
    line: socket.socket | None = None
    """A connection to the machine's agent that bypasses the network, if the agent listens on it. The host closes it."""
    key: str = ""
    """The key that authenticates the gateway to the agent, if the gateway's address is not sufficient."""


@dataclass(frozen=True)
class Usage:
    """An instance's resource usage in bytes: unshared disk blocks, and memory including its share of shared pages."""

    disk_bytes: int
    memory_bytes: int
    image_bytes: int = 0
    """The additional bytes that a capture with memory writes if it must copy the machine's previous image."""


@dataclass(frozen=True)
class Load:
    """The current resource usage of a running machine, measured from outside its guest.

    None means that the host cannot measure a value. Shared memory and shared disk blocks count fully, because measuring
    shares is expensive. ``cpu_seconds``: the CPU time since the machine was started ``running_seconds`` ago. A host
    whose kernel measures the current CPU usage sets ``cpu_percent`` instead, in percent of one CPU.
    ``received_bytes``, ``sent_bytes``: what the guest has received and sent, counted from an arbitrary start.
    """

    memory_bytes: int | None = None
    disk_bytes: int | None = None
    cpu_seconds: float | None = None
    running_seconds: float = 0.0
    cpu_percent: float | None = None
    received_bytes: int | None = None
    sent_bytes: int | None = None


@dataclass(frozen=True)
class MemoryDisk:
    """The space on the file system that stores the memory of new snapshots, in bytes."""

    path: str
    free: int = 0
    total: int = 0
    problem: str = ""
    """Why the file system is not available, as a clause. ``free`` and ``total`` are then 0."""


@dataclass(frozen=True)
class Room:
    """The disk space and memory of a host, in bytes."""

    disk_free: int
    disk_total: int
    memory_free: int
    """Memory that can be used without swapping."""
    memory_total: int
    memory_disk: MemoryDisk | None = None
    """None: memory is stored on the disk that stores all other state."""


@dataclass(frozen=True)
class GuestMount:
    """A mount that the machine's agent must perform, because the host cannot perform it from outside."""

    path: str
    source: str
    type: str
    options: str
    """Comma-separated options for mount(2), without the flags."""
    read_only: bool


@dataclass(frozen=True)
class VolumeState:
    """The state of a volume on the host."""

    used_bytes: int
    stuck: list[str] = field(default_factory=list)
    """One sentence per failing unmount. The host retries failing unmounts in the background."""


@dataclass
class Scan:
    """The objects that a host found at start-up."""

    snapshots: list[Snapshot] = field(default_factory=list)
    sandboxes: list[Sandbox] = field(default_factory=list)
    volumes: list[Volume] = field(default_factory=list)
    volume_snapshots: list[VolumeSnapshot] = field(default_factory=list)
    unreadable_sandboxes: list[str] = field(default_factory=list)
    """Paths of the sandboxes whose records could not be read."""
    running_instances: set[str] = field(default_factory=set)
    """Instances whose machines were still running and were adopted."""
    repaired: list[str] = field(default_factory=list)
    """One sentence per object that was swept, quarantined or repaired."""


class SnapshotPart(StrEnum):
    """The parts of an exported snapshot, in the order of the file.

    A snapshot of a virtual machine has MACHINE_PARTS, and either all MEMORY_PARTS or none. A snapshot of a volume for
    virtual machines has only VOLUME, an image of its file system. A snapshot of a jail, or of a volume for jails, has
    only STREAM, a `zfs send` stream.
    """

    KERNEL = "kernel"
    INITRD = "initrd"
    DISK = "disk"
    MEMORY = "memory"
    DEVICE_STATE = "device_state"
    STREAM = "stream"
    VOLUME = "volume"


MACHINE_PARTS = frozenset({SnapshotPart.KERNEL, SnapshotPart.INITRD, SnapshotPart.DISK})
MEMORY_PARTS = frozenset({SnapshotPart.MEMORY, SnapshotPart.DEVICE_STATE})


class StreamEncoding(StrEnum):
    """How the blocks of a file system are stored in a stream. The importing host needs a ZFS that can receive it."""

    PLAIN = "plain"
    COMPRESSED = "compressed"
    """As in the pool from which the stream was sent."""
    RAW = "raw"
    """As in that pool: encrypted. To mount the file system, load its key."""


class PartSource(Protocol):
    """The open parts of a snapshot. They remain readable if the snapshot is removed. The methods block."""

    @property
    def sizes(self) -> Mapping[SnapshotPart, int]:
        """The size in bytes of each part."""

    @property
    def encoding(self) -> StreamEncoding:
        """How the blocks in STREAM are stored. PLAIN if there is no stream."""

    @property
    def relative_parts(self) -> frozenset[SnapshotPart]:
        """The parts of which only what differs from another snapshot, the base, is read."""

    def extents(self, part: SnapshotPart) -> Iterator[tuple[int, int]]:
        """Yield the (start, end) of each range that may contain nonzero bytes, or in a relative part, may differ."""

    def read(self, part: SnapshotPart, offset: int, length: int) -> bytes:
        """Return exactly ``length`` bytes. Raises GatewayError."""

    def close(self) -> None:
        """Close the parts."""


class SnapshotSource(PartSource, Protocol):
    """The open parts of a sandbox's snapshot."""

    @property
    def architecture(self) -> str:
        """The architecture of the machine."""

    @property
    def platform(self) -> Mapping[str, str]:
        """The platform of the snapshot's memory. Empty: the source has no memory."""

    @property
    def line(self) -> bool:
        """Whether the agent in the captured memory listens on its serial line."""


@dataclass(frozen=True)
class ImportBase:
    """The local snapshot that an import needs, because the file contains only what differs from it.

    ``guid``: the number that it has on every host, on hosts with streams. ``parts``: on other hosts, the parts of which
    the file contains only what differs.
    """

    snapshot: Snapshot
    guid: int = 0
    parts: frozenset[SnapshotPart] = frozenset()


class ImportTarget(Protocol):
    """The parts of a snapshot or volume that is being imported. It does not exist before ``commit``."""

    def write(self, part: SnapshotPart, offset: int, data: bytes) -> None:
        """Write to a part. Bytes that are never written are zero. Blocks. Raises GatewayError."""

    async def commit(self) -> None:
        """Make the parts durable, and commit the record, with the data that the host needs.

        Raises Invalid if a part has contents that the host cannot use.
        """

    async def discard(self) -> None:
        """Remove everything, whether it is committed or not."""


@runtime_checkable
class ResumableTarget(ImportTarget, Protocol):
    """An import that can continue after an interruption, with a file whose stream begins where the first one ended."""

    async def suspend(self) -> str:
        """Stop, and keep what has arrived. Returns a token for ``Host.open_snapshot``, or "" if nothing can be kept.

        Afterwards, only ``resume`` and ``discard`` may be called.
        """

    def resume(self, snapshot: Snapshot, sizes: Mapping[SnapshotPart, int]) -> None:
        """Prepare for the rest of the stream, in a part with the given size. ``snapshot``: its record from now on."""


@runtime_checkable
class SharingTarget(ImportTarget, Protocol):
    """An import that does not write data again that a local snapshot has at the same place."""

    def use_bases(self, bases: Sequence[SnapshotSource]) -> None:
        """Compare what is written next with these open snapshots. They must remain open until the next call."""


@dataclass(frozen=True)
class SlowCommand:
    """A storage command that should have finished by now. ``since``: its start, in seconds since 1970."""

    command: str
    dataset: str
    since: float
    was_killed: bool
    """Whether the command was killed but has not exited yet, because it is stuck in the kernel."""


@dataclass(frozen=True)
class StorageCommands:
    """The state of a host's storage commands. ``timeouts``: the number of commands killed since the gateway started."""

    slow_commands: Sequence[SlowCommand]
    timeouts: int


class Host(Protocol):
    kind: str
    abilities: Abilities
    boot_seconds: float
    """Maximum seconds until the agent of a booted machine answers."""
    resume_seconds: float
    """Maximum seconds until the agent of a machine restored from memory answers."""

    # -- the host ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Check the host and lock it for this gateway. Raises GatewayError with remedies for what is missing."""

    async def close(self) -> None:
        """Release the host; machines keep running."""

    async def scan(self) -> Scan:
        """Remove uncommitted objects, then return all existing objects and running machines.

        Raises BackendFailed, before anything is changed, if a newer release has written a record that this release
        cannot read.
        """

    def describe_platform(self) -> Mapping[str, str]:
        """Return the platform of this host's machines. Memory can be restored only on an identical one.

        Empty: machines have no memory that can be restored.
        """

    async def measure_room(self) -> Room:
        """Return the size and the free space of the disk that stores this host's state, and of the host's memory."""

    def get_storage_commands(self) -> StorageCommands | None:
        """Return the state of the host's storage commands, or None if this kind of host has none. Does not block."""

    async def find_stalled_instances(self) -> set[str]:
        """Return the instances whose machines the host stopped because the disk had no space left."""

    async def resume_stalled(self, sandbox: Sandbox) -> None:
        """Resume the instance's machine if it is stalled."""

    def on_exit(self, callback: Callable[[str], None]) -> None:
        """Set the function to call with the instance of each machine that stops unexpectedly."""

    # -- templates --------------------------------------------------------------------------------------------------

    def compute_guest_digest(self) -> str:
        """Return the result of `guest_digest.digest_guest` for templates of this host. The call may read files."""

    async def check_recipe(self, recipe: Recipe) -> None:
        """Raise Unsupported if the recipe is known to be for a different kind of host. The call reads no files."""

    async def compute_source_digest(self, recipe: Recipe, login: RegistryLogin | None = None) -> str | None:
        """Return a digest of the directory, tarball or image that ``recipe`` names; "" if it names none.

        ``login``: for the image's registry. None: the host's own credentials.
        Returns None if the caller is not allowed to make the host read it. Raises Invalid if it cannot be read, and
        Unsupported if this host cannot build templates from it.
        """

    async def build_base(
        self, base: Snapshot, recipe: Recipe, source_digest: str, log: Log, login: RegistryLogin | None = None
    ) -> str:
        """Create a file system from ``recipe`` and commit it as the snapshot ``base``, which has no memory.

        ``source_digest``: the result of ``compute_source_digest`` with ``login`` when the build was requested. Returns
        the start command that the recipe's image declares; "" if there is none.
        """

    def read_step_programs(self) -> Mapping[str, str]:
        """Return the programs that run the build steps of E2B's client in a template, by their paths there.

        They are for templates that were not built from an image. Raises Unsupported if this host cannot run steps.
        """

    # -- sandboxes --------------------------------------------------------------------------------------------------

    async def fork(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool, hold: bool = False) -> None:
        """Start ``sandbox.instance`` from ``snapshot`` and set ``sandbox.host``. ``save`` then commits the sandbox.

        With memory, the machine resumes at the point of the capture. Otherwise, it boots from the disk. ``hold``: the
        machine stays stopped at the point of the capture until ``claim``. Cleans up on failure.
        """

    async def flush_fork(self, fork: Sandbox) -> None:
        """Write the changes of ``fork`` to the disk, so that a sandbox that claims it can be committed quickly."""

    async def claim(self, fork: Sandbox, sandbox: Sandbox) -> None:
        """Give ``sandbox`` the machine of the uncommitted ``fork``, and resume the machine.

        Sets ``sandbox.instance`` and ``sandbox.host``, and applies the network policy of ``sandbox``. On failure, the
        machine is removed.
        """

    async def boot(self, sandbox: Sandbox) -> None:
        """Boot the stopped instance from its disk."""

    async def stop(self, sandbox: Sandbox) -> None:
        """Stop the instance's machine and release its network. The disk remains."""

    async def save(self, sandbox: Sandbox) -> None:
        """Commit the sandbox's record. The sandbox then exists, with the instance that the record contains.

        A sandbox that was forked paused has a ``pause_snapshot`` but no machine or files yet. For such a sandbox, the
        host first creates whatever it needs to store the record.
        """

    async def discard(self, sandbox: Sandbox) -> None:
        """Stop the machine of ``sandbox.instance`` and remove its files. The sandbox's record remains."""

    async def remove(self, sandbox: Sandbox) -> None:
        """Remove the sandbox's record first, then its machine and disk."""

    # -- snapshots --------------------------------------------------------------------------------------------------

    async def capture(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Sequence[VolumeSnapshot] = ()
    ) -> Snapshot:
        """Capture the running instance as ``snapshot`` and commit it. Returns the record with measurements.

        A host without the ability ``memory`` also captures a stopped instance, without ``volumes``.

        Disk, memory and ``volumes`` are captured at the same instant. The machine keeps running, even on failure; in
        that case all parts of the snapshot are removed. The snapshots of volumes are committed before the snapshot
        that they belong to. If that snapshot is never committed, the next scan removes them.
        """

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        """Replace a committed snapshot's record, for example to change its name or ``doomed``."""

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Remove a snapshot atomically."""

    def get_file_paths(self, snapshot: Snapshot) -> dict[str, str]:
        """Return a snapshot's paths, for display: ``dir``, and ``memory`` and ``vmstate`` if it has such files."""

    def find_memory_problem(self, snapshot: Snapshot) -> str:
        """Return, as a clause, why a snapshot's memory cannot be restored now.

        Returns "" if it can be restored, or if the snapshot has no memory.
        """

    async def find_export_bases(self, snapshot: Snapshot) -> Mapping[str, int]:
        """Return the guids of the snapshots since which ``snapshot`` can be exported, by id. The nearest is first.

        Only called if the host has the ability ``incremental_transfer``, but not ``any_transfer_base``.
        """

    async def open_snapshot(
        self, snapshot: Snapshot, *, memory: bool, base: Snapshot | None = None, resume_token: str = ""
    ) -> SnapshotSource:
        """Open a committed snapshot for reading. ``memory``: include the memory, which must be restorable.

        ``base``: open only what differs from this snapshot. ``resume_token``: open only the rest of its stream, after
        what a ``ResumableTarget`` has received.
        """

    def find_import_problem(self, host_kind: str, architecture: str, platform: Mapping[str, str]) -> str:
        """Return, as a clause, why memory that was captured on ``platform`` cannot be restored, or "" if it can.

        Raises Unsupported if this host cannot boot even a disk from a host of ``host_kind`` and ``architecture``.
        """

    def check_encoding(self, encoding: StreamEncoding) -> None:
        """Raise Unsupported unless this host can receive streams with this encoding."""

    async def find_import_bases(self, guid: int, origin_id: str) -> Sequence[str]:
        """Return the ids of the snapshots of this gateway that have the guid ``guid``.

        ``origin_id``: the id of such a snapshot in another gateway, for plan sessions, whose snapshots have no guid.
        Only called if the host does not have the ability ``any_transfer_base``.
        """

    async def begin_import(
        self,
        snapshot: Snapshot,
        sizes: Mapping[SnapshotPart, int],
        *,
        line: bool,
        authentic: bool = False,
        base: ImportBase | None = None,
    ) -> ImportTarget:
        """Create the parts of ``snapshot``, all zero, with the given sizes. ``line``: see ``SnapshotSource``.

        ``authentic``: the signer of everything that is written to the target is known when it is written. Otherwise,
        that is only known at ``commit``. ``base``: the stream contains only what differs from it, and the parts
        ``base.parts`` begin with its contents instead of zeros. It must exist until the import ends.
        """

    # -- volumes ----------------------------------------------------------------------------------------------------

    async def create_volume(self, volume: Volume, source: VolumeSnapshot | None = None) -> None:
        """Create a volume, empty or from ``source`` (which may be smaller), commit it, and set ``volume.host``."""

    async def grow_volume(self, volume: Volume, size_mb: int) -> None:
        """Grow a volume to ``size_mb`` MiB, even while it is mounted, commit the change, and set ``volume.size_mb``."""

    async def remove_volume(self, volume: Volume) -> None:
        """Remove a volume that no sandbox mounts, and its snapshots, atomically."""

    async def read_volume_state(self, volume: Volume) -> VolumeState:
        """Return how many bytes a volume uses, and its failing unmounts."""

    async def capture_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        """Take and commit a point-in-time snapshot of a volume. Sandboxes that mount the volume keep running."""

    async def remove_volume_snapshot(self, snapshot: VolumeSnapshot) -> None:
        """Remove a snapshot of a volume.

        Raises InUseExternally if something that the engine does not manage depends on it.
        """

    async def rollback_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        """Atomically replace the contents of the volume with those of the snapshot, and commit the volume's record.

        The volume keeps its current size. Sandboxes that mount the volume see the change.
        """

    async def open_volume_snapshot(self, snapshot: VolumeSnapshot) -> PartSource:
        """Open a committed snapshot of a volume for reading. It has one part."""

    def check_volume_origin(self, host_kind: str) -> None:
        """Raise Unsupported unless this host can use volumes from a host of ``host_kind``."""

    async def begin_volume_import(self, volume: Volume, part: SnapshotPart, size: int) -> ImportTarget:
        """Create the only part of ``volume``, all zero. ``size``: at most the volume's size, or the stream's size."""

    async def attach(self, sandbox: Sandbox, mount: Mount) -> None:
        """Give the running instance access to a volume. Raises Invalid for a path that cannot be a mount point.

        The agent then performs the mounts that ``list_guest_mounts`` returns.
        """

    async def detach(self, sandbox: Sandbox, mount: Mount) -> None:
        """Unmount a volume that ``sandbox.mounts`` no longer contains, even if the instance is using it."""

    def list_guest_mounts(self, sandbox: Sandbox) -> list[GuestMount]:
        """Return the mounts that the agent of the running instance must perform for ``sandbox.mounts``, in order."""

    # -- network ----------------------------------------------------------------------------------------------------

    def check_network(self, policy: NetworkPolicy) -> None:
        """Raise Invalid for an invalid policy, and Unsupported for one that this kind of host cannot enforce."""

    async def apply_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        """Apply ``policy`` to the running instance. Raises the same errors as ``check_network``."""

    def list_name_servers(self) -> list[str]:
        """Return the addresses of the name servers for sandboxes."""

    def get_endpoint(self, sandbox: Sandbox) -> Endpoint:
        """Return the endpoint of the running instance."""

    # -- state of sandboxes -----------------------------------------------------------------------------------------

    async def has_diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        """Return whether the instance's disk has changed since ``head``.

        Data that the guest has not written to its disk yet does not count. However many callers there are, and whether
        or not they wait, only a few lookups run at a time. Raises GatewayError if the instance does not exist.
        """

    async def measure_usage(self, sandbox: Sandbox, *, with_disk: bool = True) -> Usage:
        """Return the resource usage of the instance. Raises GatewayError if the instance does not exist.

        ``with_disk``: measure the disk, which takes long if the guest has fragmented it. If not, ``disk_bytes`` is 0.
        """

    async def measure_loads(self, sandboxes: Sequence[Sandbox]) -> dict[str, Load]:
        """Return the load of each instance whose machine is running. It is called often, so it must be cheap."""

    async def read_console(self, sandbox: Sandbox) -> str:
        """Return the tail of the instance's console output, or "" if there is none. The machine may have stopped."""

    def find_end_reason(self, sandbox: Sandbox) -> str:
        """Return, as a clause, why the instance's machine is not running, or "" while it runs."""
