"""Choose the names of jails."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sandbox_gateway.hosts.jail_zfs.jail.jails import Jails


class JailNames:
    """Chooses the names of this gateway's jails, which begin with ``prefix``.

    ``dying_seconds``: how long to wait for a dying jail to release its name.
    """

    def __init__(self, jails: Jails, *, prefix: str, dying_seconds: float) -> None:
        self._jails = jails
        self._prefix = prefix
        self._dying_seconds = dying_seconds

    def build_default_name(self, instance: str) -> str:
        """Return the name that an instance's jail usually has."""
        return f"{self._prefix}-{instance}"

    async def choose_unused_name(self, instance: str, root: Path) -> str:
        """Return the default name, or a different name if a dying jail does not release it in time.

        ``root``: the root directory of the instance's jails.
        """
        name = self.build_default_name(instance)
        deadline = asyncio.get_running_loop().time() + self._dying_seconds
        while True:
            names_in_use = {jail.name for jail in await self._jails.list_all() if Path(jail.path) == root}
            if name not in names_in_use:
                return name
            if asyncio.get_running_loop().time() > deadline:
                return next(other for n in range(2, 1000) if (other := f"{name}-{n}") not in names_in_use)
            await asyncio.sleep(0.05)
