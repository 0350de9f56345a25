"""Run methods of the storage, which block, in threads, and name what uses a dataset that is busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sandbox_gateway.errors import Busy, GatewayError
from sandbox_gateway.hosts.jail_zfs.jail.holders import Holders
from sandbox_gateway.hosts.jail_zfs.storage.root import RootDataset
from sandbox_gateway.hosts.jail_zfs.storage.zfs_errors import DatasetInUse
from sandbox_gateway.hosts.threads import run_in_thread

_P = ParamSpec("_P")
_T = TypeVar("_T")


class StorageCalls:
    """Runs methods of the storage under the dataset ``root``."""

    def __init__(self, root: RootDataset, holders: Holders) -> None:
        self._root = root
        self._holders = holders

    async def run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run ``work`` in a new thread. If a dataset is busy, raises Busy with a list of what uses it."""
        try:
            return await run_in_thread(work, *args, **kwargs)
        except DatasetInUse as error:
            raise await self.explain(error) from None

    async def explain(self, error: GatewayError) -> GatewayError:
        """Return an error that lists what uses the dataset that is busy. Returns all other errors unchanged."""
        if not isinstance(error, DatasetInUse):
            return error
        holders = await self._holders.describe(error.dataset, self._root.path(error.dataset))
        return Busy(f"the dataset {error.dataset} is busy: {holders}. Stop what uses it, then try again")
