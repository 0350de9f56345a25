"""Move sandboxes to another host of the fleet, and take over those that come from one.

The two hosts never run the sandbox at the same time. On its source, the sandbox is paused, with the mark ``departure``:
no request changes or resumes it. On its target, it is hidden, with the mark ``arrival``, until ``adopt`` creates it.
Which of the two hosts has the sandbox, the fleet decides between these steps. The source keeps everything until the
target has adopted the sandbox, so that it can take it back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic import ValidationError

from sandbox_gateway.engine.agent_client import check_environment
from sandbox_gateway.engine.captures import Captures
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.durations import measured
from sandbox_gateway.engine.first_passes import FirstPasses
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.machine_lifecycle import MachineLifecycle
from sandbox_gateway.engine.record_changes import save_sandbox
from sandbox_gateway.engine.removal import Removal
from sandbox_gateway.engine.room import RoomMonitor
from sandbox_gateway.engine.sandboxes import Sandboxes
from sandbox_gateway.engine.transfer.transfers import Export, HiddenImport, Transfers
from sandbox_gateway.errors import Busy, Conflict, GatewayError, NotFound, OverQuota, Unsupported
from sandbox_gateway.log import Logger
from sandbox_gateway.records import (
    Arrival,
    Departure,
    MemoryMode,
    NewerFormat,
    Sandbox,
    SandboxState,
    Snapshot,
    SnapshotKind,
    new_id,
    now,
    parse_record,
)
from sandbox_gateway.tasks import clean_up, finish_despite_cancellation

_LOCAL_FIELDS = {"instance", "host", "pause_snapshot", "departure", "arrival"}
"""The fields of a sandbox that have a meaning only on its host."""

log = Logger("engine")


class Moves:
    def __init__(
        self,
        context: Context,
        locking: Locking,
        collector: Collector,
        removal: Removal,
        machines: MachineLifecycle,
        captures: Captures,
        room: RoomMonitor,
        sandboxes: Sandboxes,
        transfers: Transfers,
    ) -> None:
        self._context = context
        self._host = context.host
        self._index = context.index
        self._locking = locking
        self._collector = collector
        self._removal = removal
        self._machines = machines
        self._captures = captures
        self._room = room
        self._sandboxes = sandboxes
        self._transfers = transfers
        self.first_passes = FirstPasses(context, locking, collector, captures, room, transfers)

    # -- the source -------------------------------------------------------------------------------------------------

    def require_movable(self, ref: str) -> Sandbox:
        """Return a sandbox that can be moved. Raises GatewayError with the reason if it cannot."""
        sandbox = self._index.get_sandbox(ref)
        self._transfers.require_ability()
        self._transfers.require_free_slot()
        if sandbox.departure is not None:
            raise Busy(f"sandbox {sandbox.id} is already being moved to host {sandbox.departure.target!r}")
        if sandbox.mounts:
            volumes = self._index.volumes
            names = [volumes[each.volume].name if each.volume in volumes else each.volume for each in sandbox.mounts]
            noun = "volume" if len(names) == 1 else "volumes"
            raise Conflict(
                f"sandbox {sandbox.name} mounts the {noun} {', '.join(names)}, and volumes do not move: detach the "
                f"{noun} first",
                blockers=names,
            )
        if sandbox.state is SandboxState.RUNNING:
            self._context.require_running(sandbox.id)
        elif sandbox.pause_snapshot:
            self._transfers.require_exportable(self._index.get_any_snapshot(sandbox.pause_snapshot))
        elif self._host.abilities.memory:
            raise Conflict(
                f"sandbox {sandbox.name} is stopped, and has no capture that can be sent: resume it, then move it"
            )
        return sandbox

    def has_memory(self, sandbox: Sandbox) -> bool:
        """Return whether a sandbox loses the contents of its memory if only its disk moves."""
        if sandbox.state is SandboxState.RUNNING:
            return self._host.abilities.memory
        snapshot = self._index.snapshots.get(sandbox.pause_snapshot)
        return snapshot is not None and snapshot.memory is not MemoryMode.NONE and not sandbox.cold_start

    @measured("sandbox.depart")
    async def depart(self, ref: str, move: str, target: str) -> Sandbox:
        """Pause a sandbox until it lives on ``target``, or is taken back. Raises GatewayError.

        If this fails, the sandbox may already have the mark: ``take_back`` removes it.
        """
        async with self._locking.sandbox_locked(ref) as sandbox:
            return await finish_despite_cancellation(self._depart(self.require_movable(sandbox.id), move, target))

    async def _depart(self, sandbox: Sandbox, move: str, target: str) -> Sandbox:
        resumes = sandbox.state is SandboxState.RUNNING
        departure = Departure(move=move, target=target, resumes=resumes)
        if resumes:
            reason = f"it is being moved to host {target}"
            sandbox = await self._sandboxes.pause_locked(sandbox, departure=departure, state_reason=reason)
        else:
            sandbox = await save_sandbox(self._context, sandbox.id, departure=departure)
        snapshot_id = sandbox.pause_snapshot or (await self._capture_stopped(sandbox)).id
        departure = departure.model_copy(update={"snapshot": snapshot_id})
        return await save_sandbox(self._context, sandbox.id, departure=departure)

    async def _capture_stopped(self, sandbox: Sandbox) -> Snapshot:
        """Capture the files of a stopped sandbox, which only hosts without memory can."""
        snapshot = self._captures.create_snapshot_record(sandbox, SnapshotKind.TRANSIENT)
        return await self._captures.capture_state(sandbox, snapshot, memory=False)

    def describe_for_target(self, sandbox: Sandbox) -> dict[str, Any]:
        """Return what the target has to know of a sandbox, as JSON."""
        return sandbox.model_dump(mode="json", exclude=_LOCAL_FIELDS)

    def find_departing(self, id: str, move: str) -> Sandbox | None:
        """Return a sandbox if it departs with this move."""
        sandbox = self._index.sandboxes.get(id)
        is_departing = sandbox is not None and sandbox.departure is not None and sandbox.departure.move == move
        return sandbox if is_departing else None

    async def export(self, id: str, move: str, *, memory: bool, after_first_pass: bool) -> Export:
        """Open the snapshot of a departing sandbox for an export. Raises NotFound.

        ``after_first_pass``: export only what differs from the first pass.
        """
        sandbox = self.find_departing(id, move)
        if sandbox is None or sandbox.departure is None or not sandbox.departure.snapshot:
            raise NotFound("move", move)
        since = self.first_passes.find_sent(id, move) if after_first_pass else ""
        return await self._transfers.export_hidden(sandbox.departure.snapshot, memory=memory, since=since)

    async def take_back(self, id: str, move: str, reason: str) -> None:
        """End the departure of a sandbox, which then continues here. ``reason``: a clause.

        The sandbox is departing until it runs, so that a gateway that is killed meanwhile repeats this.
        """
        async with self._locking.departing_sandbox_locked(id):
            sandbox = self.find_departing(id, move)
            if sandbox is None or sandbox.departure is None:
                return
            if sandbox.departure.resumes:
                try:
                    await self._sandboxes.resume_locked(sandbox, departure=None)
                    await self._collector.collect()
                    return
                except GatewayError as error:
                    message = "a sandbox could not be resumed after its move had failed"
                    log.error(message, sandbox=id, reason=error.message)
            changes: dict[str, Any] = {"state_reason": reason} if sandbox.departure.resumes else {}
            await save_sandbox(self._context, id, departure=None, **changes)
            await self._collector.collect()

    async def complete_departure(self, id: str, move: str) -> None:
        """Remove a sandbox that its target has adopted."""
        async with self._locking.departing_sandbox_locked(id):
            if (sandbox := self.find_departing(id, move)) is not None:
                await finish_despite_cancellation(self._sandboxes.remove_locked(sandbox, has_moved=True))

    # -- the target -------------------------------------------------------------------------------------------------

    async def check_arrival(self, data: Mapping[str, Any], *, resumes: bool) -> Sandbox:
        """Return the record of a sandbox that is to arrive. Raises GatewayError if this host cannot take it."""
        self._transfers.require_ability()
        self._transfers.require_free_slot()
        try:
            sandbox = parse_record(Sandbox, {**data, "instance": new_id()})
        except (NewerFormat, ValidationError):
            raise Unsupported("the sandbox comes from a newer release of the gateway: upgrade this host") from None
        if sandbox.id in self._index:
            raise Conflict(f"this host already has the sandbox {sandbox.id}, or is just getting it: try again later")
        limit = self._context.config.limits.sandboxes
        if len(self._index.sandboxes) + len(self._index.arrivals) >= limit:
            raise OverQuota(
                f"the limit of {limit} sandboxes on the host would be exceeded: delete sandboxes first, or raise "
                "limits.sandboxes"
            )
        self._host.check_network(sandbox.network)
        check_environment(sandbox.env)
        if resumes:
            await self._room.require_room_for_machines(1)
        return sandbox

    async def receive(self, sandbox: Sandbox, arrival: Arrival, pieces: AsyncIterator[bytes]) -> None:
        """Import the snapshot of an arriving sandbox, and save the sandbox as hidden.

        On failure, nothing remains. After a cancellation, the sandbox may have arrived.
        """
        # Jails need the snapshots from which they were cloned. Other hosts remove it once the sandbox runs.
        kind = SnapshotKind.PAUSE if self._host.abilities.independent_snapshots else SnapshotKind.TRANSIENT

        async def complete(snapshot: Snapshot) -> None:
            try:
                await self._save_arrival(sandbox, arrival, snapshot)
            except BaseException:
                await clean_up(log, self._host.remove(sandbox))
                await self._captures.undo(snapshot.id)
                raise

        await self._transfers.import_(pieces, hidden=HiddenImport(kind, complete))

    async def _save_arrival(self, sandbox: Sandbox, arrival: Arrival, snapshot: Snapshot) -> None:
        changes: dict[str, Any] = {"arrival": arrival, "pause_snapshot": snapshot.id, "state": SandboxState.PAUSED}
        if not self._host.abilities.independent_snapshots:
            changes["base"] = snapshot.id
        if arrival.resumes:
            changes["state_reason"] = ""
        arriving_sandbox = sandbox.model_copy(update=changes)
        await self._host.save(arriving_sandbox)
        self._index.put(arriving_sandbox)

    def find_arriving(self, id: str, move: str) -> Sandbox | None:
        """Return a sandbox if it arrives with this move."""
        sandbox = self._index.arrivals.get(id)
        return sandbox if sandbox is not None and sandbox.arrival and sandbox.arrival.move == move else None

    @measured("sandbox.arrive")
    async def adopt(self, id: str, move: str, *, must_start: bool) -> Sandbox | None:
        """Create an arriving sandbox, and start it if it ran before. Returns None if it does not arrive here.

        If it cannot be started: with ``must_start``, raise the error; the sandbox arrives as before. Otherwise, it is
        paused, with the reason.
        """
        async with self._context.locks.held(id, f"sandbox {id}"):
            arriving_sandbox = self.find_arriving(id, move)
            if arriving_sandbox is None or arriving_sandbox.arrival is None:
                return None
            resumes = arriving_sandbox.arrival.resumes
            name = arriving_sandbox.name
            if self._index.find_owner(name) not in ("", id):
                log.warning("an arriving sandbox lost its name, because another object has it", sandbox=id, name=name)
                name = id
            sandbox = arriving_sandbox.model_copy(
                update={"name": name, "arrival": None, "generation": arriving_sandbox.generation + 1}, deep=True
            )
            snapshot = self._index.get_any_snapshot(sandbox.pause_snapshot)
            async with self._collector.pinned_then_collected(snapshot):
                if resumes:
                    sandbox = await self._start(sandbox, snapshot, must_start=must_start)
                await finish_despite_cancellation(self._commit_arrival(sandbox))
                if sandbox.instance != arriving_sandbox.instance:
                    await clean_up(log, self._host.discard(arriving_sandbox))
        if snapshot.kind is SnapshotKind.PAUSE and not sandbox.pause_snapshot:
            await clean_up(log, self._removal.remove_snapshot(snapshot))
        return sandbox

    async def _start(self, sandbox: Sandbox, snapshot: Snapshot, *, must_start: bool) -> Sandbox:
        changes: dict[str, Any] = {"instance": new_id(), "host": {}, "state": SandboxState.RUNNING, "started_at": now()}
        running_sandbox = sandbox.model_copy(update={**changes, "pause_snapshot": "", "cold_start": False})
        with_memory = snapshot.memory is not MemoryMode.NONE and not sandbox.cold_start
        try:
            await self._machines.fork(snapshot, running_sandbox, with_memory=with_memory)
        except GatewayError as error:
            if must_start:
                raise
            log.error("a sandbox could not be started after its move", sandbox=sandbox.id, reason=error.message)
            reason = f"it could not be started after its move: {error.message}"
            return sandbox.model_copy(update={"state_reason": reason})
        return running_sandbox

    async def _commit_arrival(self, sandbox: Sandbox) -> None:
        try:
            await self._host.save(sandbox)
        except BaseException:
            await clean_up(log, self._host.discard(sandbox))
            raise
        self._index.put(sandbox)
        self._context.events.publish("sandbox.arrived", sandboxID=sandbox.id, name=sandbox.name)
        self._machines.mark_if_stopped(sandbox)

    async def discard_arrival(self, id: str, move: str) -> None:
        """Remove an arriving sandbox, which stays on its source."""
        async with self._context.locks.held(id, f"sandbox {id}"):
            if (sandbox := self.find_arriving(id, move)) is None:
                return
            await finish_despite_cancellation(self._discard_arrival(sandbox))

    async def _discard_arrival(self, sandbox: Sandbox) -> None:
        await self._host.remove(sandbox)
        self._index.remove(sandbox.id)
        await self._captures.undo(sandbox.pause_snapshot)
