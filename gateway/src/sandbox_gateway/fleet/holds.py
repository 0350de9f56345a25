"""Forks on several hosts, which create either all sandboxes or none.

Each host starts its share, and then holds back the commit. When all shares run, the gateway that has received the
request writes in etcd that they are committed, and tells the hosts. A host that hears nothing, because that gateway has
died or the connection has ended, asks etcd: it commits its share if that was decided, and otherwise decides itself
that the fork is aborted. The first of the two decisions counts, for all hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sandbox_gateway.errors import Conflict, GatewayError, NotFound
from sandbox_gateway.fleet import store as etcd
from sandbox_gateway.fleet.keys import Keys
from sandbox_gateway.fleet.store import Store
from sandbox_gateway.log import Logger
from sandbox_gateway.tasks import finish_despite_cancellation

_DECISION_SECONDS = 86_400
"""How long etcd keeps a decision. A host that is cut off waits with its share for at most this time."""
_HOLD_SECONDS = 120.0
"""How long a share waits before its host decides."""
_ARRIVAL_SECONDS = 2.0
"""How long a question about a share waits for the share. The two are sent at the same time."""
_RETRY_SECONDS = 1.0
_COMMIT, _ABORT = b"commit", b"abort"

log = Logger("fleet")


class _Hold:
    def __init__(self) -> None:
        self.has_arrived = asyncio.Event()
        self.is_ready = asyncio.Event()
        """Set when the share runs, or has failed."""
        self.has_failed = False
        self.is_released = asyncio.Event()


class Holds:
    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._holds: dict[str, _Hold] = {}

    # -- the host of a share ----------------------------------------------------------------------------------------

    async def run(self, id: str, work: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]) -> None:
        """Carry out a share. ``work`` gets the gate that it awaits before its commit."""
        hold = self._holds.setdefault(id, _Hold())
        hold.has_arrived.set()

        async def gate() -> None:
            hold.is_ready.set()
            try:
                async with asyncio.timeout(_HOLD_SECONDS):
                    await hold.is_released.wait()
            except (TimeoutError, asyncio.CancelledError):
                # A cancellation only means that the other gateway is gone. What it has decided still counts.
                if await finish_despite_cancellation(self._learn_decision(id)) == _ABORT:
                    raise Conflict("the fork on several hosts was aborted: send the request again") from None

        try:
            await work(gate)
        finally:
            hold.has_failed = not hold.is_released.is_set()
            hold.is_ready.set()
            self._holds.pop(id, None)

    async def wait_until_ready(self, id: str) -> None:
        """Wait until a share runs. Raises NotFound if it has failed, or does not arrive soon."""
        hold = self._holds.setdefault(id, _Hold())
        try:
            async with asyncio.timeout(_ARRIVAL_SECONDS):
                await hold.has_arrived.wait()
        except TimeoutError:
            raise NotFound("share", id) from None
        finally:
            if not hold.has_arrived.is_set() and self._holds.get(id) is hold:
                del self._holds[id]
        await hold.is_ready.wait()
        if hold.has_failed:
            raise NotFound("share", id)

    def release(self, id: str) -> None:
        """Let a share be committed. Raises NotFound if it has ended."""
        hold = self._holds.get(id)
        if hold is None or not hold.has_arrived.is_set():
            raise NotFound("share", id)
        hold.is_released.set()

    async def _learn_decision(self, id: str) -> bytes:
        """Return the decision; abort the fork if there is none yet. Waits until etcd answers."""
        while True:
            try:
                return await self._decide(id, _ABORT)
            except GatewayError as error:
                log.warning("a fork on several hosts is in doubt", fork=id, reason=error.message)
                await asyncio.sleep(_RETRY_SECONDS)

    # -- the gateway that has received the request ------------------------------------------------------------------

    async def commit(self, id: str) -> None:
        """Decide that a fork is committed. Raises Conflict if one of its hosts has aborted it, or StoreUnavailable."""
        if await self._decide(id, _COMMIT) != _COMMIT:
            raise Conflict("a host has aborted the fork, because it waited for too long: send the request again")

    async def _decide(self, id: str, decision: bytes) -> bytes:
        key = self._keys.decision(id)
        lease = await self._store.grant_lease(_DECISION_SECONDS)
        outcome = await self._store.transact([etcd.is_absent(key)], [etcd.put(key, decision, lease)], [etcd.read(key)])
        return decision if outcome.succeeded else outcome.entries[0].value
