"""The room (disk space and memory) that would be free on the host after the changes of a plan session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.engine.room import MACHINE_START_BYTES
from sandbox_gateway.errors import GatewayError
from sandbox_gateway.hosts.base import Room, Usage
from sandbox_gateway.records import MemoryMode, Sandbox, Snapshot, Volume


@dataclass
class _StoppedMachine:
    """A real machine that the session has stopped."""

    sandbox: Sandbox
    frees_disk: bool
    usage: Usage | None = None


class PlannedRoom:
    """The real room, minus what the session would use, plus what it would free.

    Only the run can know the sizes of new objects. A machine counts as much as ``RoomMonitor`` assumes, and a memory
    image as much as the images of ``recent_captures``.
    """

    def __init__(self, engine: Engine, recent_captures: Sequence[Snapshot]) -> None:
        self._host = engine.host
        self._index = engine.index
        self._started_instances: set[str] = set()
        """The instances that the session has started."""
        self._stopped_machines: dict[str, _StoppedMachine] = {}
        """By instance."""
        recent_sizes = [each.memory_bytes_written for each in recent_captures if each.memory is not MemoryMode.NONE]
        self._image_bytes = int(median(recent_sizes or [0]))
        self._image_ids: set[str] = set()
        """Ids of the session's snapshots with memory."""
        self._removed_image_bytes = 0
        self._removed_disk_bytes = 0

    async def read(self) -> Room:
        """Return the room that the run would find."""
        room = await self._host.measure_room()
        memory_bytes = await self.compute_freed_memory()
        disk_bytes = self._removed_disk_bytes
        for machine in self._stopped_machines.values():
            disk_bytes += (await self._measure(machine)).disk_bytes if machine.frees_disk else 0
        image_bytes = self._removed_image_bytes - len(self._image_ids) * self._image_bytes
        memory_disk = room.memory_disk
        if memory_disk is None:
            disk_bytes += image_bytes
        elif not memory_disk.problem:
            memory_disk = replace(memory_disk, free=_clamp(memory_disk.free + image_bytes, memory_disk.total))
        return replace(
            room,
            disk_free=_clamp(room.disk_free + disk_bytes, room.disk_total),
            memory_free=_clamp(room.memory_free + memory_bytes, room.memory_total),
            memory_disk=memory_disk,
        )

    async def compute_freed_memory(self) -> int:
        """Return the memory, in bytes, that the session's machines free; it is negative if they need more."""
        memory_bytes = -len(self._started_instances) * MACHINE_START_BYTES
        for machine in self._stopped_machines.values():
            usage = await self._measure(machine)
            # The machine may have stopped in the meantime. Its memory is then already free.
            if not self._host.find_end_reason(machine.sandbox):
                memory_bytes += max(usage.memory_bytes, MACHINE_START_BYTES)
        return memory_bytes

    async def _measure(self, machine: _StoppedMachine) -> Usage:
        if machine.usage is None:
            try:
                machine.usage = await self._host.measure_usage(machine.sandbox, with_disk=False)
            except GatewayError:
                return Usage(disk_bytes=0, memory_bytes=0)
        return machine.usage

    def start(self, instance: str) -> None:
        """Count a machine that the session starts."""
        self._started_instances.add(instance)

    def stop(self, sandbox: Sandbox, *, frees_disk: bool) -> None:
        """Stop counting a machine. ``frees_disk``: its disk is also removed."""
        if sandbox.instance in self._started_instances:
            self._started_instances.discard(sandbox.instance)
        elif sandbox.instance in self._stopped_machines:
            self._stopped_machines[sandbox.instance].frees_disk |= frees_disk
        else:
            self._stopped_machines[sandbox.instance] = _StoppedMachine(sandbox, frees_disk)

    def add_snapshot(self, id: str, *, memory: bool) -> None:
        if memory:
            self._image_ids.add(id)

    def remove_snapshot(self, snapshot: Snapshot) -> None:
        self._image_ids.discard(snapshot.id)
        if snapshot.id in self._index:
            self._removed_image_bytes += snapshot.memory_bytes_written
            self._removed_disk_bytes += snapshot.disk_bytes_unique

    async def remove_volume(self, volume: Volume) -> None:
        if volume.id in self._index:
            self._removed_disk_bytes += (await self._host.read_volume_state(volume)).used_bytes


def _clamp(size: int, total: int) -> int:
    return min(max(size, 0), total)
