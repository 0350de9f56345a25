"""Moves of sandboxes between hosts, in etcd: for each, which of the two hosts has the sandbox.

The source writes that a move has begun. The target commits it, in one transaction with the names and the id of the
sandbox, or the source aborts it. The first of the two counts. A target that cannot start the sandbox gives it back in
one transaction. Otherwise, it writes that it has adopted the sandbox: until then, the source may take it back from a
target that has lost it. The source removes the key when nothing depends on it any longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sandbox_gateway.errors import Busy
from sandbox_gateway.fleet import store as etcd
from sandbox_gateway.fleet.keys import Keys
from sandbox_gateway.fleet.records import MoveRecord, MoveState, ObjectRecord
from sandbox_gateway.fleet.store import Change, Operation, Store
from sandbox_gateway.fleet.view import FleetView


class MoveDirectory:
    def __init__(self, store: Store, keys: Keys, view: FleetView) -> None:
        self._store = store
        self._keys = keys
        self._view = view

    async def begin(self, sandbox: str, move: MoveRecord) -> None:
        """Write that a move has begun. Raises Busy if there is another move of the sandbox, or StoreUnavailable."""
        key = self._keys.move(sandbox)
        if not (await self._store.transact([etcd.is_absent(key)], [etcd.put(key, move.dump())])).succeeded:
            raise Busy(f"an earlier move of sandbox {sandbox} is not complete: try again later")

    async def find(self, sandbox: str) -> MoveRecord | None:
        """Return the move of a sandbox, or None if there is none. Raises StoreUnavailable."""
        key = self._keys.move(sandbox)
        entries = (await self._store.transact([], [etcd.read(key)])).entries
        return next((MoveRecord.try_parse(entry.value) for entry in entries if entry.key == key), None)

    async def list_of_source(self, source: str) -> dict[str, MoveRecord]:
        """Return the moves from a host, by the id of their sandbox. Raises StoreUnavailable."""
        entries, _ = await self._store.load(self._keys.moves)
        moves = {entry.key.removeprefix(self._keys.moves): MoveRecord.try_parse(entry.value) for entry in entries}
        return {id: move for id, move in moves.items() if move is not None and move.source == source}

    async def abort(self, sandbox: str, move: MoveRecord) -> bool:
        """Abort a move that has begun, unless it is committed. Returns whether it is aborted.

        Raises StoreUnavailable.
        """
        return await self._change(sandbox, move, "aborted", [])

    async def commit(self, sandbox: str, move: MoveRecord, names: Sequence[str]) -> bool:
        """Give a sandbox with these names to the target, unless the move is aborted. Returns whether it got it.

        Raises StoreUnavailable. The target may then have got it.
        """
        return await self._change(
            sandbox, move, "committed", [*self._hand_over(sandbox, names, move.source, move.target)]
        )

    async def give_back(self, sandbox: str, move: MoveRecord, names: Sequence[str]) -> bool:
        """Give a sandbox back to the source, which it has left. Returns whether the source got it.

        ``move``: a move that is committed or adopted. Raises StoreUnavailable, like ``commit``.
        """
        return await self._change(
            sandbox, move, "aborted", [*self._hand_over(sandbox, names, move.target, move.source)]
        )

    async def confirm(self, sandbox: str, move: MoveRecord) -> None:
        """Write that the target has adopted a sandbox whose move is committed. Raises StoreUnavailable."""
        await self._change(sandbox, move, "adopted", [])

    async def forget(self, sandbox: str, move: MoveRecord) -> None:
        """Remove the key of a move. Raises StoreUnavailable."""
        key = self._keys.move(sandbox)
        await self._store.transact([etcd.has_value(key, move.dump())], [etcd.delete(key)])

    def see_commit(self, sandbox: str, move: MoveRecord, names: Sequence[str]) -> None:
        """Let the view know of a commit, which its watch may report later."""
        for change in self._hand_over(sandbox, names, move.source, move.target):
            self._view.apply(change)

    async def _change(self, sandbox: str, move: MoveRecord, state: MoveState, changes: Sequence[Change]) -> bool:
        """Give a move a new state, together with ``changes``, if it has not changed. Returns whether it now has it."""
        key = self._keys.move(sandbox)
        new_value = move.model_copy(update={"state": state}).dump()
        operations = [etcd.put(key, new_value), *map(_create_operation, changes)]
        outcome = await self._store.transact([etcd.has_value(key, move.dump())], operations, [etcd.read(key)])
        if not outcome.succeeded:
            # A repeated request changes nothing.
            return any(entry.key == key and entry.value == new_value for entry in outcome.entries)
        for change in changes:
            self._view.apply(change)
        return True

    def _hand_over(self, sandbox: str, names: Sequence[str], source: str, target: str) -> Iterator[Change]:
        value = ObjectRecord(kind="sandbox", id=sandbox).dump()
        for ref in dict.fromkeys((sandbox, *names)):
            yield Change(self._keys.object(ref, source), None)
            yield Change(self._keys.object(ref, target), value)


def _create_operation(change: Change) -> Operation:
    return etcd.delete(change.key) if change.value is None else etcd.put(change.key, change.value)
