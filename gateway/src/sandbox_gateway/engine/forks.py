"""Create sandboxes from snapshots: by default, either all requested sandboxes or none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from sandbox_gateway.engine.agent_client import check_environment
from sandbox_gateway.engine.captures import Captures
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.commit_gate import commit_gate
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.durations import measured
from sandbox_gateway.engine.fork_plan import create_sandbox_record, list_requested_names, should_restore_memory
from sandbox_gateway.engine.index import sort_oldest_first
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.machine_lifecycle import MachineLifecycle
from sandbox_gateway.engine.mount_plan import MountPlanner
from sandbox_gateway.engine.name_claims import NameClaim
from sandbox_gateway.engine.references import References
from sandbox_gateway.engine.room import RoomMonitor
from sandbox_gateway.engine.spec import ForkSpec
from sandbox_gateway.errors import GatewayError, OverQuota
from sandbox_gateway.log import Logger
from sandbox_gateway.records import Sandbox, Snapshot, SnapshotKind, Volume
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation, wait_for_all

log = Logger("engine")


class Forks:
    def __init__(
        self,
        context: Context,
        locking: Locking,
        references: References,
        collector: Collector,
        mount_planner: MountPlanner,
        machines: MachineLifecycle,
        captures: Captures,
        room: RoomMonitor,
    ) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._locking = locking
        self._references = references
        self._collector = collector
        self._mount_planner = mount_planner
        self._machines = machines
        self._captures = captures
        self._room = room
        self._pending_count = 0
        """Number of sandboxes that are being created."""

    @measured("sandbox.create")
    async def create(self, ref: str, spec: ForkSpec) -> Sandbox:
        """Create one sandbox from a snapshot or template, or return the one with ``spec.idempotency_key``."""
        result = (await self._fork_snapshot(ref, spec))[0]
        if isinstance(result, GatewayError):
            raise result
        return result

    @measured("sandbox.fork")
    async def fork(self, ref: str, spec: ForkSpec) -> list[Sandbox | GatewayError]:
        """Create ``spec.count`` sandboxes from a snapshot or template.

        With ``spec.atomic``, the first error is raised and all new sandboxes are removed. Otherwise, the list contains
        an error for each sandbox that could not be created.
        """
        return await self._fork_snapshot(ref, spec)

    async def _fork_snapshot(self, ref: str, spec: ForkSpec) -> list[Sandbox | GatewayError]:
        async with self._idempotency_key_locked(spec) as existing_sandboxes:
            if existing_sandboxes:
                return existing_sandboxes
            self._index.get_snapshot(ref)  # A missing snapshot is reported first.
            self._check_spec(spec)
            await self._room.require_room_for_machines(len(list_requested_names(spec)))
            return await self._create_sandboxes(self._index.get_snapshot(ref), spec)

    @measured("sandbox.clone")
    async def clone(self, ref: str, spec: ForkSpec) -> list[Sandbox | GatewayError]:
        """Capture a sandbox and fork the capture ``spec.count`` times. The capture is removed once it is unused.

        The capture includes the volumes that are cloned for each fork.
        """
        async with self._idempotency_key_locked(spec) as existing_sandboxes:
            return existing_sandboxes or await self._capture_and_fork(ref, spec)

    @contextlib.asynccontextmanager
    async def _idempotency_key_locked(self, spec: ForkSpec) -> AsyncIterator[list[Sandbox | GatewayError]]:
        """Lock the idempotency key of ``spec``, if any. Yield the sandboxes that an earlier request created with it."""
        if not (key := spec.idempotency_key):
            yield []
            return
        async with self._context.locks.held(f"idempotency key {key}", "the idempotency key"):
            yield [*sort_oldest_first(each for each in self._index.sandboxes.values() if each.idempotency_key == key)]

    def _check_spec(self, spec: ForkSpec) -> None:
        """Raise GatewayError if the host or the agent would refuse the properties of the new sandboxes."""
        self._host.check_network(spec.network)
        check_environment(spec.env)

    async def _capture_and_fork(self, ref: str, spec: ForkSpec) -> list[Sandbox | GatewayError]:
        self._mount_planner.resolve_volumes(spec.mounts or [])
        self._check_spec(spec)
        # Report a name that is taken before the source is paused.
        names = [name for name in list_requested_names(spec) if name]
        self._context.name_claims.require_free(names)
        with self._index.reserved(names):
            pass
        async with self._locking.running_sandbox_locked(ref) as sandbox:
            snapshot = self._captures.create_snapshot_record(sandbox, SnapshotKind.TRANSIENT)
            try:
                return await self._clone(sandbox, snapshot, spec)
            finally:
                await finish_despite_cancellation(self._collector.collect())

    async def _clone(self, sandbox: Sandbox, snapshot: Snapshot, spec: ForkSpec) -> list[Sandbox | GatewayError]:
        with self._index.pinned(snapshot):
            volume_refs = [each.volume for each in spec.mounts or [] if each.clone]
            snapshot = await finish_despite_cancellation(
                self._captures.capture(
                    sandbox, snapshot, memory=True, volumes=volume_refs, fork_count=len(list_requested_names(spec))
                )
            )
            try:
                return await self._create_sandboxes(snapshot, spec)
            except BaseException:
                # If the request was cancelled after the commit, the forks exist and still need the capture.
                if not self._references.find_users(snapshot).sandboxes:
                    await self._captures.restore_head(sandbox, snapshot)
                raise

    async def _create_sandboxes(self, snapshot: Snapshot, spec: ForkSpec) -> list[Sandbox | GatewayError]:
        config = self._context.config
        sandboxes = [create_sandbox_record(snapshot, spec, name, config) for name in list_requested_names(spec)]
        can_resize = self._host.abilities.resize_on_fork
        with_memory = should_restore_memory(snapshot, spec, sandboxes[0].resources, can_resize=can_resize)
        planned_mounts = self._mount_planner.plan(snapshot, spec.mounts)
        self._require_quota(len(sandboxes))
        async with self._collector.pinned_then_collected(snapshot):
            with self._reserved(sandboxes):
                if not planned_mounts:
                    return await self._start_with_names_claimed(snapshot, spec, sandboxes, with_memory)
                async with self._mount_planner.mounts_added(planned_mounts, sandboxes) as clones:
                    return await self._start_with_names_claimed(snapshot, spec, sandboxes, with_memory, clones)

    @contextlib.contextmanager
    def _reserved(self, sandboxes: Sequence[Sandbox]) -> Iterator[None]:
        """Reserve the names of new sandboxes, and their share of the quota."""
        with self._index.reserved(sandbox.name for sandbox in sandboxes):
            self._pending_count += len(sandboxes)
            try:
                yield
            finally:
                self._pending_count -= len(sandboxes)

    async def _start_with_names_claimed(
        self,
        snapshot: Snapshot,
        spec: ForkSpec,
        sandboxes: list[Sandbox],
        with_memory: bool,
        clones: Mapping[str, list[Volume]] = MappingProxyType({}),
    ) -> list[Sandbox | GatewayError]:
        records: list[Sandbox | Volume] = [*sandboxes, *(clone for each in clones.values() for clone in each)]
        async with self._context.name_claims.held([NameClaim(record, [record.name]) for record in records]):
            return await self._start_sandboxes(snapshot, spec, sandboxes, with_memory, clones)

    async def _start_sandboxes(
        self,
        snapshot: Snapshot,
        spec: ForkSpec,
        sandboxes: list[Sandbox],
        with_memory: bool,
        clones: Mapping[str, list[Volume]],
    ) -> list[Sandbox | GatewayError]:
        semaphore = asyncio.Semaphore(spec.concurrency or self._context.config.limits.concurrency)
        completed_count = 0

        async def start_sandbox(sandbox: Sandbox) -> Sandbox:
            nonlocal completed_count
            async with semaphore:
                if sandbox.id in clones:
                    await self._mount_planner.create_clones(clones[sandbox.id])
                await self._machines.fork(snapshot, sandbox, with_memory=with_memory)
            completed_count += 1
            self._report_progress(spec, completed_count, len(sandboxes), sandbox.id)
            return sandbox

        tasks = [asyncio.create_task(start_sandbox(sandbox)) for sandbox in sandboxes]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION if spec.atomic else asyncio.ALL_COMPLETED)
        except asyncio.CancelledError:
            await finish_despite_cancellation(self._undo(tasks, sandboxes))
            raise
        errors = [error for task in tasks if task.done() and (error := task.exception())]
        if errors and spec.atomic:
            await finish_despite_cancellation(self._undo(tasks, sandboxes))
            raise errors[0]
        if unexpected_error := next((error for error in errors if not isinstance(error, GatewayError)), None):
            await finish_despite_cancellation(self._undo(tasks, sandboxes))
            raise unexpected_error
        new_sandboxes = [task.result() for task in tasks if task.exception() is None]
        if gate := commit_gate.get():
            try:
                await gate()
            except BaseException:
                await finish_despite_cancellation(self._undo(tasks, sandboxes))
                raise
        await finish_despite_cancellation(self._commit(new_sandboxes))
        results = (task.exception() or task.result() for task in tasks)
        return [result for result in results if isinstance(result, Sandbox | GatewayError)]

    def _report_progress(self, spec: ForkSpec, completed_count: int, total: int, sandbox_id: str) -> None:
        if spec.operation:
            self._context.events.publish(
                "fork.progress", operation=spec.operation, done=completed_count, total=total, sandboxID=sandbox_id
            )

    async def _commit(self, sandboxes: list[Sandbox]) -> None:
        try:
            await wait_for_all(*(self._host.save(sandbox) for sandbox in sandboxes))
        except BaseException:
            await self._remove(sandboxes)
            raise
        for sandbox in sandboxes:
            self._index.put(sandbox)
            self._context.events.publish(
                "sandbox.created", sandboxID=sandbox.id, name=sandbox.name, forkedFrom=sandbox.forked_from
            )
            self._machines.mark_if_stopped(sandbox)

    async def _undo(self, tasks: list[asyncio.Task[Sandbox]], sandboxes: list[Sandbox]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._remove(sandboxes)

    async def _remove(self, sandboxes: Iterable[Sandbox]) -> None:
        await clean_up(log, *(self._host.remove(sandbox) for sandbox in sandboxes))

    def _require_quota(self, count: int) -> None:
        limit = self._context.config.limits.sandboxes
        if len(self._index.sandboxes) + self._pending_count + count > limit:
            raise OverQuota(
                f"the limit of {limit} sandboxes on this host would be exceeded: delete sandboxes first, or raise "
                "limits.sandboxes"
            )
