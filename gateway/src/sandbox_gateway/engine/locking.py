"""Locks on sandboxes and volumes.

Locks are taken in this order: sandboxes before volumes, volumes by id. Mounting a volume takes a shared lock, which
is blocked only by a change in progress.

Objects are protected in four ways:

* The locks of this module allow one change of a sandbox or volume at a time.
* ``record_changes.record_locked`` serializes the writes of one record, and its removal.
* ``Index.reserved`` keeps a name free for an object that is being created.
* ``Index.pinned`` prevents the removal of an object while a request uses it. ``Collector.pinned_then_collected`` does
  the same for snapshots, and removes those that have become unused when the request ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable

from sandbox_gateway.engine.context import Context, require_not_departing
from sandbox_gateway.records import Sandbox, Volume


class Locking:
    """The locks on sandboxes and volumes. Each context manager reads the records after it has acquired the lock."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._index = context.index
        self._locks = context.locks

    @contextlib.asynccontextmanager
    async def sandbox_locked(self, ref: str) -> AsyncIterator[Sandbox]:
        """Lock a sandbox for a change. Raises Busy if it is being moved to another host."""
        async with self.departing_sandbox_locked(ref) as sandbox:
            require_not_departing(sandbox)
            yield sandbox

    @contextlib.asynccontextmanager
    async def departing_sandbox_locked(self, ref: str) -> AsyncIterator[Sandbox]:
        """Lock a sandbox that may be moving to another host."""
        id = self._index.get_sandbox(ref).id
        async with self._locks.held(id, f"sandbox {id}"):
            yield self._index.get_sandbox(id)

    @contextlib.asynccontextmanager
    async def running_sandbox_locked(self, ref: str) -> AsyncIterator[Sandbox]:
        """Lock a sandbox for a change. Raises Conflict if it is not running."""
        async with self.sandbox_locked(ref) as sandbox:
            yield self._context.require_running(sandbox.id)

    @contextlib.asynccontextmanager
    async def volumes_locked(self, refs: Iterable[str]) -> AsyncIterator[list[Volume]]:
        """Lock volumes for a change that affects all of them. Yields each volume once."""
        volumes = {volume.id: volume for volume in map(self._index.get_volume, refs)}
        async with contextlib.AsyncExitStack() as stack:
            for id in sorted(volumes):
                await stack.enter_async_context(self._locks.held(id, f"volume {volumes[id].name}"))
            yield [self._index.get_volume(id) for id in volumes]

    @contextlib.asynccontextmanager
    async def volumes_shared(self, ids: Iterable[str]) -> AsyncIterator[None]:
        """Wait until the volumes are not being changed, and prevent changes to them inside this context."""
        with contextlib.ExitStack() as stack:
            for id in ids:
                async with self.volumes_locked([id]) as (volume,):
                    stack.enter_context(self._index.pinned(volume))
            yield

    @contextlib.asynccontextmanager
    async def mounts_shared(self, sandbox: Sandbox) -> AsyncIterator[None]:
        """Apply ``volumes_shared`` to the volumes that ``sandbox`` mounts, except missing volumes."""
        async with self.volumes_shared([each.volume for each in sandbox.mounts if each.volume in self._index.volumes]):
            yield
