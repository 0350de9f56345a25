"""The engine: all verbs together, their life from start-up to shutdown, and what happens by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from sandbox_gateway.engine.building import Building
from sandbox_gateway.engine.core import checked, log
from sandbox_gateway.engine.retention import surplus
from sandbox_gateway.engine.secret import load_secret
from sandbox_gateway.engine.spec import EvalResult, ExecResult
from sandbox_gateway.errors import BackendFailed, GatewayError
from sandbox_gateway.hosts.base import Scan, Usage
from sandbox_gateway.printable import printable
from sandbox_gateway.records import NetworkPolicy, OnTimeout, Sandbox, SandboxState, Snapshot, SnapshotKind, now

_TICK = 0.25
_PING_SECONDS = 10
_LOOK_SECONDS = 2
_Result = TypeVar("_Result")


class Engine(Building):
    """Everything a caller can ask of this host. Refs are ids or names; methods raise GatewayError.

    Each verb is capture and fork, in an order in which nothing is lost wherever it is cut off.
    """

    async def open(self) -> None:
        """Take the host, find again what is there, finish or undo what a crash left half-way."""
        await self.host.open()
        self.secret = load_secret(self.config.host.state_root / "secret")
        scan = await self.host.scan()
        for sentence in [*scan.repaired, *self._load(scan)]:
            log.warning("repaired", what=sentence)
        self.host.on_exit(self._machine_ended)
        await self._settle(scan.alive)
        self.spawn(self._watch_timeouts())
        log.info("open", sandboxes=len(self.index.sandboxes), running=len(scan.alive), repaired=len(scan.repaired))

    def _load(self, scan: Scan) -> list[str]:
        self.unreadable_sandboxes = scan.unreadable_sandboxes
        return self.index.load(scan.sandboxes, scan.snapshots, scan.volumes, scan.volume_snapshots)

    async def close(self) -> None:
        """Stop working; sandboxes go on."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.host.close()

    async def _settle(self, alive: set[str]) -> None:
        for sandbox in list(self.index.sandboxes.values()):
            running = sandbox.instance in alive
            if sandbox.state is SandboxState.PAUSED and running:
                await self.retire_paused(sandbox)
            elif sandbox.state is SandboxState.RUNNING and not running:
                await self._mark_stopped(sandbox, "its host went down while it ran")
                if self.config.restart == "start":
                    self.spawn(self._restart(sandbox.id))
            elif running and self.host.guest_mounts(sandbox):
                self.spawn(self.mount_again(sandbox.id))
        owned = {sandbox.pause_snapshot for sandbox in self.index.sandboxes.values()}
        for snapshot in list(self.index.snapshots.values()):
            unowned = snapshot.kind is SnapshotKind.PAUSE and snapshot.id not in owned and not self.unreadable_sandboxes
            if snapshot.kind is SnapshotKind.BASE or unowned:
                await self.remove_snapshot(snapshot)
        await self.collect()

    async def _restart(self, id: str) -> None:
        try:
            await self.resume(id)
        except GatewayError as error:
            log.error("not started again", sandbox=id, reason=error.message)

    def sandboxes(self) -> list[Sandbox]:
        return sorted(self.index.sandboxes.values(), key=lambda each: (each.created_at, each.id))

    def snapshots(self, kinds: Iterable[SnapshotKind] = (SnapshotKind.SNAPSHOT,)) -> list[Snapshot]:
        wanted = set(kinds)
        found = [each for each in self.index.snapshots.values() if each.kind in wanted and not each.hidden]
        return sorted(found, key=lambda each: (each.created_at, each.id))

    def lineage(self, root: str | None = None) -> list[dict[str, Any]]:
        return self.index.lineage(root)

    def places(self, ref: str) -> dict[str, str]:
        """Where the host keeps a snapshot, for people: ``dir``, and ``memory`` and ``vmstate`` where it has them."""
        return self.host.places(self.snapshot(ref))

    def endpoint(self, ref: str) -> tuple[str, str]:
        """(address, access token) of a running sandbox."""
        sandbox = self.awake(ref)
        return self.host.endpoint(sandbox).address, self.access_token(sandbox)

    async def diverged(self, ref: str) -> bool:
        """Has its file system changed since its head? What the guest has not written through yet counts too.

        Raises GatewayError where that cannot be told; Timeout, where its agent is too slow, after two seconds: many
        only look.
        """
        sandbox = self.sandbox(ref)
        head = self.index.snapshots.get(sandbox.head)
        if head is None:
            return True
        if sandbox.state is SandboxState.PAUSED:
            return not sandbox.pause_snapshot or sandbox.pause_snapshot != sandbox.head
        await self.agent(sandbox).call("/sync", {}, seconds=_LOOK_SECONDS)
        return await self.host.diverged(sandbox, head)

    async def usage(self, ref: str) -> Usage:
        sandbox = self.sandbox(ref)
        if sandbox.state is SandboxState.PAUSED:
            return Usage(disk_bytes=0, memory_bytes=0)
        return await self.host.usage(sandbox)

    async def set_timeout(self, ref: str, seconds: float | None) -> None:
        async with self.held(ref) as hold:
            sandbox = self.sandbox(hold)
            sandbox.end_at = self.end_at(seconds)
            sandbox.life = seconds or sandbox.life
            await self.host.save(sandbox)

    async def update(self, ref: str, *, metadata: dict[str, str] | None = None, name: str | None = None) -> Sandbox:
        """Change metadata (as a whole) or name."""
        async with self.held(ref) as hold:
            sandbox = self.sandbox(hold)
            changed = sandbox.model_copy()
            if metadata is not None:
                changed.metadata = metadata
            renamed = name is not None and name != sandbox.name
            if renamed:
                changed.name = checked(name or "")
            with self.index.reserved([changed.name] if renamed else []):
                await self.host.save(changed)
                self.index.put(changed)
            return changed

    async def set_network(self, ref: str, policy: NetworkPolicy) -> None:
        async with self.held(ref) as hold:
            sandbox = self.sandbox(hold)
            if sandbox.state is SandboxState.RUNNING:
                await self.host.apply_network(sandbox, policy)
            sandbox.network = policy
            await self.host.save(sandbox)

    async def exec(
        self,
        ref: str,
        args: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        timeout: float = 60,
        stdin: bytes | None = None,
    ) -> ExecResult:
        sandbox = self.awake(ref)
        command = self.agent(sandbox).exec(args, env=env, cwd=cwd, user=user, timeout=timeout, stdin=stdin)
        return await self._while_it_runs(sandbox, command)

    async def eval(self, ref: str, code: str, *, timeout: float = 60) -> EvalResult:
        """Evaluate Python in the sandbox's own interpreter, whose state is part of its memory."""
        sandbox = self.awake(ref)
        return await self._while_it_runs(sandbox, self.agent(sandbox).eval(code, timeout=timeout))

    async def ping(self, ref: str) -> None:
        """Returns when the sandbox's agent has answered. Raises BackendFailed or Timeout where it does not."""
        sandbox = self.awake(ref)
        await self._while_it_runs(sandbox, self.agent(sandbox).ping(seconds=_PING_SECONDS))

    async def _while_it_runs(self, sandbox: Sandbox, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Wait for ``work`` no longer than the sandbox's machine lives: a dead guest closes no connection."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_TICK)
                if not task.done() and (reason := self.host.ended(sandbox)):
                    raise BackendFailed(f"the sandbox stopped during the command: {reason}")
            return task.result()
        finally:
            task.cancel()

    def _machine_ended(self, instance: str) -> None:
        for sandbox in self.index.sandboxes.values():
            if sandbox.instance == instance and sandbox.state is SandboxState.RUNNING:
                self.spawn(self._lost(sandbox.id, instance))

    async def _lost(self, id: str, instance: str) -> None:
        async with self.held(id) as hold:
            sandbox = self.sandbox(hold)
            if sandbox.instance == instance and sandbox.state is SandboxState.RUNNING:
                await self._mark_stopped(sandbox, self.host.ended(sandbox) or "its machine ended")

    async def _mark_stopped(self, sandbox: Sandbox, reason: str) -> None:
        reason = printable(reason)
        log.warning("stopped", sandbox=sandbox.id, reason=reason)
        await self.host.stop(sandbox)
        sandbox.state, sandbox.state_reason = SandboxState.PAUSED, reason
        await self.host.save(sandbox)
        self.events.publish("sandbox.stopped", sandboxID=sandbox.id, reason=reason)

    async def _watch_timeouts(self) -> None:
        while True:
            await asyncio.sleep(_TICK)
            at = now()
            for sandbox in list(self.index.sandboxes.values()):
                if sandbox.end_at and sandbox.end_at <= at and sandbox.state is SandboxState.RUNNING:
                    await self._expire(sandbox)
            for snapshot in self.snapshots():
                if snapshot.expires_at and snapshot.expires_at <= at and self._unused(snapshot):
                    await self._expire_snapshot(snapshot)
            for snapshot in surplus(self.snapshots(), at):
                if self._unused(snapshot) and await self._expire_snapshot(snapshot):
                    self.events.publish("snapshot.pruned", snapshotID=snapshot.id, sandboxID=snapshot.source_sandbox)

    def _unused(self, snapshot: Snapshot) -> bool:
        return not self.dependents(snapshot) and not self.made_from(self.captures_of(snapshot))

    async def _expire_snapshot(self, snapshot: Snapshot) -> bool:
        """True if it is gone."""
        try:
            return await self.delete_snapshot(snapshot.id)
        except Exception as error:
            _not_expired(error, snapshot=snapshot.id)
            return False

    async def _expire(self, sandbox: Sandbox) -> None:
        verb: Callable[[str], Awaitable[None]] = self.pause if sandbox.on_timeout is OnTimeout.PAUSE else self.kill
        try:
            await verb(sandbox.id)
        except Exception as error:
            _not_expired(error, sandbox=sandbox.id)
            await asyncio.sleep(_TICK)


def _not_expired(error: Exception, **what: str) -> None:
    """Whatever is wrong with one, the time of all others runs out all the same."""
    if isinstance(error, GatewayError):
        log.warning("expiry failed", reason=error.message, **what)
    else:
        log.error("expiry failed", exc_info=True, **what)
