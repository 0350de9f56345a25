"""Connection pools, one per machine: connections are closed when the machine stops, even if the sandbox remains.

httpx pools connections by address, which is unsafe here: a new machine may get the address of an old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from datetime import datetime

from sandbox_gateway.api.data_plane.transport import Transport
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import Busy, NotFound
from sandbox_gateway.records import Sandbox, SandboxState

CONNECT_SECONDS = 10.0
MAX_IDLE_CONNECTIONS = 16
IDLE_SECONDS = 30.0
"""Seconds until an idle connection is closed.

Shorter than the agent's idle timeout, so that the agent never closes a connection that is about to be reused.
"""


class MachineConnections:
    """The connections to one machine, which are closed when the machine stops."""

    def __init__(self, sandbox: Sandbox, tls: ssl.SSLContext, engine: Engine) -> None:
        self.key = _build_machine_key(sandbox)
        self._sandbox = sandbox
        self._engine = engine
        self.transport = Transport(tls, max_idle_connections=MAX_IDLE_CONNECTIONS, idle_seconds=IDLE_SECONDS)
        self.end_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the sandbox no longer runs on this machine: current requests cannot complete."""
        self.active_requests = 0

    def is_alive(self) -> bool:
        """Return whether the machine still exists. Its address may be reused even before ``end_future`` is done."""
        return not self.end_future.done() and not self._engine.host.find_end_reason(self._sandbox)

    async def end(self) -> None:
        if not self.end_future.done():
            self.end_future.set_result(None)
        await self.transport.aclose()


class Pools:
    """The connections to all machines that received requests, until the machines stop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Services in sandboxes speak plain HTTP, so the context is never used. Without it, httpcore would create one
        # for each pool.
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._connections_by_sandbox: dict[str, MachineConnections] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._closing_tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def request_counted(self, sandbox: Sandbox) -> Iterator[MachineConnections]:
        """Provide the connections to the machine that ``sandbox`` runs on, for one request.

        Raises Busy if the machine has too many requests.
        """
        connections = self._get_connections(sandbox)
        limit = self._engine.config.limits.connections
        if connections.active_requests >= limit:
            raise Busy(
                f"sandbox {sandbox.id} already has {limit} requests in progress (limits.connections): try again later"
            )
        connections.active_requests += 1
        try:
            yield connections
        finally:
            connections.active_requests -= 1

    def _get_connections(self, sandbox: Sandbox) -> MachineConnections:
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        connections = self._connections_by_sandbox.get(sandbox.id)
        if connections is not None and connections.key == _build_machine_key(sandbox):
            return connections
        self._drop(sandbox.id)
        self._connections_by_sandbox[sandbox.id] = MachineConnections(sandbox, self._tls, self._engine)
        return self._connections_by_sandbox[sandbox.id]

    async def _watch(self) -> None:
        with self._engine.events.subscribed() as events:
            while True:
                await events.get()
                self._drop_stopped_machines()

    def _drop_stopped_machines(self) -> None:
        for id in [
            id for id, connections in self._connections_by_sandbox.items() if not self._is_current(id, connections)
        ]:
            self._drop(id)

    def _is_current(self, id: str, connections: MachineConnections) -> bool:
        try:
            sandbox = self._engine.sandboxes.get(id)
        except NotFound:
            return False
        return sandbox.state is SandboxState.RUNNING and _build_machine_key(sandbox) == connections.key

    def _drop(self, id: str) -> None:
        connections = self._connections_by_sandbox.pop(id, None)
        if connections is not None:
            task = asyncio.create_task(connections.end())
            self._closing_tasks.add(task)
            task.add_done_callback(self._closing_tasks.discard)

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        for id in list(self._connections_by_sandbox):
            self._drop(id)
        await asyncio.gather(*self._closing_tasks, return_exceptions=True)


def _build_machine_key(sandbox: Sandbox) -> tuple[str, datetime]:
    """Return a key that identifies the machine on which a sandbox runs.

    The machine's name is not sufficient: after a stop and a boot from the disk, a new machine has the same name.
    """
    return sandbox.instance, sandbox.started_at
