"""Send most of the data of a sandbox that moves while it still runs: the first pass of the move.

The source captures the running sandbox, and sends this capture. After it has paused the sandbox, it sends only what
differs from the capture. Both gateways remember the capture only in memory: without it, all data is sent in the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from sandbox_gateway.engine.captures import Captures
from sandbox_gateway.engine.collector import Collector
from sandbox_gateway.engine.context import Context
from sandbox_gateway.engine.locking import Locking
from sandbox_gateway.engine.room import RoomMonitor
from sandbox_gateway.engine.transfer.transfers import Export, HiddenImport, Transfers
from sandbox_gateway.errors import NotFound
from sandbox_gateway.records import Snapshot, SnapshotKind
from sandbox_gateway.tasks import finish_despite_cancellation

_MAX_HOLD_SECONDS = 600.0
"""How long a target keeps a first pass whose move neither continues nor ends, because its source has died."""


@dataclass(frozen=True)
class _Received:
    move: str
    stack: contextlib.ExitStack
    """Prevents the removal of the capture's copy on this host."""


class FirstPasses:
    def __init__(
        self,
        context: Context,
        locking: Locking,
        collector: Collector,
        captures: Captures,
        room: RoomMonitor,
        transfers: Transfers,
    ) -> None:
        self._context = context
        self._index = context.index
        self._locking = locking
        self._collector = collector
        self._captures = captures
        self._room = room
        self._transfers = transfers
        self._sent: dict[tuple[str, str], Snapshot] = {}
        """The captures of sandboxes that leave this host, by the id of the sandbox and that of the move."""
        self._received: dict[str, _Received] = {}
        """The first passes of sandboxes that are to arrive, by the id of the sandbox."""

    # -- the source -------------------------------------------------------------------------------------------------

    @property
    def can_send(self) -> bool:
        """Whether this host can send what differs from any other snapshot."""
        return self._context.host.abilities.any_transfer_base

    @contextlib.asynccontextmanager
    async def captured(self, id: str, move: str, *, memory: bool) -> AsyncIterator[Snapshot]:
        """Capture a running sandbox, and keep the capture inside this context.

        Raises GatewayError, for example NoSpace if there is no room for a second capture, when it is paused.
        """
        try:
            async with self._locking.running_sandbox_locked(id) as sandbox:
                snapshot = self._captures.create_snapshot_record(sandbox, SnapshotKind.TRANSIENT)
                with contextlib.ExitStack() as stack:
                    stack.enter_context(self._index.pinned(snapshot))
                    snapshot = await finish_despite_cancellation(
                        self._captures.capture_state(sandbox, snapshot, memory=memory)
                    )
                    await self._room.require_room_for_capture(sandbox, memory=self._context.host.abilities.memory)
                    pin = stack.pop_all()
            with pin:
                self._sent[id, move] = snapshot
                try:
                    yield snapshot
                finally:
                    del self._sent[id, move]
        finally:
            await finish_despite_cancellation(self._collector.collect())

    async def export(self, id: str, move: str, *, memory: bool) -> Export:
        """Open the capture of a sandbox for an export. Raises NotFound."""
        return await self._transfers.export_hidden(self.find_sent(id, move), memory=memory)

    def find_sent(self, id: str, move: str) -> str:
        """Return the id of the capture of a sandbox. Raises NotFound."""
        snapshot = self._sent.get((id, move))
        if snapshot is None:
            raise NotFound("first pass", move)
        return snapshot.id

    # -- the target -------------------------------------------------------------------------------------------------

    async def receive(self, id: str, move: str, pieces: AsyncIterator[bytes]) -> None:
        """Import the capture of a sandbox, and keep it until ``forget``."""

        async def keep(snapshot: Snapshot) -> None:
            await self.forget(id)
            stack = contextlib.ExitStack()
            stack.enter_context(self._index.pinned(snapshot))
            timer = asyncio.get_running_loop().call_later(
                _MAX_HOLD_SECONDS, lambda: self._context.background.start(self.forget(id, move))
            )
            stack.callback(timer.cancel)
            self._received[id] = _Received(move, stack)

        await self._transfers.import_(pieces, hidden=HiddenImport(SnapshotKind.TRANSIENT, keep))

    def list_received(self) -> list[tuple[str, str]]:
        """Return the ids of the sandbox and of the move of each first pass that this host keeps."""
        return [(id, received.move) for id, received in self._received.items()]

    def has_received(self, id: str, move: str) -> bool:
        received = self._received.get(id)
        return received is not None and received.move == move

    async def forget(self, id: str, move: str = "") -> None:
        """Remove the first pass of a sandbox, or only that of one move."""
        received = self._received.get(id)
        if received is None or move not in ("", received.move):
            return
        del self._received[id]
        received.stack.close()
        await self._collector.collect()
