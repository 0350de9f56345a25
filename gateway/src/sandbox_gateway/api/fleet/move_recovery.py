"""Complete or undo the moves of sandboxes that were interrupted, such as by the end of a gateway.

etcd says which of the two hosts has the sandbox. If etcd has lost its data, the target has it if it has adopted it.
"""

from __future__ import annotations

import asyncio

from sandbox_gateway.api.fleet.move_requests import MoveClient
from sandbox_gateway.engine.engine import Engine
from sandbox_gateway.errors import GatewayError, Unavailable
from sandbox_gateway.fleet.fleet import Fleet
from sandbox_gateway.fleet.records import MoveRecord
from sandbox_gateway.log import Logger

_RETRY_SECONDS = 2.0

log = Logger("fleet")


class MoveRecovery:
    def __init__(self, fleet: Fleet, engine: Engine) -> None:
        self._fleet = fleet
        self._engine = engine
        self._moves = engine.moves
        self._client = MoveClient(fleet.peers)
        self.active_ids: set[str] = set()
        """Ids of the sandboxes whose moves are carried out now, which this class leaves alone."""
        self.has_stale_keys = True
        """Whether etcd may have moves from this host that are complete."""
        self._reported_ids: set[str] = set()

    async def watch(self) -> None:
        """Resolve the moves that were interrupted. Never returns."""
        await self._fleet.view.loaded.wait()
        index = self._engine.index
        while True:
            for id in {*index.departing_ids, *index.arrivals} - self.active_ids:
                await self.try_to_resolve(id)
            await self._try_to_forget_first_passes()
            if self.has_stale_keys:
                await self._try_to_forget_stale_keys()
            await asyncio.sleep(_RETRY_SECONDS)

    async def try_to_resolve(self, id: str) -> None:
        """Resolve an interrupted move of a sandbox, unless that is not possible yet."""
        self.active_ids.add(id)
        try:
            if id in self._engine.index.arrivals:
                await self._resolve_arrival(id)
            else:
                await self.resolve_departure(id)
            self._reported_ids.discard(id)
        except GatewayError as error:
            self._report(id, error.message)
        except Exception:
            log.error("an interrupted move could not be resolved", sandbox=id, exc_info=True)
        finally:
            self.active_ids.discard(id)

    def _report(self, id: str, reason: str) -> None:
        """Log once why a move is not resolved yet."""
        if id not in self._reported_ids:
            self._reported_ids.add(id)
            log.warning("an interrupted move waits", sandbox=id, reason=reason)

    async def _try_to_forget_first_passes(self) -> None:
        """Remove the first passes of moves that have ended before their sandboxes arrived here."""
        first_passes = self._moves.first_passes
        try:
            for id, move in first_passes.list_received():
                if id not in self.active_ids and await self._find(id, move) is None:
                    await first_passes.forget(id, move)
        except GatewayError as error:
            self._report("first passes", error.message)
        except Exception:
            log.error("first passes could not be removed", exc_info=True)

    async def _try_to_forget_stale_keys(self) -> None:
        try:
            for id, move in (await self._fleet.moves.list_of_source(self._fleet.name)).items():
                if id not in self.active_ids and id not in self._engine.index.departing_ids:
                    await self._fleet.moves.forget(id, move)
            self.has_stale_keys = False
        except GatewayError as error:
            self._report("", error.message)

    # -- the source -------------------------------------------------------------------------------------------------

    async def resolve_departure(self, id: str) -> bool:
        """Abort the move of a departing sandbox, or complete it if it is committed. Returns whether it has left.

        Raises GatewayError if that cannot be decided at the moment.
        """
        sandbox = self._engine.index.get_sandbox(id)
        assert sandbox.departure is not None
        move = MoveRecord(id=sandbox.departure.move, source=self._fleet.name, target=sandbox.departure.target)
        names = [sandbox.name]
        found = await self._find(id, move.id)
        if found is not None and found.state == "begun":
            await self._fleet.moves.abort(id, found)
            found = await self._find(id, move.id)
        has_left = await self._has_left(id, move, found)
        if has_left:
            self._fleet.moves.see_commit(id, move, names)
            await self._moves.complete_departure(id, move.id)
        else:
            if (
                found is not None
                and found.state != "aborted"
                and not await self._fleet.moves.give_back(id, found, names)
            ):
                raise Unavailable("the move has just changed")
            await self._moves.take_back(id, move.id, f"its move to host {move.target} failed")
        if found is not None:
            await self.try_to_forget(id, move.id)
        return has_left

    async def _has_left(self, id: str, move: MoveRecord, found: MoveRecord | None) -> bool:
        """Return whether the target of a move has the sandbox. ``found``: the move in etcd. Raises GatewayError.

        If it has not, nothing of the sandbox remains there.
        """
        if move.target not in self._fleet.view.hosts or (found is not None and found.state == "aborted"):
            return False
        progress = await self._client.ask_target(id, move)
        if progress == "adopted":
            return True
        if found is None:
            await self._client.discard(id, move)
            return False
        if progress == "arriving":
            raise Unavailable(f"host {move.target!r} has got the sandbox, but has not created it yet")
        # The sandbox was deleted after its move, or the target has lost what it had got.
        return found.state == "adopted"

    async def _find(self, id: str, move: str) -> MoveRecord | None:
        found = await self._fleet.moves.find(id)
        return found if found is not None and found.id == move else None

    async def try_to_forget(self, id: str, move: str) -> None:
        """Remove the key of a move, or let ``watch`` do it later."""
        try:
            if (found := await self._find(id, move)) is not None:
                await self._fleet.moves.forget(id, found)
        except GatewayError as error:
            self.has_stale_keys = True
            log.warning("the key of a move could not be removed", sandbox=id, reason=error.message)

    # -- the target -------------------------------------------------------------------------------------------------

    async def _resolve_arrival(self, id: str) -> None:
        """Adopt an arriving sandbox if its move is committed, and remove it if it is aborted. Raises GatewayError."""
        sandbox = self._engine.index.arrivals[id]
        assert sandbox.arrival is not None
        arrival = sandbox.arrival
        move = MoveRecord(id=arrival.move, source=arrival.source, target=self._fleet.name)
        found = await self._find(id, move.id)
        is_source_gone = arrival.source not in self._fleet.view.hosts
        if found is not None and found.state == "begun":
            if not is_source_gone:
                return  # The source aborts it.
            await self._fleet.moves.commit(id, found, [sandbox.name])
            found = await self._find(id, move.id)
        has_sandbox = found.state != "aborted" if found is not None else is_source_gone
        if found is None and not is_source_gone and await self._client.is_departing(id, move.id, arrival.source):
            return  # The source asks for it to be removed.
        if has_sandbox:
            await self._moves.adopt(id, move.id, must_start=False)
            if found is not None and found.state == "committed":
                await self._fleet.moves.confirm(id, found)
        else:
            await self._moves.discard_arrival(id, move.id)
