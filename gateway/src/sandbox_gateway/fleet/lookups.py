"""Ask etcd for names and ids that the view does not know, perhaps because they are new.

Anyone can send requests for sandboxes that do not exist, even without a key. Therefore only one such request is sent to
etcd at a time, for many names, and requests of leases never wait for it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from itertools import islice

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.fleet import store as etcd
from sandbox_gateway.fleet.keys import Keys
from sandbox_gateway.fleet.store import Entry, Store
from sandbox_gateway.log import Logger
from sandbox_gateway.tasks import BackgroundTasks

_MAX_WAITING = 1000
"""Names beyond this number are answered from the view alone."""
_REF_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}")

log = Logger("fleet")


class Lookups:
    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._waiting: dict[str, asyncio.Future[list[Entry]]] = {}
        """The names that the next request asks for."""
        self._background = BackgroundTasks(log)
        self._is_running = False

    async def find(self, ref: str) -> Sequence[Entry]:
        """Return the keys of the hosts with an object that has this name or id; nothing while etcd is away."""
        if self._store.is_away or not _REF_PATTERN.fullmatch(ref):
            return ()
        if ref not in self._waiting:
            if len(self._waiting) >= _MAX_WAITING:
                return ()
            self._waiting[ref] = asyncio.get_running_loop().create_future()
        future = self._waiting[ref]
        if not self._is_running:
            self._is_running = True
            self._background.start(self._run())
        return await asyncio.shield(future)

    async def close(self) -> None:
        await self._background.cancel()

    async def _run(self) -> None:
        try:
            while self._waiting:
                refs = [*islice(self._waiting, etcd.MAX_TRANSACTION_OPERATIONS)]
                futures = {ref: self._waiting.pop(ref) for ref in refs}
                entries: dict[str, list[Entry]] = {ref: [] for ref in refs}
                try:
                    outcome = await self._store.transact([], [etcd.read(self._keys.holders(ref)) for ref in refs])
                    for entry in outcome.entries:
                        entries[entry.key.removeprefix(self._keys.objects).rpartition("/")[0]].append(entry)
                except GatewayError:
                    pass  # logged by the store; the view may be enough
                finally:
                    for ref, future in futures.items():
                        future.set_result(entries[ref])
        finally:
            self._is_running = False
