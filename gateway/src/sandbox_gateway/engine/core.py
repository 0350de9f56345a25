"""What every verb stands on: the host, the index, locks, events, and work that outlives its request."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any, TypeVar

from sandbox_gateway.config import Config
from sandbox_gateway.engine.agent import AgentClient
from sandbox_gateway.engine.events import Events
from sandbox_gateway.engine.index import Index, Thing
from sandbox_gateway.engine.locks import Locks
from sandbox_gateway.errors import Conflict, GatewayError, Invalid
from sandbox_gateway.hosts.base import Host
from sandbox_gateway.log import Logger
from sandbox_gateway.records import (
    NetworkPolicy,
    Sandbox,
    SandboxState,
    Snapshot,
    SnapshotKind,
    Volume,
    VolumeSnapshot,
    check_name,
)

log = Logger("engine")
T = TypeVar("T")


class Core:
    """Shared by all verbs."""

    def __init__(self, host: Host, config: Config) -> None:
        self.host = host
        self.config = config
        self.events = Events()
        self.index = Index()
        self.locks = Locks(config.limits.lock_seconds)
        self.secret = b""
        self.unreadable_sandboxes: list[str] = []
        """What they own or stand on is not known: nothing that may be theirs is removed as unused."""
        self._background: set[asyncio.Task[Any]] = set()

    def sandbox(self, ref: str) -> Sandbox:
        return self.index.sandbox(ref)

    def snapshot(self, ref: str) -> Snapshot:
        return self.index.snapshot(ref)

    def dependents(self, snapshot: Snapshot) -> list[Sandbox]:
        """The sandboxes that keep a snapshot from being deleted."""
        if self.host.abilities.independent_snapshots:
            standing = self.index.standing_on(snapshot)
            return [each for each in standing if snapshot.id in (each.forked_from, each.pause_snapshot)]
        return self.index.standing_on(snapshot)

    def captures_of(self, snapshot: Snapshot) -> list[VolumeSnapshot]:
        """What a snapshot of a sandbox holds of volumes."""
        ids = (capture.snapshot for capture in snapshot.volumes)
        return [self.index.volume_snapshots[id] for id in ids if id in self.index.volume_snapshots]

    def made_from(self, snapshots: Iterable[VolumeSnapshot]) -> list[Volume]:
        """The volumes that keep snapshots of volumes from being deleted."""
        if self.host.abilities.independent_snapshots:
            return []
        ids = {snapshot.id for snapshot in snapshots}
        return [volume for volume in self.index.volumes.values() if volume.from_snapshot in ids]

    def busy(self, snapshot: Snapshot) -> bool:
        """Is something being made of a snapshot, or of what it holds of volumes?"""
        return self.index.in_use(snapshot) or any(map(self.index.in_use, self.captures_of(snapshot)))

    def access_token(self, sandbox: Sandbox) -> str:
        """The token that the sandbox's agent asks for."""
        return self.secret_of(sandbox.id)

    def secret_of(self, what: str) -> str:
        """A secret of that thing alone: made from its name, always the same, kept nowhere."""
        return hmac.new(self.secret, what.encode(), hashlib.sha256).hexdigest()

    @contextlib.asynccontextmanager
    async def held(self, ref: str) -> AsyncIterator[str]:
        """Hold the sandbox for one change; yields its id, to be looked up anew: it may have changed meanwhile."""
        sandbox = self.sandbox(ref)
        async with self.locks.hold(sandbox.id, f"sandbox {sandbox.id}"):
            yield sandbox.id

    def awake(self, ref: str) -> Sandbox:
        sandbox = self.sandbox(ref)
        if sandbox.state is SandboxState.PAUSED:
            raise Conflict(f"sandbox {sandbox.id} is paused: resume it first")
        if reason := self.host.ended(sandbox):
            raise Conflict(f"sandbox {sandbox.id} does not run ({reason}): resume it, or roll it back")
        return sandbox

    def agent(self, sandbox: Sandbox) -> AgentClient:
        return AgentClient(self.host.endpoint(sandbox), self.access_token(sandbox))

    def name_servers(self, policy: NetworkPolicy) -> list[str]:
        return self.host.name_servers() if policy.allow_internet or policy.allow_out else []

    def _progress(self, type: str, operation: str, done: int, total: int, sandbox_id: str) -> None:
        if operation:
            self.events.publish(type, operation=operation, done=done, total=total, sandboxID=sandbox_id)

    def spawn(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._reaped)

    def _reaped(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("background work failed", reason=str(error) or type(error).__name__)

    async def remove_snapshot(self, snapshot: Snapshot) -> None:
        self.index.drop(snapshot.id)
        try:
            await asyncio.shield(self.host.remove_snapshot(snapshot))
        except BaseException:
            self.index.put(snapshot)
            raise
        if not snapshot.hidden:
            self.events.publish("snapshot.deleted", snapshotID=snapshot.id)
        for capture in self.captures_of(snapshot):
            try:
                await asyncio.shield(self.remove_volume_snapshot(capture))
            except GatewayError as error:
                log.warning("not removed", volume_snapshot=capture.id, reason=error.message)

    async def remove_volume_snapshot(self, snapshot: VolumeSnapshot) -> None:
        self.index.drop(snapshot.id)
        try:
            await self.host.remove_volume_snapshot(snapshot)
        except BaseException:
            self.index.put(snapshot)
            raise

    async def collect(self) -> None:
        """Remove hidden snapshots that nobody stands on any more."""
        for snapshot in list(self.index.snapshots.values()):
            if not snapshot.doomed and snapshot.kind is not SnapshotKind.TRANSIENT:
                continue
            heads = (sandbox.head for sandbox in self.index.sandboxes.values())
            if self.index.standing_on(snapshot) or (not snapshot.doomed and snapshot.id in heads):
                continue
            if self.busy(snapshot) or self.made_from(self.captures_of(snapshot)):
                continue
            try:
                await self.remove_snapshot(snapshot)
            except GatewayError as error:
                log.warning("not collected", snapshot=snapshot.id, reason=error.message)


def called(things: Iterable[Thing]) -> str:
    """Their names, for a sentence."""
    return ", ".join((*each.names, each.id)[0] if isinstance(each, Snapshot) else each.name for each in things)


async def to_the_end(work: Awaitable[T]) -> T:
    """Finish ``work`` even when whoever waits for it is cancelled; the cancellation follows when it is done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def checked(name: str) -> str:
    try:
        return check_name(name)
    except ValueError as error:
        raise Invalid(str(error)) from None
