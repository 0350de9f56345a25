"""Report the host's free disk space and memory (its *room*), keep a reserve, and resume stalled machines.

Memory and disks are overcommitted, so the sizes of sandboxes are not reserved. An operation is refused only if it
would leave less free than the reserves in ``limits.free_disk_mb`` and ``limits.free_memory_mb``.

A machine *stalls* if it writes while the disk has no space left: the host stops it, so that its guest does not see a
broken disk. Because a full disk may also prevent writing records, stalled machines are tracked only in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.errors import GatewayError, NoSpace, Timeout
from sandbox_gateway.hosts.base import MemoryDisk, Room
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox

_MIB = 1 << 20
MACHINE_START_BYTES = 64 * _MIB
"""The memory that a machine uses when it starts. Its later use depends on the guest."""
_MIN_FREE_DISK_MB = 64
"""Machines are not resumed with less free space, even without a reserve, because they would stall again."""
_REPORT_TIMEOUT_SECONDS = 3.0
"""Shorter than the time after which monitoring systems give up."""
_CHECK_INTERVAL_SECONDS = 1.0
_FULL_CHECK_INTERVAL_SECONDS = 30.0
_STALL_REASON = "the host's disk has no space left, so the sandbox's machine is stopped: free some space to resume it"

log = Logger("engine")


@dataclass(frozen=True)
class RoomReport:
    """The room on the host, and the sizes that sandboxes and volumes can grow to, in bytes."""

    room: Room
    disk_promised: int
    """The sizes of all sandboxes' disks and of all volumes."""
    memory_promised: int
    """The memory of all running sandboxes."""
    stalled_ids: list[str]
    """Ids of the sandboxes that are stopped because the disk has no space left."""


@dataclass(eq=False)
class PendingImport:
    """The bytes that a running import has announced but not written yet."""

    disk_bytes: int
    memory_bytes: int
    """The bytes for the memory root; 0 if the memory is stored on the disk."""

    def count_written_bytes(self, size: int, *, memory: bool) -> None:
        if memory and self.memory_bytes:
            self.memory_bytes = max(0, self.memory_bytes - size)
        else:
            self.disk_bytes = max(0, self.disk_bytes - size)


class RoomMonitor:
    def __init__(self, context: Context, locking: Locking) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._limits = context.config.limits
        self._locking = locking
        self._stalled_ids: set[str] = set()
        """Ids of the stalled sandboxes."""
        self._pending_imports: list[PendingImport] = []
        self._resuming_ids: set[str] = set()
        """Ids of the sandboxes whose machines are being resumed, including those that wait for their lock."""
        self._was_disk_low = False
        self._next_full_check_at = 0.0
        self._room_task: asyncio.Future[Room] | None = None

    async def report(self) -> RoomReport:
        """Return the room. Raises Timeout if the host does not report it soon."""
        sandboxes, volumes = self._index.sandboxes.values(), self._index.volumes.values()
        disk_sizes = [*(each.resources.disk_mb for each in sandboxes), *(each.size_mb for each in volumes)]
        memory_sizes = [each.resources.memory_mb for each in self._index.list_running_sandboxes()]
        stalled_ids = sorted(self._stalled_ids & self._index.sandboxes.keys())
        return RoomReport(await self._read_room(), sum(disk_sizes) * _MIB, sum(memory_sizes) * _MIB, stalled_ids)

    async def _read_room(self) -> Room:
        """Wait for a short time until the host has reported its room.

        If the host hangs, later calls wait for the same report, so that they do not pile up.
        """
        if self._room_task is None or self._room_task.done():
            self._room_task = asyncio.ensure_future(self._host.measure_room())
            # Retrieve an exception even if all callers have given up waiting for it.
            self._room_task.add_done_callback(lambda reading: reading.cancelled() or reading.exception())
        try:
            async with asyncio.timeout(_REPORT_TIMEOUT_SECONDS):
                return await asyncio.shield(self._room_task)
        except TimeoutError:
            raise Timeout(f"the host did not report its free space within {_REPORT_TIMEOUT_SECONDS:g} s") from None

    def get_stall_reason(self, sandbox: Sandbox) -> str:
        """Return why the machine of a running sandbox is stopped, as a sentence, or "" if it is not stalled."""
        return _STALL_REASON if sandbox.id in self._stalled_ids else ""

    # -- refusals ---------------------------------------------------------------------------------------------------

    async def require_room_for_machines(self, count: int) -> None:
        """Raise NoSpace if the host has no room for ``count`` more machines."""
        self._require_space_for_machines(await self._host.measure_room(), count)

    def _require_space_for_machines(self, room: Room, count: int) -> None:
        self._require_disk_space(room, 0, "a fork")
        needed_bytes, reserve_bytes = count * MACHINE_START_BYTES, self._limits.free_memory_mb * _MIB
        if reserve_bytes and room.memory_free < needed_bytes + reserve_bytes:
            raise NoSpace(
                f"{count} more {'machine' if count == 1 else 'machines'} would leave less than "
                f"{self._limits.free_memory_mb} MiB of memory free: the host has {room.memory_free // _MIB} MiB "
                f"free, and each machine needs {MACHINE_START_BYTES // _MIB} MiB to start. Pause or delete "
                "sandboxes, or lower limits.free_memory_mb"
            )

    async def require_room_for_capture(self, sandbox: Sandbox, *, memory: bool, fork_count: int = 0) -> None:
        """Raise NoSpace if a capture of ``sandbox`` could leave less free space than the reserve.

        ``fork_count``: the number of machines that are started from the capture and also need room.
        """
        room = await self._host.measure_room()
        if fork_count:
            self._require_space_for_machines(room, fork_count)
        if memory and room.memory_disk is not None:
            self._require_disk_space(room, 0, f"a capture of {sandbox.name}")
            await self._require_memory_disk_space(room.memory_disk, sandbox)
            return
        needed_bytes = sandbox.resources.memory_mb * _MIB if memory else 0
        if needed_bytes and not self.has_disk_space(room, needed_bytes):
            # A capture writes at most the memory that the machine really uses, which takes longer to find out.
            needed_bytes = min(needed_bytes, (await self._host.measure_usage(sandbox, with_disk=False)).memory_bytes)
        self._require_disk_space(room, needed_bytes, f"a capture of {sandbox.name}")

    @contextlib.asynccontextmanager
    async def reserved_for_import(
        self, disk_bytes: int, memory_bytes: int, *, subject: str = "the import"
    ) -> AsyncIterator[PendingImport]:
        """Reserve room for this much data until it is written or the context ends. Other imports cannot use the room.

        Raises NoSpace if an import of this much data would leave less free space than the reserve. ``subject``: the
        import, as named in that error.
        """
        room = await self._host.measure_room()
        if room.memory_disk is None:
            disk_bytes, memory_bytes = disk_bytes + memory_bytes, 0
        elif memory_bytes:
            self._require_memory_disk_space_for_import(room.memory_disk, memory_bytes)
        self._require_disk_space(
            room, disk_bytes, subject, reserved_bytes=sum(each.disk_bytes for each in self._pending_imports)
        )
        pending_import = PendingImport(disk_bytes, memory_bytes)
        self._pending_imports.append(pending_import)
        try:
            yield pending_import
        finally:
            self._pending_imports.remove(pending_import)

    def _require_memory_disk_space_for_import(self, disk: MemoryDisk, needed_bytes: int) -> None:
        reserve_bytes = self._limits.free_disk_mb * _MIB
        reserved_bytes = sum(each.memory_bytes for each in self._pending_imports)
        if not disk.problem and reserve_bytes and disk.free - needed_bytes - reserved_bytes < reserve_bytes:
            raise NoSpace(
                f"the memory of the snapshot ({-(-needed_bytes // _MIB)} MiB) would leave less than "
                f"{self._limits.free_disk_mb} MiB free in the memory root {disk.path}, which has "
                f"{disk.free // _MIB} MiB free{_describe_reservation(reserved_bytes)}. Delete snapshots, enlarge its "
                "file system, or lower limits.free_disk_mb"
            )

    async def _require_memory_disk_space(self, disk: MemoryDisk, sandbox: Sandbox) -> None:
        """Raise NoSpace if a capture could leave less free space than the reserve in the memory root."""
        reserve_bytes = self._limits.free_disk_mb * _MIB
        needed_bytes = sandbox.resources.memory_mb * _MIB
        if disk.problem or not reserve_bytes:
            return  # A capture reports the problem itself.
        if disk.free - needed_bytes < reserve_bytes:
            usage = await self._host.measure_usage(sandbox, with_disk=False)
            needed_bytes = min(needed_bytes, usage.memory_bytes + usage.image_bytes)
        if disk.free - needed_bytes < reserve_bytes:
            raise NoSpace(
                f"a capture of {sandbox.name} (up to {-(-needed_bytes // _MIB)} MiB) would leave less than "
                f"{self._limits.free_disk_mb} MiB free in the memory root {disk.path}, which has "
                f"{disk.free // _MIB} MiB free. Delete snapshots, enlarge its file system, or lower limits.free_disk_mb"
            )

    def has_disk_space(self, room: Room, needed_bytes: int = 0) -> bool:
        """Return whether the reserve of disk space remains free if ``needed_bytes`` are written."""
        reserve_bytes = self._limits.free_disk_mb * _MIB
        return not reserve_bytes or room.disk_free - needed_bytes >= reserve_bytes

    def _require_disk_space(self, room: Room, needed_bytes: int, subject: str, *, reserved_bytes: int = 0) -> None:
        if not self.has_disk_space(room, needed_bytes + reserved_bytes):
            size_note = f" (up to {-(-needed_bytes // _MIB)} MiB)" if needed_bytes else ""
            raise NoSpace(
                f"{subject}{size_note} would leave less than {self._limits.free_disk_mb} MiB of disk space free: the "
                f"host has {room.disk_free // _MIB} MiB free{_describe_reservation(reserved_bytes)}. Delete snapshots "
                "or sandboxes, enlarge the disk, or lower limits.free_disk_mb"
            )

    # -- stalled machines -------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Find stalled machines, and resume them when there is space. Never returns."""
        while True:
            try:
                await self._check()
            except Exception as error:
                log.error("the free disk space could not be checked", reason=str(error) or type(error).__name__)
            await asyncio.sleep(_CHECK_INTERVAL_SECONDS)

    async def _check(self) -> None:
        """Find stalled machines. While enough disk space is free, check only every ``_FULL_CHECK_INTERVAL_SECONDS``."""
        free_mb = (await self._host.measure_room()).disk_free // _MIB
        is_disk_low = free_mb < max(self._limits.free_disk_mb, _MIN_FREE_DISK_MB)
        if is_disk_low or self._was_disk_low or self._stalled_ids or time.monotonic() >= self._next_full_check_at:
            self._next_full_check_at = time.monotonic() + _FULL_CHECK_INTERVAL_SECONDS
            self._publish_changes(await self._host.find_stalled_instances())
            if not is_disk_low:
                for id in self._stalled_ids - self._resuming_ids:
                    self._context.background.start(self._resume_machine(id))
        self._was_disk_low = is_disk_low

    def _publish_changes(self, instances: set[str]) -> None:
        """Publish which machines have stalled or resumed since the last check."""
        running_sandboxes = self._index.list_running_sandboxes()
        stalled_ids = {each.id for each in running_sandboxes if each.instance in instances}
        for id in stalled_ids - self._stalled_ids:
            log.warning("sandbox stalled", sandbox=id, reason="no space left on the disk")
            self._context.events.publish("sandbox.stalled", sandboxID=id, reason=_STALL_REASON)
        for id in self._stalled_ids & {each.id for each in running_sandboxes} - stalled_ids:
            log.info("sandbox continued", sandbox=id)
            self._context.events.publish("sandbox.continued", sandboxID=id)
        self._stalled_ids = stalled_ids

    async def _resume_machine(self, id: str) -> None:
        """Resume a stalled machine. The lock excludes captures, which stop the machine themselves."""
        self._resuming_ids.add(id)
        try:
            async with self._locking.running_sandbox_locked(id) as sandbox:
                await self._host.resume_stalled(sandbox)
        except GatewayError as error:
            log.warning("a stalled machine could not be resumed", sandbox=id, reason=error.message)
        finally:
            self._resuming_ids.discard(id)


def _describe_reservation(size: int) -> str:
    return f", of which running imports need {-(-size // _MIB)} MiB" if size else ""
