"""Fork, boot and stop the machines of sandboxes, and handle machines that stop unexpectedly.

``prewarm`` starts its forks itself, because they do not belong to a sandbox yet. This module gives them to sandboxes.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from sandbox_gateway.control_characters import remove_control_characters
from sandbox_gateway.engine.agents import Agents
from sandbox_gateway.engine.boot_failure import add_console
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.durations import set_memory_mode
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.prewarm import PrewarmPool
from sandbox_gateway.engine.record_changes import copy_with_changes, save_sandbox
from sandbox_gateway.engine.start_slots import StartSlots
from sandbox_gateway.errors import GatewayError, NotFound
from sandbox_gateway.log import Logger
from sandbox_gateway.records import MemoryMode, Sandbox, SandboxState, Snapshot, new_id
from sandbox_gateway.tasks import clean_up

_MAX_SLOT_SECONDS = 3.0
"""Longer than a start takes unless the guest or the host hangs."""

log = Logger("engine")


class MachineLifecycle:
    def __init__(self, context: Context, locking: Locking, agents: Agents, prewarm: PrewarmPool) -> None:
        self._context = context
        self._host = context.host
        self._locking = locking
        self._agents = agents
        self._prewarm = prewarm
        self._start_slots = StartSlots(context.config.limits.starts or os.cpu_count() or 1, _MAX_SLOT_SECONDS)
        self.start_counts: Counter[str] = Counter()
        """Number of started machines, by method: "prewarmed", "memory" or "boot"."""

    async def fork(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool) -> None:
        """Fork a machine from ``snapshot``, or claim a prewarmed one, and send it its identity.

        On failure, the machine is removed. Does nothing for a sandbox whose state is paused.
        """
        if sandbox.state is SandboxState.PAUSED:
            return
        set_memory_mode(snapshot.memory if with_memory else MemoryMode.NONE)
        if with_memory and await self._claim(snapshot, sandbox):
            return
        with self._prewarm.request_start_counted():
            async with self._start_slots.held():
                await self._start(snapshot, sandbox, with_memory=with_memory)

    async def _claim(self, snapshot: Snapshot, sandbox: Sandbox) -> bool:
        """Give ``sandbox`` a prewarmed fork of ``snapshot``. Returns False if none is ready or the claim fails."""
        if (fork := self._prewarm.take(snapshot, sandbox)) is None:
            return False
        try:
            with self._context.durations.operation_measured("prewarm.claim", snapshot.memory):
                await self._host.claim(fork, sandbox)
                await self._agents.identify(sandbox, has_booted=False)
        except BaseException as error:
            await clean_up(log, self._host.discard(sandbox))
            if not isinstance(error, GatewayError):
                raise
            log.warning("claim failed", sandbox=sandbox.id, snapshot=snapshot.id, reason=error.message)
            sandbox.instance, sandbox.host = new_id(), {}
            return False
        self.start_counts["prewarmed"] += 1
        return True

    async def _start(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool) -> None:
        try:
            await self._host.fork(snapshot, sandbox, with_memory=with_memory)
            await self._agents.identify(sandbox, has_booted=not with_memory)
            if sandbox.mounts or snapshot.mounts:
                has_stale_mounts = with_memory and bool(snapshot.mounts)
                await self._agents.mount_volumes(
                    sandbox, has_stale_mounts=has_stale_mounts, seconds=self._host.boot_seconds
                )
        except BaseException as error:
            final_error = error if with_memory else await add_console(error, self._host, sandbox)
            await clean_up(log, self._host.discard(sandbox))
            if final_error is error:
                raise
            raise final_error from error
        self.start_counts["memory" if with_memory else "boot"] += 1

    async def boot(self, sandbox: Sandbox) -> None:
        """Boot a stopped sandbox from its own disk. On failure, stop it again."""
        set_memory_mode(MemoryMode.NONE)
        async with self._start_slots.held():
            await self._boot(sandbox)

    async def _boot(self, sandbox: Sandbox) -> None:
        await self._host.boot(sandbox)
        try:
            await self._agents.identify(sandbox, has_booted=True)
            if sandbox.mounts:
                await self._agents.mount_volumes(sandbox, seconds=self._host.boot_seconds)
        except BaseException as error:
            final_error = await add_console(error, self._host, sandbox)
            await clean_up(log, self._host.stop(sandbox))
            if final_error is error:
                raise
            raise final_error from error
        self.start_counts["boot"] += 1

    async def stop_paused_machine(self, sandbox: Sandbox) -> None:
        """Stop the machine of a sandbox that was just paused. Keep its disk if the sandbox resumes from it."""
        if sandbox.pause_snapshot:
            await self._host.discard(sandbox)
        else:
            await self._host.stop(sandbox)

    async def mark_stopped(self, sandbox: Sandbox, reason: str) -> None:
        """Mark a sandbox as paused, because its machine has stopped. It resumes from its own disk."""
        reason = remove_control_characters(reason)
        log.warning("sandbox stopped", sandbox=sandbox.id, reason=reason)
        await self._host.stop(sandbox)
        changes: dict[str, Any] = {"state": SandboxState.PAUSED, "state_reason": reason}
        try:
            await save_sandbox(self._context, sandbox.id, **changes)
        except NotFound:
            raise
        except GatewayError as error:
            # The machine has stopped even if that cannot be saved. The next save of the record includes the state, and
            # after a restart the gateway detects it again.
            log.error("the stop of a sandbox could not be saved", sandbox=sandbox.id, reason=error.message)
            index = self._context.index
            index.put(copy_with_changes(index.get_sandbox(sandbox.id), **changes))
        self._context.events.publish("sandbox.stopped", sandboxID=sandbox.id, reason=reason)

    def mark_if_stopped(self, sandbox: Sandbox) -> None:
        """Mark a sandbox as stopped if its machine stopped before the record was saved as running."""
        if sandbox.state is SandboxState.RUNNING and self._host.find_end_reason(sandbox):
            self._context.background.start(self._mark_stopped_if_current(sandbox.id, sandbox.instance))

    def watch(self) -> None:
        """From now on, mark sandboxes as stopped when their machines stop unexpectedly."""
        self._host.on_exit(self._on_exit)

    def _on_exit(self, instance: str) -> None:
        for sandbox in self._context.index.list_running_sandboxes():
            if sandbox.instance == instance:
                self._context.background.start(self._mark_stopped_if_current(sandbox.id, instance))

    async def _mark_stopped_if_current(self, id: str, instance: str) -> None:
        async with self._locking.sandbox_locked(id) as sandbox:
            if sandbox.instance == instance and sandbox.state is SandboxState.RUNNING:
                await self.mark_stopped(sandbox, self._host.find_end_reason(sandbox) or "its machine stopped")
