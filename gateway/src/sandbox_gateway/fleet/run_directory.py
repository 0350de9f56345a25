"""Which gateway has opened a plan session, or a run that applies a plan, so that all gateways find it.

A run is found by its path in the API, such as ``/plans/ID``. Its key is under the lease of the gateway: a gateway that
is started again has forgotten its runs.
"""

from __future__ import annotations

from sandbox_gateway.errors import GatewayError
from sandbox_gateway.fleet import store as etcd
from sandbox_gateway.fleet.keys import Keys
from sandbox_gateway.fleet.membership import Membership
from sandbox_gateway.fleet.store import Store, StoreUnavailable
from sandbox_gateway.log import Logger
from sandbox_gateway.tasks import BackgroundTasks

log = Logger("fleet")


class RunDirectory:
    def __init__(self, store: Store, keys: Keys, membership: Membership) -> None:
        self._store = store
        self._keys = keys
        self._membership = membership
        self._own_paths: set[str] = set()
        self._background = BackgroundTasks(log)
        membership.join_listeners.append(self._publish_again)

    async def close(self) -> None:
        await self._background.cancel()

    async def find(self, path: str) -> str:
        """Return the host whose gateway has opened a run, or "" if none has. Raises StoreUnavailable."""
        outcome = await self._store.transact([], [etcd.read(self._keys.run(path))])
        return outcome.entries[0].value.decode() if outcome.entries else ""

    async def claim(self, path: str) -> str:
        """Return the host whose gateway has opened a run: this one, unless another has. Raises StoreUnavailable."""
        lease = self._membership.lease
        if not lease:
            raise StoreUnavailable(
                "this gateway is not a member of its fleet at the moment, because etcd does not answer: check mode and "
                "runs that apply a plan must wait until it is back"
            )
        key, name = self._keys.run(path), self._membership.name.encode()
        outcome = await self._store.transact([etcd.is_absent(key)], [etcd.put(key, name, lease)], [etcd.read(key)])
        if not outcome.succeeded and outcome.entries[0].value != name:
            return outcome.entries[0].value.decode()
        if not outcome.succeeded:
            await self._store.put(key, name, lease)  # It may be under an earlier lease.
        self._own_paths.add(path)
        return self._membership.name

    def release(self, path: str) -> None:
        """Forget a run of this gateway, in the background."""
        if path in self._own_paths:
            self._own_paths.discard(path)
            self._background.start(self._delete(path))

    async def _delete(self, path: str) -> None:
        key = self._keys.run(path)
        try:
            await self._store.transact([etcd.has_value(key, self._membership.name.encode())], [etcd.delete(key)])
        except GatewayError as error:
            log.info("the key of a run stays until this gateway stops", run=path, reason=error.message)

    def _publish_again(self) -> None:
        """Claim the runs of this gateway again under its new lease."""
        for path in self._own_paths:
            self._background.start(self._claim_again(path))

    async def _claim_again(self, path: str) -> None:
        try:
            await self.claim(path)
        except GatewayError as error:
            log.warning("other gateways cannot find a run of this one", run=path, reason=error.message)
