"""Fork: n sandboxes of a snapshot, all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType

from sandbox_gateway.engine.agent import Identity
from sandbox_gateway.engine.core import checked
from sandbox_gateway.engine.spec import ForkSpec, Unset
from sandbox_gateway.engine.volumes import Volumes
from sandbox_gateway.errors import GatewayError, Invalid, OverQuota, Unsupported
from sandbox_gateway.records import (
    Memory,
    Resources,
    Sandbox,
    SandboxState,
    Snapshot,
    SnapshotKind,
    Volume,
    new_id,
    now,
)

_LONGEST_SECONDS = 100 * 366 * 86400


class Forking(Volumes):
    """Verbs that make sandboxes."""

    _making = 0

    async def create(self, ref: str, spec: ForkSpec) -> Sandbox:
        if spec.idempotency_key:
            for sandbox in self.index.sandboxes.values():
                if sandbox.idempotency_key == spec.idempotency_key:
                    return sandbox
        (made,) = await self.fork(ref, spec)
        if isinstance(made, GatewayError):
            raise made
        return made

    async def fork(self, ref: str, spec: ForkSpec) -> list[Sandbox | GatewayError]:
        """Make ``spec.count`` sandboxes of a snapshot or template: all, or none and the first error."""
        return await self.fork_snapshot(self.snapshot(ref), spec)

    async def fork_snapshot(self, snapshot: Snapshot, spec: ForkSpec) -> list[Sandbox | GatewayError]:
        sandboxes = [self._planned(snapshot, spec, name) for name in wanted_names(spec)]
        with_memory = self._with_memory(snapshot, spec, sandboxes[0].resources)
        wanted = self.wanted_mounts(snapshot, spec.mounts)
        self._admit(len(sandboxes))
        with self.index.reserved(sandbox.name for sandbox in sandboxes), self.index.using(snapshot):
            self._making += len(sandboxes)
            try:
                if not wanted:
                    return await self._make(snapshot, spec, sandboxes, with_memory)
                async with self.mounting(wanted, sandboxes) as clones:
                    return await self._make(snapshot, spec, sandboxes, with_memory, clones)
            finally:
                self._making -= len(sandboxes)

    async def _make(
        self,
        snapshot: Snapshot,
        spec: ForkSpec,
        sandboxes: list[Sandbox],
        with_memory: bool,
        clones: Mapping[str, list[Volume]] = MappingProxyType({}),
    ) -> list[Sandbox | GatewayError]:
        gate = asyncio.Semaphore(spec.concurrency or self.config.limits.concurrency)
        done = 0

        async def one(sandbox: Sandbox) -> Sandbox:
            nonlocal done
            async with gate:
                if sandbox.id in clones:
                    await self.make_clones(clones[sandbox.id])
                await self.embody(snapshot, sandbox, with_memory=with_memory)
            done += 1
            self._progress("fork.progress", spec.operation, done, len(sandboxes), sandbox.id)
            return sandbox

        tasks = [asyncio.create_task(one(sandbox)) for sandbox in sandboxes]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION if spec.atomic else asyncio.ALL_COMPLETED)
        except asyncio.CancelledError:
            await asyncio.shield(self._unmake(tasks, sandboxes))
            raise
        failed = [error for task in tasks if task.done() and (error := task.exception())]
        if failed and spec.atomic:
            await asyncio.shield(self._unmake(tasks, sandboxes))
            raise failed[0]
        if bug := next((error for error in failed if not isinstance(error, GatewayError)), None):
            await asyncio.shield(self._unmake(tasks, sandboxes))
            raise bug
        made = [task.result() for task in tasks if task.exception() is None]
        await asyncio.shield(self._commit(made))
        answers = (task.exception() or task.result() for task in tasks)
        return [answer for answer in answers if isinstance(answer, Sandbox | GatewayError)]

    async def embody(self, snapshot: Snapshot, sandbox: Sandbox, *, with_memory: bool) -> None:
        """Start a machine for a sandbox and tell it who it is; nothing is left of it on failure."""
        if sandbox.state is SandboxState.PAUSED:
            return
        try:
            await self.host.fork(snapshot, sandbox, with_memory=with_memory)
            await self.identify(sandbox, booted=not with_memory)
            if sandbox.mounts or snapshot.mounts:
                stale = with_memory and bool(snapshot.mounts)
                await self.mount_inside(sandbox, stale=stale, seconds=self.host.boot_seconds)
        except BaseException:
            await asyncio.shield(self.host.discard(sandbox))
            raise

    async def identify(self, sandbox: Sandbox, *, booted: bool) -> None:
        identity = Identity(
            sandbox_id=sandbox.id,
            hostname=sandbox.hostname,
            access_token=self.access_token(sandbox),
            env=sandbox.env,
            dns=self.name_servers(sandbox.network),
            grow_disk=booted,
        )
        seconds = self.host.boot_seconds if booted else self.host.resume_seconds
        await self.agent(sandbox).identify(identity, seconds=seconds, gone=partial(self.host.ended, sandbox))

    async def _commit(self, sandboxes: list[Sandbox]) -> None:
        saved: list[Sandbox] = []
        try:
            for sandbox in sandboxes:
                await self.host.save(sandbox)
                saved.append(sandbox)
        except BaseException:
            for sandbox in sandboxes:
                await self.host.remove(sandbox)
            raise
        for sandbox in saved:
            self.index.put(sandbox)
            self.events.publish(
                "sandbox.created", sandboxID=sandbox.id, name=sandbox.name, forkedFrom=sandbox.forked_from
            )

    async def _unmake(self, tasks: list[asyncio.Task[Sandbox]], sandboxes: list[Sandbox]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sandbox in sandboxes:
            await self.host.remove(sandbox)

    def _planned(self, snapshot: Snapshot, spec: ForkSpec, name: str) -> Sandbox:
        have = snapshot.resources
        id = new_id()
        started = now()
        return Sandbox(
            id=id,
            name=name or id,
            state=SandboxState.PAUSED if spec.paused else SandboxState.RUNNING,
            pause_snapshot=snapshot.id if spec.paused else "",
            cold_start=spec.paused and spec.cold_start,
            template_id=_template_of(snapshot),
            forked_from=snapshot.id,
            head=snapshot.id,
            base=snapshot.id,
            parent_sandbox=snapshot.source_sandbox,
            resources=Resources(
                cpus=spec.cpus or have.cpus,
                memory_mb=spec.memory_mb or have.memory_mb,
                disk_mb=spec.disk_mb or have.disk_mb,
            ),
            network=spec.network,
            metadata=spec.metadata,
            env=spec.env,
            created_at=started,
            started_at=started,
            end_at=self.end_at(spec.timeout),
            life=None if isinstance(spec.timeout, Unset) else spec.timeout or None,
            on_timeout=spec.on_timeout,
            auto_resume=spec.auto_resume,
            idempotency_key=spec.idempotency_key,
        )

    def _with_memory(self, snapshot: Snapshot, spec: ForkSpec, wanted: Resources) -> bool:
        have = snapshot.resources
        if wanted.disk_mb < have.disk_mb:
            raise Invalid(f"a disk of {wanted.disk_mb} MiB is smaller than the snapshot's {have.disk_mb} MiB")
        if snapshot.memory is Memory.NONE or spec.cold_start:
            return False
        if wanted != have and not self.host.abilities.resize_on_fork:
            raise Unsupported(
                f"snapshot {snapshot.id} holds the memory of a machine with {have.cpus} cpus, {have.memory_mb} MiB of "
                f"memory and a disk of {have.disk_mb} MiB: fork it with the same, or ask for a cold start (coldStart) "
                "from its disk"
            )
        return True

    def _admit(self, count: int) -> None:
        cap = self.config.limits.sandboxes
        if len(self.index.sandboxes) + self._making + count > cap:
            raise OverQuota(f"this host keeps at most {cap} sandboxes (limits.sandboxes): remove some first")

    def end_at(self, timeout: float | Unset | None) -> datetime | None:
        """When a life of ``timeout`` seconds ends; None: never."""
        if isinstance(timeout, Unset):
            timeout = self.config.limits.timeout_seconds or None
        if timeout is not None and not 0 <= timeout <= _LONGEST_SECONDS:
            raise Invalid(f"a timeout of {timeout:g} s is not possible: give 0 or more, at most {_LONGEST_SECONDS}")
        return None if timeout is None else now() + timedelta(seconds=timeout)


def _template_of(snapshot: Snapshot) -> str:
    return snapshot.id if snapshot.kind is SnapshotKind.TEMPLATE else snapshot.template_id


def wanted_names(spec: ForkSpec) -> list[str]:
    if spec.names is not None:
        if spec.count not in (1, len(spec.names)):
            raise Invalid(f"{len(spec.names)} names do not fit a count of {spec.count}: give one of them, or as many")
        return [checked(name) for name in spec.names]
    if not 1 <= spec.count <= 1000:
        raise Invalid(f"a count of {spec.count} is not possible: ask for 1 to 1000")
    return [""] * spec.count
