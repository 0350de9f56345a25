"""The host of a plan session. It changes nothing, and forwards queries about unchanged objects to the real host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.plans.room import PlannedRoom
from sandbox_gateway.engine.room import MACHINE_START_BYTES
from sandbox_gateway.errors import Conflict, Unsupported
from sandbox_gateway.hosts.base import (
    Endpoint,
    GuestMount,
    ImportBase,
    ImportTarget,
    Load,
    Log,
    PartSource,
    Room,
    Scan,
    SnapshotPart,
    SnapshotSource,
    StreamEncoding,
    Usage,
    VolumeState,
)
from sandbox_gateway.image_references import RegistryLogin
from sandbox_gateway.recipes import Recipe
from sandbox_gateway.records import MemoryMode, Mount, NetworkPolicy, Sandbox, Snapshot, Volume, VolumeSnapshot

_STOP_REASON = "the plan stops it"
may_read_sources: ContextVar[bool] = ContextVar("may_read_sources", default=False)
"""Whether the current request comes from an administrator, who could also build templates outside the session."""


class PlannedHost:
    """A ``hosts.base.Host`` without machines. ``engine``: the engine of the gateway, which is only read.

    An *instance* is real if the gateway's index has it; all other instances exist only in the session.
    """

    def __init__(self, engine: Engine, recent_captures: Sequence[Snapshot], charge: Callable[[int], None]) -> None:
        """Create a host. ``charge`` counts the bytes of each saved record, and raises an error beyond the limit.

        ``recent_captures``: see ``PlannedRoom``.
        """
        self._engine = engine
        self._charge = charge
        self._real_host = engine.host
        self.kind = self._real_host.kind
        self.abilities = self._real_host.abilities
        self.boot_seconds = self._real_host.boot_seconds
        self.resume_seconds = self._real_host.resume_seconds
        self._started_instances: set[str] = set()
        """The instances that the session has started."""
        self._stopped_instances: set[str] = set()
        """The real instances that the session has stopped."""
        self._new_snapshots: dict[str, Snapshot] = {}
        """The snapshots that the session has created, by id. It may have removed them again."""
        self._room = PlannedRoom(engine, recent_captures)

    # -- the host ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def scan(self) -> Scan:
        return Scan()

    def describe_platform(self) -> Mapping[str, str]:
        return self._real_host.describe_platform()

    async def measure_room(self) -> Room:
        return await self._room.read()

    async def compute_freed_memory(self) -> int:
        """Return the memory, in bytes, that the session frees on the host; it is negative if the session needs more."""
        return await self._room.compute_freed_memory()

    def count_sandboxes(self) -> int:
        """Return the number of sandboxes of the real host."""
        return len(self._engine.index.sandboxes)

    def get_storage_commands(self) -> None:
        """Return None, because a planned host does not run commands."""

    async def find_stalled_instances(self) -> set[str]:
        return set()

    async def resume_stalled(self, sandbox: Sandbox) -> None:
        pass

    def compute_guest_digest(self) -> str:
        return self._real_host.compute_guest_digest()

    def list_name_servers(self) -> list[str]:
        return self._real_host.list_name_servers()

    def on_exit(self, callback: Callable[[str], None]) -> None:
        pass

    # -- machines ---------------------------------------------------------------------------------------------------

    async def fork(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool, hold: bool = False) -> None:
        self._started_instances.add(sandbox.instance)
        self._room.start(sandbox.instance)

    async def flush_fork(self, fork: Sandbox) -> None:
        pass

    async def claim(self, fork: Sandbox, sandbox: Sandbox) -> None:
        sandbox.instance, sandbox.host = fork.instance, fork.host

    async def boot(self, sandbox: Sandbox) -> None:
        self._started_instances.add(sandbox.instance)
        self._stopped_instances.discard(sandbox.instance)
        self._room.start(sandbox.instance)

    async def stop(self, sandbox: Sandbox) -> None:
        self._room.stop(sandbox, frees_disk=False)
        self._started_instances.discard(sandbox.instance)
        self._stopped_instances.add(sandbox.instance)

    async def discard(self, sandbox: Sandbox) -> None:
        self._room.stop(sandbox, frees_disk=True)
        await self.stop(sandbox)

    async def remove(self, sandbox: Sandbox) -> None:
        await self.discard(sandbox)

    async def save(self, sandbox: Sandbox) -> None:
        self._charge(_measure(sandbox))

    def check_network(self, policy: NetworkPolicy) -> None:
        self._real_host.check_network(policy)

    async def apply_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        pass

    def find_end_reason(self, sandbox: Sandbox) -> str:
        if sandbox.instance in self._started_instances:
            return ""
        return _STOP_REASON if sandbox.instance in self._stopped_instances else self._real_host.find_end_reason(sandbox)

    def get_endpoint(self, sandbox: Sandbox) -> Endpoint:
        """Return the endpoint of a real instance. Raises Conflict for any other: only a run gives it an address."""
        if sandbox.instance in self._started_instances:
            raise Conflict(f"sandbox {sandbox.name} exists only in the plan")
        return self._real_host.get_endpoint(sandbox)

    async def has_diverged(self, sandbox: Sandbox, head: Snapshot) -> bool:
        """Return whether a real instance has diverged from its real head, as far as its disk shows.

        Its agent is not asked to write the guest's cache to the disk, because that would change the host.

        Raises Conflict if the plan has changed either of them, because then only a run can determine it.
        """
        real_sandbox = self._engine.index.sandboxes.get(sandbox.id)
        if real_sandbox is None or (real_sandbox.instance, real_sandbox.head) != (sandbox.instance, head.id):
            raise Conflict(f"whether sandbox {sandbox.name} has diverged is only known after the run")
        return await self._real_host.has_diverged(real_sandbox, head)

    async def measure_usage(self, sandbox: Sandbox, *, with_disk: bool = True) -> Usage:
        if self._is_real(sandbox):
            return await self._real_host.measure_usage(sandbox, with_disk=with_disk)
        return Usage(disk_bytes=0, memory_bytes=MACHINE_START_BYTES)

    async def measure_loads(self, sandboxes: Sequence[Sandbox]) -> dict[str, Load]:
        return await self._real_host.measure_loads([each for each in sandboxes if self._is_real(each)])

    async def read_console(self, sandbox: Sandbox) -> str:
        return await self._real_host.read_console(sandbox) if self._is_real(sandbox) else ""

    def _is_real(self, sandbox: Sandbox) -> bool:
        return sandbox.instance not in self._started_instances and sandbox.instance not in self._stopped_instances

    # -- snapshots --------------------------------------------------------------------------------------------------

    async def check_recipe(self, recipe: Recipe) -> None:
        await self._real_host.check_recipe(recipe)

    async def compute_source_digest(self, recipe: Recipe, login: RegistryLogin | None = None) -> str | None:
        """Let the real host compute the digest, but only for administrators. It reads files, or queries a registry."""
        if may_read_sources.get() or not (recipe.path or recipe.image):
            return await self._real_host.compute_source_digest(recipe, login)
        await self._real_host.check_recipe(recipe)
        return None

    async def build_base(
        self, base: Snapshot, recipe: Recipe, source_digest: str, log: Log, login: RegistryLogin | None = None
    ) -> str:
        return ""

    def read_step_programs(self) -> Mapping[str, str]:
        return self._real_host.read_step_programs()

    async def capture(
        self, sandbox: Sandbox, snapshot: Snapshot, *, memory: bool, volumes: Sequence[VolumeSnapshot] = ()
    ) -> Snapshot:
        self._charge(sum(map(_measure, (snapshot, *volumes))))
        self._room.add_snapshot(snapshot.id, memory=memory)
        captured_memory = MemoryMode.FULL if memory else MemoryMode.NONE
        snapshot = snapshot.model_copy(update={"memory": captured_memory, "resources": sandbox.resources})
        self._new_snapshots[snapshot.id] = snapshot
        return snapshot

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        self._charge(_measure(snapshot))

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        self._room.remove_snapshot(snapshot)

    def get_file_paths(self, snapshot: Snapshot) -> dict[str, str]:
        return self._real_host.get_file_paths(snapshot) if self._has_snapshot(snapshot) else {"dir": ""}

    def find_memory_problem(self, snapshot: Snapshot) -> str:
        return self._real_host.find_memory_problem(snapshot) if self._has_snapshot(snapshot) else ""

    async def find_export_bases(self, snapshot: Snapshot) -> Mapping[str, int]:
        """Return the bases of a real snapshot, or predict those of a snapshot that the session has created.

        The guids in a prediction are 0.
        """
        if self._has_snapshot(snapshot):
            return await self._real_host.find_export_bases(snapshot)
        parent = self._new_snapshots.get(snapshot.parent) or self._engine.index.snapshots.get(snapshot.parent)
        if parent is None:
            return {}
        has_same_source = snapshot.source_sandbox and snapshot.source_sandbox == parent.source_sandbox
        earlier_bases = await self.find_export_bases(parent) if has_same_source else {}
        return {parent.id: 0, **earlier_bases}

    async def open_snapshot(
        self, snapshot: Snapshot, *, memory: bool, base: Snapshot | None = None, resume_token: str = ""
    ) -> SnapshotSource:
        raise Unsupported("a plan session cannot export snapshots: export them outside the session")

    def find_import_problem(self, host_kind: str, architecture: str, platform: Mapping[str, str]) -> str:
        return self._real_host.find_import_problem(host_kind, architecture, platform)

    def check_encoding(self, encoding: StreamEncoding) -> None:
        self._real_host.check_encoding(encoding)

    async def find_import_bases(self, guid: int, origin_id: str) -> Sequence[str]:
        """Return the real snapshots with this guid, and those that the session has imported from ``origin_id``."""
        new_ids = [
            id for id, each in self._new_snapshots.items() if each.imported and each.imported.snapshot == origin_id
        ]
        return [*await self._real_host.find_import_bases(guid, origin_id), *new_ids]

    async def begin_import(
        self,
        snapshot: Snapshot,
        sizes: Mapping[SnapshotPart, int],
        *,
        line: bool,
        authentic: bool = False,
        base: ImportBase | None = None,
    ) -> ImportTarget:
        self._charge(_measure(snapshot))
        self._new_snapshots[snapshot.id] = snapshot
        self._room.add_snapshot(snapshot.id, memory=snapshot.memory is not MemoryMode.NONE)
        return _PlannedTarget()

    def _has_snapshot(self, snapshot: Snapshot) -> bool:
        return snapshot.id in self._engine.index.snapshots

    # -- volumes ----------------------------------------------------------------------------------------------------

    async def create_volume(self, volume: Volume, source: VolumeSnapshot | None = None) -> None:
        self._charge(_measure(volume))

    async def grow_volume(self, volume: Volume, size_mb: int) -> None:
        self._charge(_measure(volume))
        volume.size_mb = size_mb

    async def remove_volume(self, volume: Volume) -> None:
        await self._room.remove_volume(volume)

    async def read_volume_state(self, volume: Volume) -> VolumeState:
        """Return the state of a real volume. Raises Conflict for any other: only a run can measure it."""
        if volume.id not in self._engine.index.volumes:
            raise Conflict(f"volume {volume.name} exists only in the plan")
        return await self._real_host.read_volume_state(volume)

    async def capture_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        self._charge(_measure(snapshot))

    async def remove_volume_snapshot(self, snapshot: VolumeSnapshot) -> None:
        pass

    async def rollback_volume(self, volume: Volume, snapshot: VolumeSnapshot) -> None:
        # A jail host may create a new dataset for the volume.
        volume.host.pop("dataset", None)
        self._charge(_measure(volume))

    async def open_volume_snapshot(self, snapshot: VolumeSnapshot) -> PartSource:
        raise Unsupported("a plan session cannot export snapshots of volumes: export them outside the session")

    def check_volume_origin(self, host_kind: str) -> None:
        self._real_host.check_volume_origin(host_kind)

    async def begin_volume_import(self, volume: Volume, part: SnapshotPart, size: int) -> ImportTarget:
        self._charge(_measure(volume))
        return _PlannedTarget()

    async def attach(self, sandbox: Sandbox, mount: Mount) -> None:
        pass

    async def detach(self, sandbox: Sandbox, mount: Mount) -> None:
        pass

    def list_guest_mounts(self, sandbox: Sandbox) -> list[GuestMount]:
        return []


class _PlannedTarget:
    """A ``hosts.base.ImportTarget`` without parts."""

    def write(self, part: SnapshotPart, offset: int, data: bytes) -> None:
        pass

    async def commit(self) -> None:
        pass

    async def discard(self) -> None:
        pass


def _measure(value: Any) -> int:
    """Return the memory that a record takes, in bytes, without its field names. Values that records share count too."""
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(_measure(key) + _measure(item) for key, item in value.items())
    if isinstance(value, BaseModel):
        return size + sum(map(_measure, vars(value).values()))
    return size + sum(map(_measure, value)) if isinstance(value, list) else size
