"""Keep forks of snapshots ready before anyone requests them.

A snapshot's record contains the number of forks to keep ready (``Snapshot.prewarm``). The forks are not committed
before they are claimed, so a restart of the gateway discards them and starts new ones.

A prewarmed fork of a snapshot is held at the captured instant. A prewarmed fork of a template runs, so that its first
command is fast: for a template, the exact instant does not matter.

These starts differ from those in ``machine_lifecycle``: a fork is held or warmed up, always has its memory, and mounts
no volumes. They do not take a start slot, so that no request waits for them. Instead, only one fork starts at a time,
and none while requests keep all cores busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sandbox_gateway.engine.agents import Agents
from sandbox_gateway.engine.backoff import Backoff
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.durations import measured
from sandbox_gateway.engine.record_changes import save_snapshot
from sandbox_gateway.engine.room import RoomMonitor
from sandbox_gateway.errors import GatewayError, Invalid, Unsupported
from sandbox_gateway.hosts.base import Room
from sandbox_gateway.log import Logger
from sandbox_gateway.records import MemoryMode, Sandbox, Snapshot, SnapshotKind, new_id
from sandbox_gateway.tasks import clean_up

_CHECK_INTERVAL_SECONDS = 1.0
_DELAY_AFTER_CLAIM_SECONDS = 0.5
"""Longer than the claim and a first command, which the start of the next fork would slow down."""
_WARM_UP_COMMAND = ["true"]
_WARM_UP_TIMEOUT_SECONDS = 20.0

log = Logger("engine")


@dataclass(frozen=True)
class Level:
    """The requested number of prewarmed forks, and the number that are ready."""

    target: int
    ready: int


class PrewarmPool:
    """The pool of forks that are ready to be claimed."""

    def __init__(self, context: Context, agents: Agents, room: RoomMonitor) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._agents = agents
        self._room = room
        self._ready_forks: dict[str, list[Sandbox]] = {}
        """Uncommitted sandboxes that have machines, by the id of their snapshot, oldest first."""
        self._lacks_room = False
        """Whether a fork is missing because the host had no room for it."""
        self._change_event = asyncio.Event()
        self._backoff = Backoff()
        self._next_start_at = 0.0
        """No fork is started before this monotonic time, so that a newly claimed fork can run its first command."""
        self._requested_start_count = 0
        """Number of forks that requests are starting, including those that wait for a start slot.

        ``StartSlots`` cannot count them: it also counts boots, and takes away the slot of a start that hangs.
        """

    @contextlib.contextmanager
    def request_start_counted(self) -> Iterator[None]:
        """Count a machine that a request is starting. No fork is prewarmed while requests keep all cores busy."""
        self._requested_start_count += 1
        try:
            yield
        finally:
            self._requested_start_count -= 1
            self._change_event.set()

    def get_level(self, snapshot: Snapshot) -> Level:
        return Level(target=snapshot.prewarm, ready=len(self._ready_forks.get(snapshot.id, ())))

    def get_total_level(self) -> Level:
        """Return the target and the number of ready forks, summed over all snapshots."""
        levels = [
            self.get_level(snapshot) for snapshot in self._index.list_grouped_snapshots(self._index.prewarmed_ids)
        ]
        return Level(target=sum(each.target for each in levels), ready=sum(map(len, self._ready_forks.values())))

    @measured("prewarm.set")
    async def set_target(self, ref: str, count: int) -> Level:
        """Keep ``count`` forks of a snapshot or template ready.

        Raises Invalid or Unsupported, like ``check_count``, or NoSpace if the host has no room for more forks.
        """
        snapshot = self._index.get_snapshot(ref)
        self.check_count(snapshot.memory is not MemoryMode.NONE, count)
        await self.require_room(count - snapshot.prewarm)
        return await self.save_target(snapshot, count)

    async def require_room(self, count: int) -> None:
        """Raise NoSpace if the host has no room for ``count`` more forks."""
        if count > 0:
            await self._room.require_room_for_machines(count)

    async def save_target(self, snapshot: Snapshot, count: int) -> Level:
        """Keep ``count`` forks of a snapshot ready, as soon as the host has room for them."""
        if snapshot.prewarm != count:
            snapshot = await save_snapshot(self._context, snapshot.id, prewarm=count)
        self._backoff.forget([snapshot.id])
        self._change_event.set()
        return self.get_level(snapshot)

    def check_count(self, memory: bool, count: int) -> None:
        """Raise Invalid or Unsupported if ``count`` forks of a snapshot cannot be kept ready.

        ``memory``: whether the snapshot includes memory.
        """
        maximum = self._context.config.prewarm.maximum
        if not 0 <= count <= maximum:
            raise Invalid(f"a prewarm count of {count} is out of range: use 0 to {maximum} (prewarm.maximum)")
        if count and not self._host.abilities.prewarm:
            raise Unsupported(f"a {self._host.kind} host cannot prewarm forks: omit prewarm, or set it to 0")
        if count and not memory:
            raise Unsupported(
                "a snapshot without memory cannot be prewarmed, because its forks must boot: take a snapshot with "
                "memory"
            )

    def take(self, snapshot: Snapshot, sandbox: Sandbox) -> Sandbox | None:
        """Remove and return a fork of ``snapshot`` that ``sandbox`` can claim. The caller must claim or discard it.

        Returns None if there is no such fork.
        """
        if sandbox.mounts or snapshot.mounts or sandbox.resources != snapshot.resources:
            return None
        ready_forks = self._ready_forks.get(snapshot.id, [])
        while ready_forks:
            self._change_event.set()
            fork = ready_forks.pop(0)
            if not self._host.find_end_reason(fork):
                self._next_start_at = time.monotonic() + _DELAY_AFTER_CLAIM_SECONDS
                return fork
            self._context.background.start(self._host.discard(fork))
        return None

    async def keep_forks_ready(self) -> None:
        """Start and discard forks as needed. Never returns."""
        while True:
            if (seconds := self._next_start_at - time.monotonic()) > 0:
                await asyncio.sleep(seconds)  # starting a fork would slow down the claim and the first command
                continue
            self._change_event.clear()
            try:
                room = await self._host.measure_room() if self._ready_forks or self._read_targets() else None
                await self._discard_surplus(room)
                has_started = room is not None and await self._start_missing_fork(room)
            except Exception as error:
                log.error("prewarming failed", reason=str(error) or type(error).__name__)
                has_started = False
            if not has_started:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_INTERVAL_SECONDS):
                        await self._change_event.wait()

    async def discard_all(self) -> None:
        """Discard all forks that have not been claimed."""
        forks = [fork for ready_forks in self._ready_forks.values() for fork in ready_forks]
        self._ready_forks.clear()
        await clean_up(log, *(self._host.discard(fork) for fork in forks))

    def _read_targets(self) -> dict[str, int]:
        targets = {
            each.id: each.prewarm
            for each in self._index.list_grouped_snapshots(self._index.prewarmed_ids)
            if not each.doomed
        }
        self._backoff.retain_only(targets)
        return targets

    async def _discard_surplus(self, room: Room | None) -> None:
        """Discard forks that exceed their target or have stopped, and one more if the host is short of memory."""
        targets = self._read_targets()
        surplus: list[Sandbox] = []
        for id, ready_forks in list(self._ready_forks.items()):
            running_forks = [fork for fork in ready_forks if not self._host.find_end_reason(fork)]
            remaining_forks = running_forks[: targets.get(id, 0)]
            remaining_ids = {fork.id for fork in remaining_forks}
            surplus += [fork for fork in ready_forks if fork.id not in remaining_ids]
            self._ready_forks[id] = remaining_forks
            if not remaining_forks:
                del self._ready_forks[id]
        free_memory_mb = self._context.config.prewarm.free_memory_mb
        if self._ready_forks and room is not None and room.memory_free >> 20 < free_memory_mb:
            largest_group = max(self._ready_forks.values(), key=len)
            surplus.append(largest_group.pop())
            log.warning(
                "prewarmed fork discarded", reason="the host is short of memory", ready=self.get_total_level().ready
            )
        await clean_up(log, *(self._host.discard(fork) for fork in surplus))

    async def _start_missing_fork(self, room: Room) -> bool:
        """Start one missing fork. Returns False if no fork is missing, or if none can be started now."""
        if self._requested_start_count >= (os.cpu_count() or 1):
            return False
        for id, target in self._read_targets().items():
            snapshot = self._index.snapshots[id]
            if len(self._ready_forks.get(id, ())) >= target or not self._backoff.is_due(id):
                continue
            required_mb = self._context.config.prewarm.free_memory_mb + snapshot.resources.memory_mb
            if room.memory_free >> 20 < required_mb or not self._room.has_disk_space(room):
                if not self._lacks_room:
                    log.warning("no fork is prewarmed", snapshot=id, reason="the host is short of memory or disk space")
                self._lacks_room = True
                continue
            self._lacks_room = False
            try:
                with self._context.durations.operation_measured("prewarm.start", snapshot.memory):
                    fork = await self._start(snapshot)
            except GatewayError as error:
                self._backoff.delay(id)
                log.warning("a fork could not be prewarmed", snapshot=id, reason=error.message)
                continue
            self._backoff.forget([id])
            if id in self._index.snapshots:
                self._ready_forks.setdefault(id, []).append(fork)
            else:
                await self._host.discard(fork)
            return True
        return False

    async def _start(self, snapshot: Snapshot) -> Sandbox:
        """Start a fork of a snapshot and hold it, or start a fork of a template and let a first command warm it up."""
        id = new_id()
        fork = Sandbox(id=id, name=id, forked_from=snapshot.id, base=snapshot.id, resources=snapshot.resources)
        is_template = snapshot.kind is SnapshotKind.TEMPLATE
        await self._host.fork(snapshot, fork, with_memory=True, hold=not is_template)
        try:
            if is_template:
                await self._agents.identify(fork, has_booted=False)
                await self._agents.create_client(fork).exec(_WARM_UP_COMMAND, timeout=_WARM_UP_TIMEOUT_SECONDS)
            await self._host.flush_fork(fork)
        except BaseException:
            await clean_up(log, self._host.discard(fork))
            raise
        return fork
